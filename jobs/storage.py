"""Storage of torch.distributed.checkpoint without a pickle: tensors in files of tensors, their list in JSON.

    tensors.json         {"format": 2, "tensors": {"model/0.weight": {"dtype": "float32", "shape": [3, 4],
                          "chunks": [{"offsets": [0, 0], "shape": [3, 4], "file": "rank-0.safetensors"}]}}}
    rank-<r>.safetensors what rank r wrote: a tensor that all ranks have is written by one, of a sharded one each
                         writes its part

What is written by some number of ranks is read by any other: torch plans who reads which part of which chunk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from jobs.durable import FileInfo, write_hashed
from jobs.tensorfile import Entry, TensorFile, TensorFileError, write_tensors

TENSORS = "tensors.json"
FORMAT = 2
FILE = re.compile(r"rank-\d+\.safetensors")
T = TypeVar("T")
_TYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_Place = tuple[str, tuple[int, ...]]
"""A tensor, and the offsets of a chunk of it."""


@dataclass(frozen=True)
class _Written:
    """Where a chunk went."""

    file: str
    info: FileInfo


class Writer(StorageWriter):
    """Writes into a folder, all ranks together. Afterwards rank 0 has all files in `files`."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, FileInfo] = {}
        self._folder, self._rank = folder, 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Torch says which rank this is."""
        self._rank = int(kwargs.get("rank", 0))
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As torch planned it."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the part of this rank, one file, to the disk."""
        name = f"rank-{self._rank}.safetensors"
        entries = [_entry(item, planner) for item in plan.items]
        results: list[WriteResult] = []
        if entries:
            written = _Written(name, write_tensors(self._folder / name, entries))
            results = [
                WriteResult(index=item.index, size_in_bytes=entry.size_bytes, storage_data=written)
                for item, entry in zip(plan.items, entries, strict=True)
            ]
        return _finished(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list. On rank 0, after all ranks have written."""
        places: dict[_Place, str] = {}
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            places[result.index.fqn, tuple(result.index.offset or ())] = written.file
            self.files[written.file] = written.info
        text = json.dumps({"format": FORMAT, "tensors": _describe(metadata, places)}) + "\n"
        self.files[TENSORS] = write_hashed(self._folder / TENSORS, text)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is never found by the name of a place."""
        return False


class Reader(StorageReader):
    """Reads a folder. Raises TensorFileError where the list cannot be read.

    `verify`: files that this rank reads whole, whatever it needs of them; afterwards their hashes are in `hashes`.
    """

    def __init__(self, folder: Path, *, verify: Collection[str] = ()) -> None:
        self.hashes: dict[str, str] = {}
        self._folder, self._verify = folder, frozenset(verify)
        self.tensors, self._places = _read_list(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list, as torch wants it."""
        return Metadata(state_dict_metadata=dict(self.tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As torch planned it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, file by file."""
        by_file: dict[str, dict[_Place, list[ReadItem]]] = {name: {} for name in self._verify}
        for item in plan.items:
            place = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            by_file.setdefault(self._places[place], {}).setdefault(place, []).append(item)
        for name, chunks in sorted(by_file.items()):
            self._read_file(name, chunks, planner)
        return _finished(None)

    def _read_file(self, name: str, chunks: Mapping[_Place, list[ReadItem]], planner: LoadPlanner) -> None:
        hashed = name in self._verify
        with TensorFile(self._folder / name, hashed=hashed) as file:
            begins = {place: file.begin_of(*self._stored(place)) for place in chunks}
            for place in sorted(chunks, key=begins.__getitem__):
                self._read_chunk(file, begins[place], place, chunks[place], planner)
            if hashed:
                self.hashes[name] = file.finish()

    def _stored(self, place: _Place) -> tuple[str, torch.dtype, tuple[int, ...]]:
        """Name, type and shape of a chunk in its file."""
        name, offset = place
        meta = self.tensors[name]
        shape = next(tuple(chunk.sizes) for chunk in meta.chunks if tuple(chunk.offsets) == offset)
        return _name_in_file(name, offset, shape, tuple(meta.size)), meta.properties.dtype, shape

    def _read_chunk(
        self, file: TensorFile, begin: int, place: _Place, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        _, dtype, shape = self._stored(place)
        targets = [planner.resolve_tensor(item).detach() for item in items]
        if len(items) == 1 and tuple(items[0].lengths) == shape and _is_readable_into(targets[0], dtype):
            file.read_into(targets[0], begin)
        else:
            chunk = torch.empty(shape, dtype=dtype)
            file.read_into(chunk, begin)
            for item, target in zip(items, targets, strict=True):
                target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is never found by the name of a place."""
        return False


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    shape = tuple(data.chunk.sizes)
    return Entry(
        name=_name_in_file(item.index.fqn, tuple(item.index.offset or ()), shape, tuple(data.size)),
        dtype=data.properties.dtype,
        shape=shape,
        value=partial(_resolve, planner, item),
    )


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, Tensor)
    return value


def _name_in_file(name: str, offset: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> str:
    """A tensor's name; for a part of one with the offsets of that part."""
    return name if shape == whole else f"{name}[{','.join(map(str, offset))}]"


def _is_readable_into(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()


def _describe(metadata: Metadata, places: Mapping[_Place, str]) -> dict[str, Any]:
    described = {}
    for name, meta in metadata.state_dict_metadata.items():
        assert isinstance(meta, TensorStorageMetadata), f"{name} is no tensor"
        chunks = [
            {
                "offsets": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": places[name, tuple(chunk.offsets)],
            }
            for chunk in meta.chunks
        ]
        dtype = str(meta.properties.dtype).removeprefix("torch.")
        described[name] = {"dtype": dtype, "shape": list(meta.size), "chunks": chunks}
    return described


def _read_list(folder: Path) -> tuple[dict[str, TensorStorageMetadata], dict[_Place, str]]:
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[_Place, str] = {}
    try:
        content = json.loads((folder / TENSORS).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}; this version reads {FORMAT}")
        for name, described in content["tensors"].items():
            tensors[name] = _tensor_of(described)
            places.update(_places_of(name, described["chunks"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{TENSORS} cannot be read: {error!r}") from error
    return tensors, places


def _tensor_of(described: Mapping[str, Any]) -> TensorStorageMetadata:
    size = torch.Size(described["shape"])
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(chunk["offsets"]), sizes=torch.Size(chunk["shape"]))
        for chunk in described["chunks"]
    ]
    # Torch reads what there is: where a part is missing it would leave in memory what was there before.
    if sum(chunk.sizes.numel() for chunk in chunks) != size.numel() or not all(
        _is_inside(chunk, size) for chunk in chunks
    ):
        raise ValueError(f"the parts do not make up a tensor of shape {list(size)}: {described['chunks']}")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_TYPES[described["dtype"]]), size=size, chunks=chunks
    )


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    begins_ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
    return all(begin >= 0 and length >= 0 and begin + length <= end for begin, length, end in begins_ends)


def _places_of(name: str, chunks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[_Place, str]]:
    for chunk in chunks:
        if FILE.fullmatch(chunk["file"]) is None:
            raise ValueError(f"{chunk['file']!r} is not the name of a file of tensors")
        yield (name, tuple(chunk["offsets"])), chunk["file"]


def _finished(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
