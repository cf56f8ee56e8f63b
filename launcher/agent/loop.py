"""The agent's only loop: one thread waits for sockets, pipes, signals and timers together, so nothing needs a lock."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from typing import Protocol


class Readable(Protocol):
    """Anything with a file descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


class Loop:
    """Calls back when a descriptor is readable, a signal came, or a period passed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[_Timer] = []
        self._signal_handler: Callable[[int], None] | None = None

    def add(self, readable: Readable | int, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` whenever the descriptor is readable or at its end."""
        self._selector.register(readable, selectors.EVENT_READ, on_ready)

    def remove(self, readable: Readable | int) -> None:
        """Stop watching a descriptor; call it before the descriptor is closed."""
        self._selector.unregister(readable)

    def every(self, period_s: float, on_time: Callable[[], None]) -> None:
        """Call `on_time` about every `period_s`."""
        self._timers.append(_Timer(period_s, time.monotonic() + period_s, on_time))

    def after(self, wait_s: float, on_time: Callable[[], None]) -> None:
        """Call `on_time` once, about `wait_s` from now."""
        self._timers.append(_Timer(None, time.monotonic() + wait_s, on_time))

    def on_signals(self, signals: Iterable[int], handler: Callable[[int], None]) -> None:
        """Call `handler(signum)` from the loop, never from inside other code."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._signal_handler = handler
        self.add(read_end, lambda: self._deliver(read_end))

    def run_until(self, done: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Wait and call back until `done()` holds; False if `timeout_s` passed first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._once(deadline)
        return True

    def _once(self, deadline: float | None) -> None:
        due = [timer.due for timer in self._timers] + ([] if deadline is None else [deadline])
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        # What came while this process was stopped counts before the time that has passed: so look once more.
        for key, _ in self._selector.select(wait_s) or self._selector.select(0):
            # An earlier callback of this round may have removed it, and opened something else under the same number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer.due <= now]:
            if timer.period_s is None:
                self._timers.remove(timer)
            else:
                timer.due = now + timer.period_s
            timer.on_time()

    def _deliver(self, read_end: int) -> None:
        for signum in os.read(read_end, 64):
            if self._signal_handler is not None:
                self._signal_handler(signum)


class _Timer:
    def __init__(self, period_s: float | None, due: float, on_time: Callable[[], None]) -> None:
        self.period_s = period_s
        self.due = due
        self.on_time = on_time
