"""metrics.jsonl: the record of a training. `launcher.runs.metrics` has its lines, and reads them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FLUSH_S = 0.5


class MetricsLog:
    """Appends lines; whole ones only, many at a time, never rewriting one."""

    def __init__(self, path: Path, *, attempt: int, resumed_from: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(path)
        self._attempt = attempt
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lines: list[str] = []
        self._flushed_at = time.monotonic()
        self._add({"attempt": attempt, "resumed_from": resumed_from})
        self.flush()

    def write(self, step: int, **values: float) -> None:
        """Add what is known about a step. It is on disk within FLUSH_S, or at the next line after that."""
        self._add({"attempt": self._attempt, "step": step, **values, "time": round(time.time(), 3)})
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        if self._lines:
            os.write(self._fd, "".join(self._lines).encode())
            self._lines.clear()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        os.close(self._fd)

    def _add(self, line: dict[str, float]) -> None:
        self._lines.append(json.dumps(line) + "\n")


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
