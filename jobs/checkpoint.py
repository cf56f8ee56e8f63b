"""Checkpoints: complete or absent, verified before they are used, one decision for all ranks.

checkpoints/step-200/            .metadata, __0_0.distcp ...   tensors (torch.distributed.checkpoint)
                                 state.json                    step, samples_seen, metrics ...
                                 manifest.json                 size and hash of each file, written last
checkpoints/latest               the name of the newest one
checkpoints/step-300.tmp-2/      being written by attempt 2, or left by it
checkpoints/step-100.broken-2/   found broken by attempt 2
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from jobs.manifest import BrokenError, fsync, seal, verify, write_durably

LATEST = "latest"
STATE = "state.json"
METRICS = "metrics.json"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not fit this model."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training stands, beside its tensors."""

    step: int = 0
    """Optimizer updates done."""
    samples_seen: int = 0
    metrics: Mapping[str, float] | None = None
    """Of the evaluation at this step; None where it was not evaluated."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written."""

    name: str
    size_bytes: int
    best: bool


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(
        self, folder: Path, *, attempt: int, keep: int, best: str | None, record: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self._attempt, self._keep, self._best, self._record = attempt, keep, best, dict(record or {})

    def choose(self) -> str | None:
        """Name of the newest checkpoint that is complete and verified; None where there is none at all.

        For one rank only. Removes what dead attempts left half-written. Raises CheckpointError where there are
        checkpoints and all are broken: to train from zero over them is for a person to decide.
        """
        for leftover in self.folder.glob("step-*.tmp-*"):
            shutil.rmtree(leftover)
        broken = []
        for name in reversed(complete(self.folder)):
            if not self.is_intact(name):
                broken.append(name)
                continue
            for other in broken:
                (self.folder / other).rename(self.folder / f"{other}.broken-{self._attempt}")
            return name
        if broken:
            raise CheckpointError(
                f"{self.folder}: every checkpoint is broken ({', '.join(broken)}); move them away to start from zero"
            )
        return None

    def load(self, name: str, net: nn.Module, optimizer: Optimizer, group: ProcessGroup | None) -> Progress:
        """Restore model and optimizer in place. Raises CheckpointError where the checkpoint is of another model."""
        load_tensors(self.folder / name, net, optimizer, group)
        return read_progress(self.folder / name)

    def save(self, net: nn.Module, optimizer: Optimizer, progress: Progress, group: ProcessGroup | None) -> Saved:
        """Write a checkpoint, all ranks together; when it returns it is complete on disk and the old ones are gone."""
        name = f"step-{progress.step}"
        unfinished = self.folder / f"{name}.tmp-{self._attempt}"
        try:
            save(tensors(net, optimizer), checkpoint_id=unfinished, process_group=group)
        except CheckpointException as error:  # a BaseException, which nobody expects
            raise CheckpointError(f"{unfinished}: {error}") from error
        size_bytes = 0
        if dist.get_rank() == 0:
            size_bytes = self._commit(unfinished, name, progress)
            self._prune()
        dist.barrier(group)
        return Saved(name=name, size_bytes=size_bytes, best=name == self.best())

    def add_metrics(self, progress: Progress) -> None:
        """Note the evaluation of a checkpoint that was saved before it (by a stop). For one rank only."""
        assert progress.metrics is not None
        write_durably(self.folder / f"step-{progress.step}" / METRICS, json.dumps(dict(progress.metrics)) + "\n")

    def best(self) -> str | None:
        """Name of the best checkpoint by the metric of the recipe; None without one."""
        if self._best is None:
            return None
        metric, direction = self._best.rsplit(" ", 1)
        sign = 1 if direction == "max" else -1
        scores = []
        for name in complete(self.folder):
            metrics = read_progress(self.folder / name).metrics or {}
            if metric in metrics:
                scores.append((sign * metrics[metric], step_of(name), name))
        return max(scores)[2] if scores else None

    def is_intact(self, name: str) -> bool:
        """Whether a checkpoint reads back as it was written; says what does not."""
        try:
            verify(self.folder / name)
        except BrokenError as error:
            print(f"checkpoint {name} is broken: {error}", flush=True)
            return False
        return True

    def _commit(self, unfinished: Path, name: str, progress: Progress) -> int:
        state = {
            "format": 1,
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "world_size": dist.get_world_size(),
            "torch": torch.__version__,
            **self._record,
        }
        write_durably(unfinished / STATE, json.dumps(state, indent=1) + "\n")
        if progress.metrics is not None:
            write_durably(unfinished / METRICS, json.dumps(dict(progress.metrics)) + "\n")
        size_bytes = seal(unfinished)
        unfinished.rename(self.folder / name)
        fsync(self.folder)
        write_durably(self.folder / LATEST, f"{name}\n")
        fsync(self.folder)
        return size_bytes

    def _prune(self) -> None:
        names = complete(self.folder)
        kept = {*names[-self._keep :], self.best()}
        for name in names:
            if name not in kept:  # a rename first: half-deleted never looks like broken
                (self.folder / name).rename(self.folder / f"{name}.tmp-deleted")
        for path in [*self.folder.glob("step-*.tmp-*"), *self.folder.glob("step-*.broken-*")]:
            shutil.rmtree(path)


def complete(folder: Path) -> list[str]:
    """Names of the committed checkpoints of a folder, oldest first."""
    names = [path.name for path in folder.glob("step-*") if _NAME.fullmatch(path.name)] if folder.exists() else []
    return sorted(names, key=step_of)


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match.group(1))


