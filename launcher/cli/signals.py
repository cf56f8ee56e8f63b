"""Signals as messages: a loop asks for them, and is woken by them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send ahead of TERM: they mean the same, and would end this process, and the run with it."""
_ONE_SIGNAL_S = 2.0
"""A TERM that comes so soon after a warning belongs to it: a second request would cut the save off."""


class SignalInbox:
    """Collects INT, TERM, HUP, USR1 and USR2 while it is open. The end of a child wakes a wait, too."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[int, int] = (-1, -1)

    def __enter__(self) -> SignalInbox:
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for signum in (*_STOPS, *_WARNINGS):
            # `nohup launch ...` outlives its terminal. INT is taken even where a shell ignores it for its `&` jobs.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._receive)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        for descriptor in self._wakeup:
            os.close(descriptor)

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for a signal, at most this long, and return the requests to stop that came since the last call."""
        ready, _, _ = select.select([self._wakeup[0]], [], [], timeout_s)
        if ready:
            os.read(self._wakeup[0], 4096)
        received, self._received = self._received, []
        return received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signum)


class Requests:
    """What the signals mean for a run in the foreground: each stop is passed on, a warning is the first of them."""

    def __init__(self) -> None:
        self._warned_s: float | None = None
        self._stops = 0

    def of(self, signums: Sequence[int], now_s: float) -> list[int]:
        """The signals to pass on, of those that came until now (seconds of a clock that only goes on)."""
        passed = []
        for signum in signums:
            if signum in _WARNINGS:
                if self._stops:
                    continue  # it is stopping already
                self._warned_s = now_s
            elif self._warned_s is not None and now_s - self._warned_s < _ONE_SIGNAL_S:
                continue
            self._stops += 1
            passed.append(int(signal.SIGTERM) if signum in _WARNINGS else signum)
        return passed


def _wake(signum: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler of Python's, or it would not reach the wakeup descriptor."""
