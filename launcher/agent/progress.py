"""The step clock of a script: `progress: {log: 'step (\\d+)'}` finds the step in what rank 0 prints."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

_END = re.compile(rb"[\r\n]")
"""A progress bar overwrites its line; it counts all the same."""
_MAX_REST_BYTES = 1 << 16
TELL_EVERY_S = 1.0


class StepClock:
    """Tells the newest step, at most once a second, and on `flush`."""

    def __init__(self, pattern: str, tell: Callable[[int], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self._pattern = re.compile(pattern.encode())
        self._tell, self._now = tell, now
        self._rests: dict[int, bytes] = {}
        self._step: int | None = None
        self._told: int | None = None
        self._tell_at_s = 0.0

    def feed(self, stream: int, data: bytes) -> None:
        """What a stream has brought, in pieces of any size."""
        *whole, rest = _END.split(self._rests.get(stream, b"") + data)
        self._rests[stream] = rest[-_MAX_REST_BYTES:]
        self._read(whole)
        if self._now() >= self._tell_at_s:
            self.flush()

    def end(self) -> None:
        """The streams are at their ends; an unfinished line is one too."""
        self._read(self._rests.values())
        self._rests = {}
        self.flush()

    def flush(self) -> None:
        """Tell a step that was not told yet."""
        if self._step is not None and self._step != self._told:
            self._told, self._tell_at_s = self._step, self._now() + TELL_EVERY_S
            self._tell(self._step)

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            for found in self._pattern.finditer(line):
                step = _number(found[1] or b"")
                self._step = self._step if step is None else step


def _number(text: bytes) -> int | None:
    """`4,180`, `4_180` and `4 180` are the same; None for what is no whole number."""
    digits = text.translate(None, b",_ '")
    return int(digits) if digits.isdigit() else None
