"""A job of SLURM whose first node is gone, with its batch side and the head agent. A job of a fixed size is ended, or
queued again, by SLURM itself; one of MIN:MAX nodes it keeps (`--no-kill`), and nobody is left to go on or to end it. So
whoever of the other nodes has lost its head agent sees to it. Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from collections.abc import Mapping

from launcher.agent import allocation, scheduler
from launcher.agent.allocation import Allocation
from launcher.agent.batch import job_ident
from launcher.agent.hearing import STOP_SIGNALS
from launcher.agent.logs import say
from launcher.agent.scheduler import SchedulerError
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause

DOWN_S = 900.0
"""How long SLURM may take to give a node up: SlurmdTimeout, 300 s by default, and what the site adds to it."""
_LOOK_S = 3.0
CLAIM_S = 60.0
"""How long SLURM may take to do what the node has asked that has claimed it."""


def see_to_job(plan: Plan, run: RunDir, node: int, place: Allocation, *, signals: int) -> None:
    """Once SLURM has taken the first node out of the job: let it go on in another allocation, as planned, or end it.

    One node does it, the first to claim it; the next where nothing has come of that. Returns without having done
    anything where the job still has its first node after a while, or the run goes on elsewhere. A signal that stops a
    run ends the wait.
    """
    assert plan.slurm is not None
    job, head = job_ident(os.environ), plan.nodes[0].host
    if not _has_lost(job, head, run, place, signals=signals):
        return
    for turn in itertools.count():
        try:
            if _is_settled(job, run, place):
                return
            if _claims(run, place, node, turn):
                _settle(plan, run, node, place, job)
                return
        except SchedulerError as error:
            say(run.console, f"node 0 ({head}) was lost, and SLURM could not be asked to go on: {error}; launch resume")
            return
        by_s = time.monotonic() + CLAIM_S
        while time.monotonic() < by_s:
            if _is_told_to_stop(signals):
                return


def _settle(plan: Plan, run: RunDir, node: int, place: Allocation, job: str) -> None:
    assert plan.slurm is not None
    how, nodes = plan.slurm.continue_how, plan.nodes
    told = f"node 0 ({nodes[0].host}) was lost, and SLURM has kept the job: "
    told += {"requeue": "queued again", "resubmit": "submitted again"}.get(how, "ended")
    say(run.console, f"{told} by node {node} ({nodes[node].host})")
    if how == "resubmit":
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        flags = [f"--array={task}"] if task else []
        _went_on(run, node, place, how, scheduler.submit(plan.slurm.script, flags, cwd=str(run.slurm)))
    if how == "requeue":
        _went_on(run, node, place, how, job)
        scheduler.requeue(job)
    else:  # of a chain the next job waits for the end of this one
        scheduler.cancel(job)


def _is_settled(job: str, run: RunDir, place: Allocation) -> bool:
    """Whether somebody has seen to the job."""
    view = scheduler.job_view(job)
    return view.state != "RUNNING" or view.restarts != restarts_before(os.environ) or _goes_on(run, place)


def _claims(run: RunDir, place: Allocation, node: int, turn: int) -> bool:
    """Whether this node is the one that sees to it: the first to make a file, on all file systems alike."""
    run.slurm.mkdir(exist_ok=True)
    try:
        with (run.slurm / f"head-lost-{place.number}-{turn}").open("x") as file:
            file.write(f"{node}\n")
    except FileExistsError:
        return False
    return True


def _went_on(run: RunDir, node: int, place: Allocation, how: str, job: str) -> None:
    fields = {"how": how, "cause": Cause.NODE_LOST.value, "ref": f"slurm:{job}"}
    EventWriter(run.path, f"task-{node}").write("requeued", allocation=place.number, **fields)


def restarts_before(env: Mapping[str, str]) -> int:
    """How often SLURM had queued the job again before this allocation."""
    count = env.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def _has_lost(job: str, head: str, run: RunDir, place: Allocation, *, signals: int) -> bool:
    """Wait for SLURM to take the first node out of the job, as it does with one that is down."""
    by_s = time.monotonic() + DOWN_S
    while time.monotonic() < by_s and not _goes_on(run, place):
        with contextlib.suppress(SchedulerError):  # the controller may be away, or this node be the one that is cut off
            hosts = scheduler.job_hosts(job)
            if hosts and head not in hosts:
                return True
        if _is_told_to_stop(signals):
            return False
    return False


def _is_told_to_stop(signals: int) -> bool:
    """Whether a signal comes until it is time to look again; the ends of the commands of SLURM are signals, too."""
    by_s = time.monotonic() + _LOOK_S
    while (left_s := by_s - time.monotonic()) > 0:
        if select.select([signals], [], [], left_s)[0] and set(os.read(signals, 64)) & set(STOP_SIGNALS):
            return True
    return False


def _goes_on(run: RunDir, place: Allocation) -> bool:
    return run.result.exists() or allocation.record_of(run.path, place.number + 1).exists()
