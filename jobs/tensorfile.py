"""One file of tensors in the layout of safetensors: a header in JSON, then raw little-endian data. No code in it.

    8 bytes    length of the header
    header     {"NAME": {"dtype": "F32", "shape": [3, 4], "data_offsets": [begin, end]}, ...}, padded with spaces
    data       the tensors, one after the other

The package `safetensors` reads it. A type that the layout does not have is written as bytes ("U8"): what it is stands
in the checkpoint's own list (`jobs.storage`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor

from jobs.durable import BLOCK_BYTES, FileInfo, hashed_file

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


class TensorFileError(ValueError):
    """A file is not what its list says."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Callable[[], Tensor]
    """Gives it when its turn has come: it may have to come from a GPU."""

    @property
    def size_bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self, begin: int) -> dict[str, Any]:
        """Its part of the header."""
        end = begin + self.size_bytes
        dtype, shape = stored_as(self.dtype, self.shape)
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Type and shape as they stand in the header."""
    name = _TYPES.get(dtype)
    return ("U8", (math.prod(shape) * dtype.itemsize,)) if name is None else (name, shape)


def is_known_type(dtype: torch.dtype) -> bool:
    """Whether the layout has this type."""
    return dtype in _TYPES


def write_tensors(path: Path, entries: Iterable[Entry], *, metadata: Mapping[str, str] | None = None) -> FileInfo:
    """Write a new file; when it returns the file is on the disk. metadata: texts for its header. Raises OSError."""
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # so that each begins where its type may begin
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for entry in ordered:
        header[entry.name] = entry.describe(begin)
        begin += entry.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with hashed_file(path, size_bytes=_LENGTH_BYTES + len(text) + begin) as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for entry in ordered:
            tensor = entry.value().detach().to("cpu", entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, (entry.name, tensor.shape, entry.shape)
            file.write(as_bytes(tensor))
    return file.info


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


class TensorFile:
    """A file of tensors, opened for reading. Raises TensorFileError for whatever is wrong in it.

    hashed: everything is read, in the order of the file, and hashed while it is in the processor's cache: to read and
    to verify is then one pass over the file.
    """

    def __init__(self, path: Path, *, hashed: bool = False) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128() if hashed else None
        self._file: IO[bytes] = path.open("rb", buffering=0)
        try:
            self._size_bytes = path.stat().st_size
            self._header, self._data_begin = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin_of(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Where the data of a tensor begins in the file, which must be of this type and shape."""
        if name not in self._header:
            raise TensorFileError(f"{self._path.name}: {name} is missing")
        stored, stored_shape = stored_as(dtype, shape)
        size_bytes = math.prod(shape) * dtype.itemsize
        found = self._header[name]
        match found:
            case {"dtype": str(there), "shape": [*there_shape], "data_offsets": [int(begin), int(end)]} if (
                there,
                tuple(there_shape),
            ) == (stored, stored_shape) and 0 <= begin == end - size_bytes:
                return self._data_begin + begin
        raise TensorFileError(f"{self._path.name}: {name} is {found}, not {dtype} {list(shape)}")

    def read_into(self, tensor: Tensor, begin: int) -> None:
        """Fill a contiguous tensor on the CPU. In a hashed file each begins where the one before ended, or later."""
        self._go_to(min(begin, self._size_bytes))
        view = as_bytes(tensor)
        for start in range(0, len(view), BLOCK_BYTES):
            self._read(view[start : start + BLOCK_BYTES])

    def finish(self) -> str:
        """Read the rest of a hashed file; its xxh3-128."""
        assert self._digest is not None
        self._go_to(self._size_bytes)
        return str(self._digest.hexdigest())

    def _go_to(self, place: int) -> None:
        if self._digest is None:
            self._file.seek(place)
            return
        gap_bytes = place - self._file.tell()
        if gap_bytes < 0:
            raise TensorFileError(f"{self._path.name}: two tensors lie upon each other")
        scratch = memoryview(bytearray(min(gap_bytes, BLOCK_BYTES)))
        while gap_bytes:
            part = scratch[:gap_bytes]
            self._read(part)
            gap_bytes -= len(part)

    def _read(self, view: memoryview) -> None:
        rest = view
        while rest:
            count = self._file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise TensorFileError(f"{self._path.name} ends too early")
            rest = rest[count:]
        if self._digest is not None:
            self._digest.update(view)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        prefix = bytearray(_LENGTH_BYTES)
        self._read(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(_MAX_HEADER_BYTES, self._size_bytes - _LENGTH_BYTES):
            raise TensorFileError(f"{self._path.name} says that its header has {length:,} bytes")
        text = bytearray(length)
        self._read(memoryview(text))
        try:
            header = json.loads(text)
        except ValueError as error:
            raise TensorFileError(f"{self._path.name} has a header that is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise TensorFileError(f"{self._path.name} has a header that is no object")
        return header, _LENGTH_BYTES + length
