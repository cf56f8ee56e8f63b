"""Why an allocation of a SLURM job has ended, and whether the run goes on in another one. Pure.

What is known comes from three sides: the events of this allocation, SLURM's word on the job, and what srun said of its
tasks. Each may be missing. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import SIGTERM
from typing import Any

from launcher.agent import hostlist
from launcher.agent.causes import STOPPED_EXIT_CODE
from launcher.agent.effects import Finish
from launcher.agent.scheduler import JobView
from launcher.planning.plan import Plan
from launcher.runs.events import Event
from launcher.runs.states import Cause, RunState
from launcher.runs.times import newest_submission
from launcher.wording import signal_name

MAX_IDLE_ALLOCATIONS = 3
"""In a row, that end without a newer step or checkpoint. One is bad luck (preempted at once), two happen; three are a
run that never comes as far as its first save, and would be requeued for ever."""
_AT_LIMIT_S = 15.0
"""SLURM's clock of the time limit ticks slowly; what ends the job so close before it, is it."""
_FULL_BYTES = 1 << 16
_BAD_TASK = re.compile(r"^srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)$", re.MULTILINE)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
NOT_CONTINUED = {
    Cause.TIME_LIMIT: RunState.TIMED_OUT,
    Cause.PREEMPTED: RunState.PREEMPTED,
    Cause.REQUEUED: RunState.PREEMPTED,
    Cause.NODE_LOST: RunState.FAILED,
    Cause.SIGNAL: RunState.CANCELLED,
}
"""Causes that a run goes on after, and how it ends where it may not."""


@dataclass(frozen=True, kw_only=True)
class BadTask:
    """The first task that srun saw end badly."""

    host: str
    task: int
    what: str

    @property
    def exit_code(self) -> int:
        """As a shell has it; 137 for one that was killed."""
        match = _EXIT_CODE.search(self.what)
        return int(match[1]) if match else 137 if "Killed" in self.what else 1

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it: our code, and the user's, return exit codes."""
        return _EXIT_CODE.search(self.what) is None


@dataclass(frozen=True, kw_only=True)
class AllocationEnd:
    """Why an allocation has ended."""

    cause: Cause
    reason: str
    saved: bool = False
    exit_code: int = 1
    node: int | None = None
    host: str = ""
    requeued_already: bool = False
    """By SLURM, or by somebody's `scontrol requeue`."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run had come at the end of an allocation; None, empty: nobody knows."""

    step: int | None
    kept: str

    @classmethod
    def of(cls, event: Event) -> Progress:
        """As an `allocation_ended` says it."""
        step = event.get("step")
        return cls(step=step if isinstance(step, int) else None, kept=str(event.get("kept") or ""))


def first_bad_task(srun_said: str) -> BadTask | None:
    """What srun wrote about the first task that failed, by its standard error."""
    match = _BAD_TASK.search(srun_said)
    if match is None:
        return None
    try:
        host = hostlist.expand(match["hosts"])[0]
    except ValueError:
        host = match["hosts"]
    return BadTask(host=host, task=int(re.split("[,-]", match["tasks"])[0]), what=match["what"].strip())


def own_events(events: Sequence[Event], allocation: int) -> list[Event]:
    """The events since this allocation began."""
    begun = [
        index
        for index, event in enumerate(events)
        if event["event"] == "allocation_started" and event.get("allocation") == allocation
    ]
    if not begun:
        return []
    rest = events[begun[-1] :]
    # A node that was cut off sees what the next allocation writes; that says nothing of its own.
    later = (index for index, event in enumerate(rest) if index and event["event"] == "allocation_started")
    return list(rest[: next(later, None)])


def is_cancelled(events: Sequence[Event]) -> bool:
    """Whether `launch cancel` was called since the launch, or since the last resume."""
    return any(event["event"] == "cancel_requested" for event in newest_submission(events) or events)


