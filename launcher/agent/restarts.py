"""Whether a failure is followed by a restart. Pure; the classes and their rules are `runs.states.POLICIES`."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.agent.causes import Failure
from launcher.runs.states import POLICIES, Cause

_MAY_REPEAT = frozenset({Cause.WORKER_ERROR, Cause.HANG})
"""What is retried, and is an exception of the program itself. A signal, a lost peer or node may hit it anywhere."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows a failure."""

    cause: Cause
    """That of the failure, or `repeated`."""
    why_not: str
    """Why there is no restart; empty = there is one."""


def decide(
    failure: Failure, previous: Failure | None, *, resumable: bool, restarts: int, max_restarts: int
) -> Decision:
    """Restart or not. `previous`: the first failure of the attempt before."""
    cause = Cause.REPEATED if repeats(failure, previous) else failure.cause
    policy = POLICIES[cause]
    if not policy.retry:
        return Decision(cause=cause, why_not=policy.why_not or "it would end the same way again")
    if not resumable:
        why_not = "the script declares no `resume:`, and a restart from zero over old outputs is worse than a stop"
        return Decision(cause=cause, why_not=why_not)
    if restarts >= max_restarts:
        return Decision(cause=cause, why_not="no restart is left" if max_restarts else "faults.max_restarts is 0")
    return Decision(cause=cause, why_not="")


def repeats(failure: Failure, previous: Failure | None) -> bool:
    """Whether this is the last failure again: the same exception at the same place and step.

    Without a step clock: with nothing saved in between, so that the next attempt would do the same once more.
    """
    if previous is None or failure.cause not in _MAY_REPEAT or not failure.exception:
        return False
    if (failure.exception, failure.place) != (previous.exception, previous.place):
        return False
    if failure.step is None or previous.step is None:
        return failure.step is previous.step and failure.kept == previous.kept
    return failure.step == previous.step
