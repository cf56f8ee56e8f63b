"""What a worker's end means: from exit code, signal and error file to one cause. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.runs.states import Cause

STOPPED_EXIT_CODE = 75
"""A worker that was asked to stop and has saved (EX_TEMPFAIL: come back later)."""

LAUNCHER_LOST_SIGNAL = signal.SIGUSR2
"""From the supervisor to the agents: the launcher of this foreground run was killed."""
LAUNCHER_LOST_GRACE_S = 5.0

_PEER_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|remote process exited|connectFullMesh failed"
    r"|Socket closed|Connection was likely closed|NCCL (remote|communicator) .*(error|abort)"
    r"|failed to recv, got 0 bytes|ncclRemoteError|DistNetworkError",
    re.IGNORECASE,
)
_CANNOT_RUN = frozenset({"ImportError", "SyntaxError"})
_OUT_OF_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|MemoryError|can't allocate memory", re.IGNORECASE)


_MAX_MESSAGE = 2_000
"""Characters of an exception's text that travel; all of it is in the rank's log."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that ended as it should not have."""

    attempt: int
    node: int
    rank: int
    pid: int
    exit_code: int
    """128 + n for signal n, as a shell gives it."""
    cause: Cause
    message: str
    place: str
    """`file:line in function` of the exception, where there is one."""
    log: str
    """Path of the rank's log, relative to the run directory."""


def is_signal(exit_code: int) -> bool:
    """Whether an exit code is a shell's 128 + n. Above that it is a program's own: `sys.exit(-1)` gives 255."""
    return 128 < exit_code <= 128 + signal.SIGRTMAX


def classify(exit_code: int, error: dict[str, Any] | None) -> Cause:
    """The cause of a worker's end. `error` is its error file, if it wrote one."""
    if error is None:
        return Cause.SIGNAL if is_signal(exit_code) else Cause.USAGE if exit_code == 2 else Cause.WORKER_ERROR
    message = _message(error)
    bases: Sequence[str] = error.get("exception_bases", ())
    if _OUT_OF_MEMORY.search(message):
        return Cause.OOM
    if _CANNOT_RUN & set(bases):
        return Cause.USAGE
    if "FloatingPointError" in bases:
        return Cause.NAN
    if "PeerError" in bases or _PEER_LOST.search(message):  # jobs.world.PeerError: another rank could not do its part
        return Cause.PEER_LOST
    return Cause.WORKER_ERROR


def describe(exit_code: int, error: dict[str, Any] | None) -> str:
    """One line on how a worker ended."""
    if error is not None:
        text = _message(error)
        return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ... ({len(text):,} characters)"
    if is_signal(exit_code):
        try:
            return f"killed by {signal.Signals(exit_code - 128).name}"
        except ValueError:
            return f"killed by signal {exit_code - 128}"
    return f"exited with code {exit_code}"


def _message(error: dict[str, Any]) -> str:
    message = error.get("message", {})
    return str(message.get("message", "") if isinstance(message, dict) else message)