def end_of_allocation(  # noqa: PLR0911 - the causes, in the order in which they explain each other
    events: Sequence[Event],
    allocation: int,
    *,
    views: Sequence[JobView],
    restart_count: int,
    seconds_left: float | None,
    terminated: bool,
    srun_exit_code: int | None,
    bad_task: BadTask | None,
    is_elastic: bool = False,
) -> AllocationEnd | Finish:
    """Why the allocation has ended; Finish where that ends the run too.

    views: what SLURM said of the job, when the stop began and now; none where it could not be asked. restart_count: how
    often SLURM had requeued the job before this allocation. seconds_left: to the time limit by our clock, below 0 after
    it; what a view says of it counts more.
    terminated: SLURM has sent TERM to the batch script. srun_exit_code: None while it still runs.
    is_elastic: the run goes on without a node that is lost, or that could not begin; but for the first one.
    """
    own = own_events(events, allocation)
    failed = [event for event in own if event["event"] == "node_failed" and not (is_elastic and event.get("node"))]
    if failed:
        return _node_failed(failed[0])
    stopped = next((event for event in own if event["event"] == "stopped" and _is_of(event, allocation)), {})
    saved = bool(stopped.get("saved"))
    code = STOPPED_EXIT_CODE if saved else int(stopped.get("exit_code", 128 + SIGTERM))
    if is_cancelled(events):
        return Finish(RunState.CANCELLED, Cause.CANCELLED, code, "stopped on request (launch cancel)")
    requeued = any(view.restarts > restart_count for view in views)
    ends = terminated or any(view.state not in ("RUNNING", "UNKNOWN") for view in views)
    cause = str(stopped.get("cause", ""))
    seconds_left = next((view.seconds_left for view in reversed(views) if view.seconds_left is not None), seconds_left)

    def ended(cause: Cause, reason: str, **more: Any) -> AllocationEnd:
        return AllocationEnd(
            cause=cause, reason=reason, saved=saved, **{"exit_code": code, "requeued_already": requeued, **more}
        )

    if any(view.preempted for view in views):
        return ended(Cause.PREEMPTED, "preempted by another job")
    if cause == Cause.TIME_LIMIT or (ends and seconds_left is not None and seconds_left < _AT_LIMIT_S):
        return ended(Cause.TIME_LIMIT, "the time limit of the job was reached")
    lost = None if is_elastic and (stopped or ends) else _lost_node(own)
    if bad_task is not None and bad_task.was_killed and (lost is not None or not (stopped or ends)):
        reason = (
            f"node {bad_task.task} ({bad_task.host}) was lost: the launcher's process there ended by {bad_task.what}"
        )
        return ended(Cause.NODE_LOST, reason, node=bad_task.task, host=bad_task.host, exit_code=1)
    if lost is not None:
        node, host = lost.get("node"), str(lost.get("host", ""))
        reason = f"node {node} ({host}) was lost: {lost.get('reason')}"
        return ended(Cause.NODE_LOST, reason, node=node, host=host, exit_code=1)
    if requeued:
        return ended(Cause.REQUEUED, "requeued from outside (scontrol requeue)")
    if ends:
        return Finish(RunState.CANCELLED, Cause.CANCELLED, code, "cancelled from outside (scancel)")
    if bad_task is not None and not stopped:
        where = f"the launcher's process on node {bad_task.task} ({bad_task.host})"
        reason = f"{where} ended: {bad_task.what}; see logs/agents.log and slurm/"
        return Finish(RunState.FAILED, Cause.INTERNAL, bad_task.exit_code, reason)
    if cause == Cause.NODE_LOST:
        return ended(Cause.NODE_LOST, str(stopped.get("reason")), exit_code=1)
    if stopped:
        reason = str(stopped.get("reason")).removeprefix("SIG")
        return ended(Cause.SIGNAL, reason if " " in reason else f"{reason} from outside, to processes of the run")
    if srun_exit_code is not None and srun_exit_code < 0:  # free, as a killed agent is
        host = str(next(iter(own[0].get("nodes") or ()), "?")) if own else "?"
        reason = f"node 0 ({host}) was lost: srun there was ended by {signal_name(-srun_exit_code)}"
        return ended(Cause.NODE_LOST, reason, node=0, host=host, exit_code=1)
    said = f"srun ended with exit code {srun_exit_code}, and no agent has said how the run ended"
    return Finish(RunState.FAILED, Cause.INTERNAL, srun_exit_code or 70, said)


