"""What the workers print: whole lines into one file per rank, and onto the console what a person wants to see."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from launcher import redact
from launcher.agent.loop import Loop

_MAX_LINE_BYTES = 1 << 20
"""A longer "line" (a progress bar that never ends one) is written in pieces."""
MAX_LOG_BYTES = 1 << 30
"""Of one rank in one attempt. What comes after is dropped, and said in the log."""


class LineFile:
    """A file of whole lines, several writers at once included (O_APPEND, one write each), and no secrets."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._left_bytes = max_bytes
        self._lost_bytes = 0
        self._redactor = redact.own()

    def write(self, lines: bytes) -> None:
        """Append bytes that end in a line end."""
        if self._left_bytes <= 0:
            return
        lines = self._redactor.data(lines)
        self._left_bytes -= len(lines)
        if self._left_bytes <= 0:
            lines += b"launch: this log has reached its limit; what follows is dropped\n"
        if self._lost_bytes:
            lines = b"\nlaunch: the disk was full; %d bytes are lost here\n" % self._lost_bytes + lines
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._lost_bytes += len(view)  # what a worker prints is no reason to end it
        else:
            self._lost_bytes = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def say(console: Path, text: str) -> None:
    """Put a line of ours onto the console of a run, beside what the workers print."""
    file = LineFile(console)
    try:
        file.write(f"launch | {text}\n".encode(errors="backslashreplace"))
    finally:
        file.close()


class Stream:
    """The read end of a worker's stdout or stderr, cut into whole lines without secrets."""

    def __init__(
        self, fd: int, on_lines: Callable[[bytes], None], on_data: Callable[[bytes], None] = lambda data: None
    ) -> None:
        """`on_data` gets everything as it comes, for a look at lines that are not finished."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_lines, self._on_data = on_lines, on_data
        self._rest = b""
        self._redactor = redact.own()

    def fileno(self) -> int:
        """The descriptor, for the loop."""
        return self._fd

    def read(self) -> bool:
        """Take what is there and hand on its whole lines. False at the end of the stream."""
        try:
            data = os.read(self._fd, 1 << 18)
        except BlockingIOError:
            return True
        self._take(data)
        return bool(data)

    def drain_and_close(self) -> None:
        """Take what a worker that has ended left in the pipe, without waiting: its children may hold the pipe open.

        No more than the pipe can hold, since one of them may go on writing into it for ever.
        """
        left_bytes = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        while left_bytes > 0:
            try:
                data = os.read(self._fd, left_bytes)
            except BlockingIOError:
                break
            if not data:
                break
            left_bytes -= len(data)
            self._take(data)
        if self._rest:
            self._on_lines(self._redactor.data(self._rest) + b"\n")
            self._rest = b""
        os.close(self._fd)

    def _take(self, data: bytes) -> None:
        self._on_data(data)
        whole, line_end, rest = (self._rest + data).rpartition(b"\n")
        if len(rest) > _MAX_LINE_BYTES + self._redactor.longest_bytes:
            rest = self._redactor.data(rest)
            # What may be the beginning of a secret waits for its end.
            cut = max(0, len(rest) - self._redactor.longest_bytes)
            whole, line_end, rest = whole + line_end + rest[:cut], b"\n", rest[cut:]
        self._rest = rest
        if line_end:
            self._on_lines(self._redactor.data(whole) + line_end)


class Streams:
    """The streams of one process, each read until it ends."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._open: list[Stream] = []

    def add(self, stream: Stream) -> None:
        """Read it from now on."""
        self._open.append(stream)

        def ready() -> None:
            if not stream.read():
                self._open.remove(stream)
                self._end(stream)

        self._loop.add(stream, ready)

    def close(self) -> None:
        """Read what is still there: the process has ended, and nobody writes any more."""
        for stream in self._open:
            self._end(stream)
        self._open.clear()

    def _end(self, stream: Stream) -> None:
        self._loop.remove(stream)
        stream.drain_and_close()


def prefixed(lines: bytes, prefix: str) -> bytes:
    """Put `node:rank ` before each line."""
    mark = prefix.encode() + b" "
    return b"".join(mark + line + b"\n" for line in lines[:-1].split(b"\n"))
