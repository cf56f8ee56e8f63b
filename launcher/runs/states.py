"""States and causes of a run, as tables. Standard library only."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands."""

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    REQUEUED = "REQUEUED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    TIMED_OUT = "TIMED_OUT"
    UNKNOWN = "UNKNOWN"

    @property
    def is_final(self) -> bool:
        """Whether the run goes on only if a person resumes it."""
        return self in FINAL


FINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.PREEMPTED, RunState.TIMED_OUT})


class Cause(StrEnum):
    """Why an attempt or a run ended."""

    DONE = "done"
    WORKER_ERROR = "worker_error"
    SIGNAL = "signal"
    USAGE = "usage"
    RECIPE = "recipe"
    OOM = "oom"
    OOM_HOST = "oom_host"
    OOM_KILLED = "oom_killed"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    DISK = "disk"
    SETUP = "setup"
    HANG = "hang"
    REPEATED = "repeated"
    PEER_LOST = "peer_lost"
    NODE_LOST = "node_lost"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    NO_PROGRESS = "no_progress"
    RENDEZVOUS = "rendezvous"
    PREFLIGHT = "preflight"
    CANCELLED = "cancelled"
    LAUNCHER_LOST = "launcher_lost"
    NAN = "nan"
    REFUSED = "refused"
    INTERNAL = "internal"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a cause means."""

    retry: bool
    """Whether a restart in the same allocation may help."""
    sentence: str
    why_not: str = ""
    """Why a restart would not help, where it would not."""
    hint: str = ""


POLICIES: dict[Cause, Policy] = {
    Cause.DONE: Policy(retry=False, sentence="finished"),
    Cause.WORKER_ERROR: Policy(retry=True, sentence="a worker failed"),
    Cause.SIGNAL: Policy(retry=True, sentence="a worker was killed by a signal"),
    Cause.USAGE: Policy(
        retry=False,
        sentence="a worker cannot run as written (import, syntax or usage error)",
        why_not="code does not change by itself",
    ),
    Cause.RECIPE: Policy(
        retry=False,
        sentence="the recipe cannot be trained as it is written",
        why_not="a recipe does not change by itself",
        hint="mend the recipe, or its data, then launch it again",
    ),
    Cause.OOM: Policy(
        retry=False,
        sentence="CUDA out of memory",
        why_not="out of memory repeats",
        hint="a smaller batch per rank",
    ),
    Cause.OOM_HOST: Policy(
        retry=False,
        sentence="out of host memory",
        why_not="out of memory repeats",
        hint="a smaller micro-batch, fewer loader workers, or more memory",
    ),
    Cause.OOM_KILLED: Policy(
        retry=False,
        sentence="killed by the kernel: out of host memory",
        why_not="out of memory repeats",
        hint="fewer loader workers, a smaller micro-batch, or more memory",
    ),
    Cause.CHECKPOINT: Policy(
        retry=False, sentence="the checkpoint cannot be used", why_not="the checkpoint stays as it is"
    ),
    Cause.SAVE: Policy(
        retry=False,
        sentence="a checkpoint could not be written",
        why_not="what is not saved would be lost again",
        hint="make its folder writable, then resume",
    ),
    Cause.DISK: Policy(
        retry=False,
        sentence="no space was left to write to",
        why_not="the disk stays full",
        hint="free space, or raise the quota, then resume",
    ),
    Cause.SETUP: Policy(
        retry=False,
        sentence="a `setup` line failed",
        why_not="it would fail again",
        hint="mend the line in the recipe, then launch that again; its bash has read no profile",
    ),
    Cause.HANG: Policy(
        retry=True,
        sentence="no progress, or a collective timed out",
        hint="where the others were: their stacks are at the ends of their logs (logs/attempt-*/node-*/rank-*.log)",
    ),
    Cause.REPEATED: Policy(
        retry=False,
        sentence="the same error at the same step, twice",
        why_not="the same error came at the same step, twice",
    ),
    Cause.PEER_LOST: Policy(retry=True, sentence="a worker lost its peer"),
    Cause.NODE_LOST: Policy(retry=True, sentence="a node was lost"),
    Cause.TIME_LIMIT: Policy(retry=False, sentence="the time limit was reached"),
    Cause.PREEMPTED: Policy(retry=False, sentence="preempted by another job"),
    Cause.REQUEUED: Policy(retry=False, sentence="requeued from outside (scontrol requeue)"),
    Cause.NO_PROGRESS: Policy(
        retry=False,
        sentence="allocation after allocation ended without a new step",
        why_not="the last allocations have not come further",
    ),
    Cause.RENDEZVOUS: Policy(retry=False, sentence="the nodes did not come together"),
    Cause.PREFLIGHT: Policy(
        retry=False,
        sentence="a node, or a link between nodes, does not do",
        why_not="nothing has run yet",
        hint="mend it, leave that node out, or start all the same with faults.preflight=false",
    ),
    Cause.CANCELLED: Policy(retry=False, sentence="stopped on request"),
    Cause.LAUNCHER_LOST: Policy(retry=False, sentence="the launcher was killed"),
    Cause.NAN: Policy(
        retry=False,
        sentence="the loss is not a finite number",
        why_not="the same steps give the same loss",
        hint="a lower learning rate, or a longer warm-up",
    ),
    Cause.REFUSED: Policy(retry=False, sentence="refused"),
    Cause.INTERNAL: Policy(retry=False, sentence="a fault of the launcher"),
}

NOT_RETRIED = "; not retried: "
"""In the reason of a run that has failed: after the error, before why its workers were not started again."""

_ENDS = FINAL | {RunState.UNKNOWN}

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.UNKNOWN: frozenset(RunState) - {RunState.UNKNOWN},
    RunState.SUBMITTED: frozenset({RunState.PENDING, RunState.STARTING, RunState.RUNNING, RunState.RESTARTING}) | _ENDS,
    RunState.PENDING: frozenset({RunState.STARTING, RunState.RUNNING, RunState.RESTARTING}) | _ENDS,
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.REQUEUED}) | _ENDS,
    RunState.RUNNING: frozenset({RunState.RESTARTING, RunState.REQUEUED}) | _ENDS,
    RunState.RESTARTING: frozenset({RunState.RUNNING, RunState.REQUEUED}) | _ENDS,
    RunState.REQUEUED: frozenset({RunState.PENDING, RunState.STARTING, RunState.RUNNING}) | _ENDS,
    **{state: frozenset({RunState.SUBMITTED}) for state in FINAL},
}
"""Where a run may go from a state. Out of a final one only a person leads, by `launch resume`."""


def is_signal(exit_code: int) -> bool:
    """Whether an exit code is a shell's 128 + n. Above that it is a program's own: `sys.exit(-1)` gives 255."""
    return 128 < exit_code <= 128 + signal.SIGRTMAX
