"""The signals that a parent of agents hears, as bytes from a descriptor. Standard library only."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hear_signals(more: Sequence[signal.Signals] = ()) -> int:
    """Take over the signals that stop a run, the ends of children, and `more`; they come out of this descriptor."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for signum in (*STOP_SIGNALS, *more, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were held back for the time before this
    return read_end
