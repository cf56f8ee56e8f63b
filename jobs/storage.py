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
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from jobs.durable import FileInfo, write_hashed
from jobs.private_torch import narrow_tensor_by_index
from jobs.tensorfile import Entry, TensorFile, TensorFileError, write_tensors

TENSORS = "tensors.json"
FORMAT = 2
FILE = re.compile(r"rank-\d+\.safetensors")
T = TypeVar("T")
_TYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_Place = tuple[str, tuple[int, ...]]
"""A tensor, and the offsets of a chunk of it."""
# Torch warns where a rank writes or reads alone, which is meant here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor, or a chunk of one, that this rank writes."""

    key: str
    """Name of the whole tensor."""
    name: str
    """Its name in the file."""
    tensor: Tensor
    """Memory of the training itself, or a copy of it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which rank writes what: a tensor that all have is written by one, of a sharded one each writes its part."""

    rank: int
    _items: tuple[WriteItem, ...]
    _listed: str | None
    """On rank 0: the list of all tensors."""
    size_bytes: int
    """Of all tensors."""
    _of: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and type of each tensor that it is for."""

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it is for a state of such tensors."""
        return self._of == _shapes(tensors)

    @property
    def file(self) -> str:
        """What this rank writes."""
        return f"rank-{self.rank}.safetensors"

    def parts(self, tensors: Mapping[str, Tensor]) -> list[Part]:
        """What this rank writes of a state: memory of the training, nothing is copied."""
        planner = _planner()
        planner.set_up_planner(dict(tensors), is_coordinator=False)
        return [_part(item, planner) for item in self._items]

    def write_part(self, folder: Path, parts: Sequence[Part]) -> dict[str, FileInfo]:
        """Write the file of this rank to the disk; nothing where it has no part. Raises OSError."""
        if not parts:
            return {}
        entries = [
            Entry(
                name=part.name,
                dtype=part.tensor.dtype,
                shape=tuple(part.tensor.shape),
                value=partial(_same, part.tensor),
            )
            for part in parts
        ]
        return {self.file: write_tensors(folder / self.file, entries)}

    def write_list(self, folder: Path) -> dict[str, FileInfo]:
        """Write the list of all tensors. On rank 0 alone. Raises OSError."""
        assert self._listed is not None, "the list is rank 0's"
        return {TENSORS: write_hashed(folder / TENSORS, self._listed)}


def plan(tensors: Mapping[str, Tensor], group: ProcessGroup | None, *, alone: int | None = None) -> Layout:
    """Agree on who writes what, all ranks of the group together; nothing is written.

    It holds as long as names, types and shapes are the same. `alone`: this rank, of that number, writes everything that
    it has, and no other is asked.
    """
    planning = _Planning(alone)
    save(dict(tensors), storage_writer=planning, planner=_planner(), process_group=group, no_dist=alone is not None)
    return planning.layout(tensors)


class _Planning(StorageWriter):
    """Takes from torch's way of saving who writes what, and writes nothing."""

    def __init__(self, alone: int | None) -> None:
        self._rank = alone or 0
        self._alone = alone
        self._items: tuple[WriteItem, ...] = ()
        self._places: dict[_Place, str] = {}
        self._listed: str | None = None

    def layout(self, tensors: Mapping[str, Tensor]) -> Layout:
        """What was agreed on."""
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        return Layout(
            rank=self._rank, _items=self._items, _listed=self._listed, size_bytes=size_bytes, _of=_shapes(tensors)
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Torch says which rank this is."""
        if self._alone is None:
            self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As torch planned it; on rank 0, which notes in whose file each chunk will be."""
        for number, of_rank in enumerate(plans):
            rank = number if self._alone is None else self._alone
            for item in of_rank.items:
                self._places[item.index.fqn, tuple(item.index.offset or ())] = f"rank-{rank}.safetensors"
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Note what this rank writes."""
        self._items = tuple(plan.items)
        return _finished([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the list, on rank 0."""
        self._listed = json.dumps({"format": FORMAT, "tensors": _describe(metadata, self._places)}) + "\n"

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


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _part(item: WriteItem, planner: SavePlanner) -> Part:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    value = planner.resolve_data(item)
    assert isinstance(value, Tensor)
    shape = tuple(data.chunk.sizes)
    name = _name_in_file(item.index.fqn, tuple(item.index.offset or ()), shape, tuple(data.size))
    return Part(key=item.index.fqn, name=name, tensor=value.detach())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


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
    try:
        return parse_list(json.loads((folder / TENSORS).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{TENSORS} cannot be read: {error!r}") from error


def parse_list(content: Any) -> tuple[dict[str, TensorStorageMetadata], dict[_Place, str]]:
    """The tensors of a list, and in which file each chunk is. Raises what a list that is none gives rise to."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[_Place, str] = {}
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}; this version reads {FORMAT}")
    for name, described in content["tensors"].items():
        tensors[name] = _tensor_of(described)
        places.update(_places_of(name, described["chunks"]))
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
