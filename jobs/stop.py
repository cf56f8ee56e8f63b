"""A request to stop: noted by the signal handler, acted on between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A stop came while there was nothing to save yet. Like KeyboardInterrupt, no handler of errors may catch it."""


class StopRequest:
    """Whether this process was told to stop (SIGTERM, or SIGINT where a terminal reaches it).

    The handler only sets a flag: a collective or a save inside a handler would meet the one it interrupts.
    """

    def __init__(self) -> None:
        self.requested = False
        self._raise = False

    def install(self) -> None:
        """Take over the signals, those included that were held back until now. Call it in the main thread."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._handle)
        # The agent starts a job with TERM blocked, so that a stop before this line is not lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a stop raises Stopped where the program stands: for long waits and downloads."""
        self._raise = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._raise = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._raise:
            self._raise = False
            raise Stopped