def by_lost_node(end: AllocationEnd, hosts: Sequence[str], down: Sequence[str]) -> AllocationEnd:
    """The end of a job that was requeued, if SLURM has done that because one of its nodes is down."""
    lost = next((node for node, host in enumerate(hosts) if host in down), None)
    if end.cause is not Cause.REQUEUED or lost is None:
        return end
    reason = f"node {lost} ({hosts[lost]}) was lost: it is down for SLURM, which has requeued the job"
    return replace(end, cause=Cause.NODE_LOST, reason=reason, node=lost, host=hosts[lost])


def by_full_disk(finish: Finish, *, free_bytes: int) -> Finish:
    """The end of agents that could not say how: with a full disk they cannot, and it is no fault of theirs."""
    if finish.cause is not Cause.INTERNAL or free_bytes >= _FULL_BYTES:
        return finish
    return replace(finish, cause=Cause.DISK, reason="the disk of the run directory is full")


def _node_failed(event: Event) -> Finish:
    node, host, message = event.get("node"), event.get("host"), event.get("message")
    known = str(event.get("cause"))
    cause = Cause(known) if known in set(Cause) else Cause.RENDEZVOUS
    return Finish(RunState.FAILED, cause, int(event.get("exit_code", 1)), f"node {node} ({host}): {message}")


def _lost_node(own: Sequence[Event]) -> Event | None:
    """A node that was lost and did not come back. Once a stop was asked for, those that are lost leave."""
    lost: dict[Any, Event] = {}
    for event in own:
        if event["event"] == "node_lost":
            lost[event.get("node")] = event
        elif event["event"] == "node_joined":
            lost.pop(event.get("node"), None)
        elif event["event"] == "stop_requested":
            break
    return next(iter(lost.values()), None)


def goes_on(
    plan: Plan, end: AllocationEnd, events: Sequence[Event], progress: Progress, *, chain_left: bool
) -> Finish | None:
    """None: in another allocation. Else how the run ends here, and why.

    events: all of the run, without the end of this allocation. chain_left: whether a next job waits already.
    """
    assert plan.slurm is not None
    why_not = ""
    if not plan.resumable:
        why_not = "the script declares no `resume:`, and a start from zero over old outputs is worse than a stop"
    elif plan.slurm.continue_how == "none":
        why_not = f"slurm.continue is none: {plan.slurm.continue_reason}"
    elif plan.slurm.continue_how == "chain" and not chain_left:
        why_not = f"all {plan.slurm.chain} jobs of the chain are used (slurm.continue)"
    if why_not:
        return Finish(NOT_CONTINUED[end.cause], end.cause, end.exit_code, f"{end.reason}; not continued: {why_not}")
    if (idle := idle_allocations(events, progress)) >= MAX_IDLE_ALLOCATIONS:
        reason = f"{end.reason}; {idle} allocations in a row ended without a new step or checkpoint"
        return Finish(RunState.FAILED, Cause.NO_PROGRESS, 1, reason)
    return None


def idle_allocations(events: Sequence[Event], progress: Progress) -> int:
    """How many allocations in a row, up to the one that ends now, have not brought the run further. 0: unknown."""
    lately = newest_submission(events) or events
    ends = [event for event in lately if event["event"] == "allocation_ended"]
    story = [*(Progress.of(event) for event in ends), progress]
    if all(each.step is None and not each.kept for each in story):
        # Nothing shows how far it is. An allocation that has not begun to train is idle for sure.
        return 0 if any(event["event"] == "worker_started" for event in lately) else len(story)
    idle, best, kept = 0, -1, ""
    for each in story:
        step = -1 if each.step is None else each.step
        idle = 0 if step > best or (each.kept and each.kept != kept) else idle + 1
        best, kept = max(best, step), each.kept or kept
    return idle


def _first(events: Sequence[Event], name: str) -> Event | None:
    return next((event for event in events if event["event"] == name), None)


def _is_of(event: Event, allocation: int) -> bool:
    return bool(event.get("allocation", allocation) == allocation)
