"""metrics.jsonl: the record of a training. `launcher.runs.metrics` has its lines, and reads them.

Rank 0 writes it. What it has not brought to the file yet the other ranks remember: they know the same of each step, and
whoever of them keeps the state of the training keeps these lines with it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.runs.events import read_lines
from launcher.runs.metrics import Record

FLUSH_S = 0.5


class MetricsLog:
    """Appends lines; whole ones only, many at a time, never rewriting one."""

    def __init__(self, path: Path, *, attempt: int, resumed_from: int, kept: Sequence[Record] = ()) -> None:
        """`kept`: lines of earlier attempts that were kept with the state; those that are not in the file are added."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(path)
        self.written = 0
        """How many of this attempt's lines are in the file, the first one not counted."""
        missing = _missing(path, kept)
        self._attempt = attempt
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lines: list[str] = []
        self._flushed_at = time.monotonic()
        for line in (*missing, {"attempt": attempt, "resumed_from": resumed_from}):
            self._add(line)
        self.flush()
        self.written = 0

    def write(self, step: int, **values: float) -> None:
        """Add what is known about a step. It is on disk within FLUSH_S, or at the next line after that."""
        self._add(record_of(self._attempt, step, values))
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        if self._lines:
            os.write(self._fd, "".join(self._lines).encode())
            self.written += len(self._lines)
            self._lines = []
        self._flushed_at = time.monotonic()

    def unwritten(self) -> list[Record]:
        """The lines that are not in the file yet. From any thread."""
        return [json.loads(line) for line in self._lines]

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        os.close(self._fd)

    def _add(self, line: Record) -> None:
        self._lines.append(json.dumps(line) + "\n")


class MetricsMemory:
    """The same lines on another rank, as long as rank 0 has not brought them to the file."""

    def __init__(self, *, attempt: int) -> None:
        self._attempt, self._forgotten = attempt, 0
        self._lines: deque[Record] = deque()

    def write(self, step: int, **values: float) -> None:
        """Note what is known about a step."""
        self._lines.append(record_of(self._attempt, step, values))

    def forget(self, written: int) -> None:
        """Rank 0 has brought so many lines of this attempt to the file."""
        while self._forgotten < written and self._lines:
            self._lines.popleft()
            self._forgotten += 1

    def unwritten(self) -> list[Record]:
        """The lines that may not be in the file. From any thread, while nothing is noted."""
        return list(self._lines)


def record_of(attempt: int, step: int, values: Mapping[str, float]) -> Record:
    """A line."""
    return {"attempt": attempt, "step": step, **values, "time": round(time.time(), 3)}


def _missing(path: Path, kept: Sequence[Record]) -> list[Record]:
    """The lines that are not in the file: each of them is of a step of an attempt, and of training or evaluation."""
    known = {_key(line) for line in read_lines(path) if "step" in line} if kept else set()
    return [line for line in kept if _key(line) not in known]


def _key(line: Record) -> tuple[int, int, bool]:
    return line["attempt"], line["step"], any(name.startswith("eval/") for name in line)


def _cut_unfinished_line(path: Path) -> None:
    """Drop the half line that a killed writer may have left, so that the next one starts on its own."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - 4096))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
