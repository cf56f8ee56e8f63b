"""Files that travel between the disks of a run: their bytes, over the process group of the checkpoints.

No connection is made for it and nothing is unpickled. A file for several disks goes from one to the next, block by
block, so that the one that has it sends it once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from jobs.durable import FileInfo, HashedFile, hashed_file
from jobs.memory import BLOCK_BYTES


class ArrivedWrongError(OSError):
    """A file has arrived that is another than was sent."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A file that travels. The same on all ranks."""

    name: str
    size_bytes: int
    chain: tuple[int, ...]
    """The rank that has it, then those that get it, each from the one before."""
    xxh3_128: str | None = None
    """What it must be; None: the file goes on growing, and what is sent is its beginning, or what follows `begin`."""
    begin: int = 0
    """Where in the file to begin; with `xxh3_128` always at 0."""


def carry(parcels: Iterable[Parcel], place: Callable[[str], Path], group: ProcessGroup | None) -> None:
    """Bring parcels to where they belong; all ranks together. `place`: where a file of this name is, on this rank.

    A received one is on the disk. Raises OSError, after the last one: what goes wrong with one file on one rank does
    not keep the others waiting for theirs.
    """
    rank, errors = dist.get_rank(group), []
    block = torch.empty(0, dtype=torch.uint8)
    for parcel in parcels:
        if rank not in parcel.chain:
            continue
        if len(block) < min(BLOCK_BYTES, parcel.size_bytes):
            block = torch.empty(min(BLOCK_BYTES, parcel.size_bytes), dtype=torch.uint8)
        error = _Trip(parcel, place(parcel.name), rank, group).go(block)
        if error is not None:
            errors.append(error)
    if errors:
        raise errors[0]


class _Trip:
    """Of one parcel, as one rank of its chain sees it."""

    def __init__(self, parcel: Parcel, path: Path, rank: int, group: ProcessGroup | None) -> None:
        at = parcel.chain.index(rank)
        self._parcel, self._path, self._group = parcel, path, group
        self._before = parcel.chain[at - 1] if at else None
        self._after = parcel.chain[at + 1] if at + 1 < len(parcel.chain) else None
        self._error: OSError | None = None
        self._reader: FileIO | None = None
        self._writer: HashedFile | None = None
        self._appended: FileIO | None = None

    def go(self, block: Tensor) -> OSError | None:
        """All blocks of it; returns what went wrong."""
        with ExitStack() as stack:
            self._try(lambda: self._open(stack))
            left = self._parcel.size_bytes
            while left:
                view = block[: min(len(block), left)]
                self._pass_on(view)
                left -= len(view)
            self._try(lambda: self._end(stack))
            with suppress(OSError):  # of a file that has failed before
                stack.close()
        self._try(self._compare)
        return self._error

    def _open(self, stack: ExitStack) -> None:
        parcel = self._parcel
        if self._before is None:
            self._reader = stack.enter_context(FileIO(self._path, "rb"))
            self._reader.seek(parcel.begin)
        elif parcel.xxh3_128 is not None:
            self._writer = stack.enter_context(hashed_file(self._path, size_bytes=parcel.size_bytes))
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._appended = stack.enter_context(FileIO(self._path, "r+b" if parcel.begin else "wb"))
            self._appended.truncate(parcel.begin)
            self._appended.seek(parcel.begin)

    def _end(self, stack: ExitStack) -> None:
        """It is on the disk then."""
        if self._appended is not None:
            os.fsync(self._appended.fileno())
        stack.close()

    def _pass_on(self, view: Tensor) -> None:
        data: memoryview = view.numpy().data
        if self._before is not None:
            dist.recv(view, src=self._before, group=self._group)
        else:
            self._try(lambda: self._read(data))
        if self._after is not None:
            dist.send(view, dst=self._after, group=self._group)
        if self._before is not None:
            self._try(lambda: self._write(data))

    def _read(self, data: memoryview) -> None:
        assert self._reader is not None
        while data:
            count = self._reader.readinto(data)
            if not count:
                raise OSError(f"{self._path} is shorter than it was")
            data = data[count:]

    def _write(self, data: memoryview) -> None:
        if self._writer is not None:
            self._writer.write(data)
            return
        assert self._appended is not None
        while data:
            data = data[self._appended.write(data) :]

    def _compare(self) -> None:
        if self._writer is None:
            return
        parcel, found = self._parcel, self._writer.info
        if found != FileInfo(size_bytes=parcel.size_bytes, xxh3_128=parcel.xxh3_128 or ""):
            raise ArrivedWrongError(
                f"{parcel.name} has arrived with the hash {found.xxh3_128} instead of {parcel.xxh3_128}"
            )

    def _try(self, action: Callable[[], None]) -> None:
        """Whatever is wrong with the file here, the blocks go on to whom they are for."""
        if self._error is not None:
            return
        try:
            action()
        except OSError as error:
            self._error = error