def read_progress(path: Path) -> Progress:
    """The JSON part of a checkpoint."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    metrics = json.loads((path / METRICS).read_text(encoding="utf-8")) if (path / METRICS).exists() else None
    return Progress(step=state["step"], samples_seen=state["samples_seen"], metrics=metrics)


def tensors(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that is saved as a tensor, by name: `model/NAME` and `optimizer/NAME/KEY`.

    Learning rates and other numbers of the optimizer are functions of recipe and step, so they are not state.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    state = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                state[f"optimizer/{names[parameter]}/{key}"] = value
    return state


def load_tensors(path: Path, net: nn.Module, optimizer: Optimizer | None, group: ProcessGroup | None) -> None:
    """Restore a model in place, and an optimizer where one is given. Raises CheckpointError where they do not fit."""
    saved = saved_tensors(path)
    wanted = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    _check_fit(path, wanted, saved)
    parameters = dict(net.named_parameters())
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, meta in saved.items() if optimizer is not None else ():
        if key.startswith("optimizer/"):
            _, name, slot = key.split("/")
            tensor = torch.empty(meta.size, dtype=meta.properties.dtype, device=parameters[name].device)
            state.setdefault(parameters[name], {})[slot] = wanted[key] = tensor
    try:
        load(wanted, checkpoint_id=path, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: {error}") from error
    if optimizer is not None:
        optimizer.state.update(state)


def saved_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of the tensors in a checkpoint."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: meta for key, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}


def resolve_init(text: str) -> Path:
    """The checkpoint that `init_from` names: a checkpoint folder, or the newest good one of a run's folder.

    Raises CheckpointError where there is none.
    """
    path = Path(text).expanduser()
    candidates = (
        [path]
        if (path / STATE).exists()
        else [path / "checkpoints" / name for name in reversed(complete(path / "checkpoints"))]
    )
    for candidate in candidates:
        try:
            verify(candidate)
        except BrokenError as error:
            print(f"checkpoint.init_from: {candidate} is broken: {error}", flush=True)
            continue
        return candidate
    raise CheckpointError(f"checkpoint.init_from: {text} is neither a checkpoint nor a run with one that is complete")


def _check_fit(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> None:
    differences = []
    for key in sorted({*wanted, *(key for key in saved if key.startswith("model/"))}):
        name = key.removeprefix("model/")
        if key not in saved:
            differences.append(f"{name}: not in the checkpoint")
        elif key not in wanted:
            differences.append(f"{name}: not in the model")
        elif tuple(saved[key].size) != tuple(wanted[key].shape):
            differences.append(f"{name}: {tuple(saved[key].size)} in the checkpoint, {tuple(wanted[key].shape)} here")
    if differences:
        raise CheckpointError("\n  ".join([f"{path} is of another model:", *differences]))
