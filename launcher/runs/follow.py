"""Reading files that grow."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


class Tail:
    """The whole lines that were added to a file since the last look. The file need not exist yet.

    `begin_bytes` is where the first look begins: `size_bytes(path)` leaves out what is there already.
    """

    def __init__(self, path: Path, *, begin_bytes: int = 0) -> None:
        self.path = path
        self._begin_bytes = begin_bytes
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> bytes:
        """What is new, up to the last end of a line."""
        if self._file is None:
            if not self.path.exists():
                return b""
            self._file = self.path.open("rb")
            self._file.seek(self._begin_bytes)
        whole, end, self._rest = (self._rest + self._file.read()).rpartition(b"\n")
        return whole + end

    def drain(self) -> bytes:
        """What is new, and an unfinished last line with an end of its own: nothing is written any more."""
        text = self.read()
        rest, self._rest = self._rest, b""
        return text + rest + b"\n" if rest else text

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def size_bytes(path: Path) -> int:
    """The size of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0
