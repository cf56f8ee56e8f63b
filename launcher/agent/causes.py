"""What a worker's end means: from exit code, signal and error file to one cause. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.agent.plain import plain
from launcher.errors import ExitCode
from launcher.runs.states import Cause, is_signal
from launcher.wording import first_line, signal_name

STOPPED_EXIT_CODE = int(ExitCode.STOPPED)
"""A worker that was asked to stop and has saved (EX_TEMPFAIL: come back later)."""

LAUNCHER_LOST_SIGNAL = signal.SIGUSR2
"""From the supervisor to the agents: the launcher of this foreground run was killed."""
LAUNCHER_LOST_GRACE_S = 5.0

_CHILD_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Killed")


@dataclass(frozen=True)
class _Class:
    """A class of exceptions: by the name of a base, or by what the text says."""

    cause: Cause
    bases: frozenset[str]
    text: re.Pattern[str]


_NEVER = re.compile("(?!)")
_CLASSES = (
    _Class(
        Cause.OOM,
        frozenset(),
        re.compile(
            r"(CUDA|HIP|XPU) out of memory|OutOfMemoryError|CUDA error: out of memory|Cuda failure .*out of memory"
            r"|CU(BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
        ),
    ),
    _Class(
        Cause.OOM_HOST,
        frozenset({"MemoryError"}),
        re.compile(r"^MemoryError\b|can't allocate memory|\[Errno 12\]|Cannot allocate memory"),
    ),
    _Class(
        Cause.DISK,
        frozenset(),
        re.compile(
            r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing file"
        ),
    ),
    _Class(Cause.SAVE, frozenset({"SaveError"}), _NEVER),  # of jobs.checkpoint; before its base
    _Class(Cause.CHECKPOINT, frozenset({"CheckpointError"}), _NEVER),
    _Class(Cause.USAGE, frozenset({"ImportError", "SyntaxError"}), _NEVER),
    # Of jobs: known before a step.
    _Class(Cause.RECIPE, frozenset({"UntrainableError", "SharedMemoryError", "StoreError"}), _NEVER),
    _Class(Cause.NAN, frozenset({"FloatingPointError"}), _NEVER),
    _Class(
        Cause.PEER_LOST,
        frozenset({"PeerError"}),  # jobs.world.PeerError: another rank could not do its part
        re.compile(
            r"connection (closed|reset|refused|aborted)|broken pipe|remote process exited|connectFullMesh failed"
            r"|Socket closed|Connection was likely closed|NCCL (remote|communicator) .*(error|abort)"
            r"|failed to recv, got 0 bytes|ncclRemoteError|DistNetworkError",
            re.IGNORECASE,
        ),
    ),
    _Class(
        Cause.HANG,
        frozenset(),
        # gloo, the store and NCCL: a peer was alive, and did not come
        re.compile(
            r"Timed out waiting \d+ms for|Application timeout caused pair closure"
            r"|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ms"
            r"|Watchdog caught collective operation timeout|monitoredBarrier|Timed out initializing process group",
            re.IGNORECASE,
        ),
    ),
)
"""What an exception means; the first that fits. What follows from it is in `runs.states.POLICIES`."""

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
    log_line: int | None = None
    """Where in it the traceback, or the last words, begin."""
    exception: str = ""
    """The name of its class; empty for a death without one."""
    step: int | None = None
    """The step that it was in, or the last one known before it."""
    last_words: str = ""
    """The last lines on standard error, for a death without an exception."""
    kept: str = ""
    """What was saved by then, as far as the head agent sees: another mark means that the run came further."""

    def to_record(self) -> dict[str, Any]:
        """As JSON, for a message or an event."""
        return {**asdict(self), "cause": self.cause.value}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """What `to_record` has made; an event has more beside it."""
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        return cls(**{**known, "cause": Cause(record["cause"])})

    @property
    def who(self) -> str:
        """`rank 5 on node 1`, or the node where it was lost as a whole."""
        return f"node {self.node}" if self.rank < 0 else f"rank {self.rank} on node {self.node}"

    @property
    def headline(self) -> str:
        """The first line of the message."""
        return first_line(self.message) or "it ended"


def classify(
    exit_code: int,
    error: dict[str, Any] | None,
    *,
    oom_killed: bool = False,
    timed_out: bool = False,
    alone: bool = False,
) -> Cause:
    """The cause of a worker's end. `error` is its error file, if it wrote one.

    oom_killed: the kernel has killed a process of its memory cgroup while it ran.
    timed_out: the watchdog of NCCL has spoken.
    alone: it has no peers; a connection that it lost was to a loader process, or to a server.
    """
    if oom_killed and _was_killed(exit_code, error):
        return Cause.OOM_KILLED
    if error is None and timed_out and is_signal(exit_code):
        return Cause.HANG
    if error is None:
        return Cause.SIGNAL if is_signal(exit_code) else Cause.USAGE if exit_code == 2 else Cause.WORKER_ERROR
    message, bases = _message(error), _bases(error)
    fits = (
        each.cause
        for each in _CLASSES
        if not (alone and each.cause is Cause.PEER_LOST) and (each.bases & bases or each.text.search(message))
    )
    return next(fits, Cause.WORKER_ERROR)


def _was_killed(exit_code: int, error: dict[str, Any] | None) -> bool:
    """It, or a loader process of it, by SIGKILL."""
    if error is None:
        return exit_code == 128 + signal.SIGKILL
    # A killed loader process is noticed by torch, or before that by the pipe to it.
    return bool(_CHILD_KILLED.search(_message(error)) or {"ConnectionError", "EOFError"} & _bases(error))


def describe(exit_code: int, error: dict[str, Any] | None) -> str:
    """How a worker ended: its exception, else one line."""
    if error is not None:
        text = _message(error)
        if len(text) <= _MAX_MESSAGE:
            return plain(text)
        half = _MAX_MESSAGE // 2  # the end counts too: an error of another process is passed on with its traceback
        return f"{plain(text[:half])} ... ({len(text):,} characters) ... {plain(text[-half:])}"
    if is_signal(exit_code):
        return f"killed by {signal_name(exit_code - 128)}"
    return f"exited with code {exit_code}"


def _bases(error: dict[str, Any]) -> set[str]:
    return set(error.get("exception_bases", ()))


def _message(error: dict[str, Any]) -> str:
    message = error.get("message", {})
    return str(message.get("message", "") if isinstance(message, dict) else message)
