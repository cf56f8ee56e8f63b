"""Files that are on the disk when the call returns, with a hash that was made while they were written."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

Bytes = bytes | bytearray | memoryview
BLOCK_BYTES = 1 << 18
"""What is hashed at once: it is still in the processor's cache when it is written, or has just been read."""


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What a file must be to be the one that was written."""

    size_bytes: int
    xxh3_128: str


class HashedFile:
    """A file that is being written, by `hashed_file`."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._digest = xxhash.xxh3_128()
        self._size_bytes = 0

    @property
    def info(self) -> FileInfo:
        """Size and hash of what was written until now."""
        return FileInfo(size_bytes=self._size_bytes, xxh3_128=self._digest.hexdigest())

    def write(self, data: Bytes) -> None:
        """Append all of it."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            part = view[start : start + BLOCK_BYTES]
            self._digest.update(part)
            self._size_bytes += len(part)
            while part:
                part = part[self._raw.write(part) :]


@contextmanager
def hashed_file(path: Path, *, size_bytes: int = 0) -> Iterator[HashedFile]:
    """A new file; it is on the disk when the block ends. Raises OSError with its name, FileExistsError among them.

    size_bytes: how long it will be, where that is known: a full disk or quota is then an error before the first byte.
    """
    with path.open("xb", buffering=0) as raw:
        try:
            reserve(raw.fileno(), size_bytes)
            yield HashedFile(raw)
            os.fsync(raw.fileno())
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error  # a write names no file


def write_hashed(path: Path, text: str) -> FileInfo:
    """Write a whole small new file; it is on the disk."""
    with hashed_file(path) as file:
        file.write(text.encode())
    return file.info


def write_durably(path: Path, text: str) -> None:
    """Write a small file under another name, bring it to the disk, and give it its name."""
    unnamed = unfinished_name(path)
    unnamed.write_text(text, encoding="utf-8")
    fsync(unnamed)
    unnamed.rename(path)


def unfinished_name(path: Path) -> Path:
    """What `write_durably` calls a file until it is whole; a crash may leave it."""
    return path.with_name(f".{path.name}.tmp")


def reserve(descriptor: int, size_bytes: int) -> None:
    """Set aside the room for a file, where the file system can; that counts against a quota too. Raises OSError.

    Linux's own call and not `os.posix_fallocate`: where the file system cannot, that one writes all the bytes.
    """
    if size_bytes and _fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def free_bytes(folder: Path) -> int:
    """What may still be written to the file system of a folder. A quota is not in it. Raises OSError."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """xxh3-128 of a file, read once. By read and not by mmap: a disk that fails is an error then, not a SIGBUS."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
