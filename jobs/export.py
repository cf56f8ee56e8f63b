"""Writes the model of a checkpoint into one file of the safetensors layout: what `launch export` starts.

Standard input is one JSON object:
    {"checkpoint": FOLDER, "file": PATH, "run_id": "..."}
and the last line of standard output too:
    {"step", "samples_seen", "metrics", "weights_sha256", "tensors", "size_bytes"}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.evaluate import Order, answer
from jobs.folders import progress_of
from jobs.manifest import verify
from jobs.state import CheckpointError, open_tensors, read_tensors
from jobs.tensorfile import Entry, is_known_type, write_tensors
from jobs.weights import sha256_of

_MODEL = "model/"


def export_checkpoint(order: Order) -> dict[str, Any]:
    """Write the file. Any number of ranks may have written the checkpoint, with any strategy.

    Raises CheckpointError or BrokenError for a checkpoint that cannot be used, or has tensors of a type that the layout
    does not have; OSError for a place that cannot be written to.
    """
    folder, file = Path(order["checkpoint"]), Path(order["file"])
    verify(folder)
    tensors = read_model(folder)
    strange = sorted(f"{name} ({each.dtype})" for name, each in tensors.items() if not is_known_type(each.dtype))
    if strange:
        raise CheckpointError(f"{folder}: safetensors has no type for {', '.join(strange)}")
    progress, weights = progress_of(folder), sha256_of(sorted(tensors.items()))
    about = {"run_id": order["run_id"], "step": str(progress.step), "weights_sha256": weights}
    info = write_tensors(file, _entries(tensors), metadata={"format": "pt", **about})
    return {
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "metrics": None if progress.metrics is None else dict(progress.metrics),
        "weights_sha256": weights,
        "tensors": len(tensors),
        "size_bytes": info.size_bytes,
    }


def read_model(folder: Path) -> dict[str, Tensor]:
    """The model of a checkpoint, whole and in memory, under the names of its `state_dict()`."""
    reader = open_tensors(folder)
    saved = {name: meta for name, meta in reader.tensors.items() if name.startswith(_MODEL)}
    into = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in saved.items()}
    read_tensors(reader, folder, into, None, alone=True)
    return {name.removeprefix(_MODEL): tensor for name, tensor in into.items()}


def _entries(tensors: Mapping[str, Tensor]) -> list[Entry]:
    return [
        Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), value=partial(_same, tensor))
        for name, tensor in tensors.items()
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


if __name__ == "__main__":
    sys.exit(answer(export_checkpoint))
