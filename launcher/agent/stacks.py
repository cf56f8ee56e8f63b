"""Where a worker is: on a signal it writes the Python stacks of all its threads into its own log.

The worker's part is `wrapper.show_stacks_on_signal`. It answers while it holds the interpreter, and while it waits in a
collective. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from launcher.agent.wrapper import STACKS_SIGNAL

_PROC = Path("/proc")


def request(pids: Iterable[int]) -> set[int]:
    """Ask processes for their stacks; return those that will answer."""
    answering = set()
    for pid in pids:
        if catches(pid, STACKS_SIGNAL):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, STACKS_SIGNAL)
                answering.add(pid)
    return answering


def catches(pid: int, signum: int, proc: Path = _PROC) -> bool:
    """Whether a process has a handler for a signal, whose default action may be its end. False for one that is gone."""
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)
