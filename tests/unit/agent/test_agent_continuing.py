"""Why an allocation has ended, and what follows: what SLURM, srun and the agents say of it, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_values import slurm_plan

from launcher.agent.continuing import (
    AllocationEnd,
    BadTask,
    Progress,
    by_full_disk,
    by_lost_node,
    end_of_allocation,
    first_bad_task,
    goes_on,
    idle_allocations,
    is_cancelled,
)
from launcher.agent.effects import Finish
from launcher.agent.scheduler import JobView
from launcher.runs.events import Event
from launcher.runs.states import Cause, RunState

RUNNING = JobView(state="RUNNING")
COMPLETING = JobView(state="COMPLETING")
REQUEUED = JobView(state="COMPLETING", restarts=1)
SHORTENED = JobView(state="COMPLETING", seconds_left=-4.0)
"""By `scontrol update TimeLimit=...`, after the job had begun: our clock knows nothing of it."""
LENGTHENED = JobView(state="COMPLETING", seconds_left=3600.0)
PREEMPTED = JobView(state="RUNNING", preempted=True)
KILLED = BadTask(host="n4", task=1, what="Killed")


def event(name: str, **fields: Any) -> Event:
    return {"event": name, **fields}


CREATED = event("created")
STARTED = event("allocation_started", allocation=1)
STOP = event("stop_requested", reason="TERM")
SAVED = event("stopped", allocation=1, reason="TERM", cause="signal", saved=True, exit_code=75)
KILLED_BY_TERM = event("stopped", allocation=1, reason="TERM", cause="signal", saved=False, exit_code=143)
LIMIT = event("stopped", allocation=1, reason="the job ends in 25 s", cause="time_limit", saved=True, exit_code=75)
LOST = event("node_lost", node=1, host="n4", reason="nothing heard for 20 s")
NEXT = event("allocation_started", allocation=2)
GIVEN_UP = event("stopped", allocation=1, reason="node 1 (n4) was lost", cause="node_lost", saved=False, exit_code=1)
REJOINED = event("node_joined", node=1, host="n4")


def ended(*events: Event, **fields: Any) -> AllocationEnd | Finish:
    known: dict[str, Any] = {
        "views": [RUNNING], "restart_count": 0, "seconds_left": 3000.0, "terminated": False, "srun_exit_code": 0,
        "bad_task": None,
    }  # fmt: skip
    return end_of_allocation([CREATED, STARTED, *events], 1, **{**known, **fields})


@pytest.mark.parametrize(
    ("events", "fields", "expected"),
    [
        ([LOST, STOP, SAVED], {}, Cause.SIGNAL),
        ([LOST, STOP, LIMIT], {"seconds_left": 20.0}, Cause.TIME_LIMIT),
        ([LOST, STOP, SAVED], {"views": [COMPLETING], "terminated": True}, Cause.CANCELLED),
        ([LOST], {"views": [], "srun_exit_code": 1}, Cause.NODE_LOST),
        ([LOST, GIVEN_UP], {}, Cause.NODE_LOST),
    ],
)
def test_a_node_that_an_elastic_run_has_lost_is_not_why_it_ends_later(
    events: list[Event], fields: dict[str, Any], expected: Cause
) -> None:
    assert ended(*events, is_elastic=True, **fields).cause is expected


@pytest.mark.parametrize(
    ("events", "fields", "cause", "saved"),
    [
        ([STOP, SAVED], {}, Cause.SIGNAL, True),
        ([STOP, KILLED_BY_TERM], {}, Cause.SIGNAL, False),
        ([STOP, SAVED], {"views": [PREEMPTED, RUNNING]}, Cause.PREEMPTED, True),
        ([STOP, SAVED], {"views": [PREEMPTED, REQUEUED], "terminated": True}, Cause.PREEMPTED, True),
        ([], {"views": [PREEMPTED], "bad_task": KILLED}, Cause.PREEMPTED, False),
        ([STOP, SAVED], {"views": [REQUEUED], "terminated": True}, Cause.REQUEUED, True),
        ([STOP, LIMIT], {"seconds_left": 20.0}, Cause.TIME_LIMIT, True),
        ([STOP, KILLED_BY_TERM], {"views": [COMPLETING], "seconds_left": -3.0}, Cause.TIME_LIMIT, False),
        ([STOP, SAVED], {"views": [SHORTENED], "terminated": True}, Cause.TIME_LIMIT, True),
        ([LOST, STOP, KILLED_BY_TERM], {"views": [REQUEUED], "terminated": True}, Cause.NODE_LOST, False),
        ([LOST], {"views": []}, Cause.NODE_LOST, False),
        ([LOST, STOP, KILLED_BY_TERM], {"bad_task": KILLED}, Cause.NODE_LOST, False),
        ([], {"bad_task": KILLED, "srun_exit_code": 137}, Cause.NODE_LOST, False),
        ([], {"srun_exit_code": -9}, Cause.NODE_LOST, False),
        ([LOST, REJOINED, STOP, SAVED], {}, Cause.SIGNAL, True),
        ([LOST, NEXT, REJOINED], {"views": []}, Cause.NODE_LOST, False),
        ([GIVEN_UP], {"views": []}, Cause.NODE_LOST, False),
        ([STOP, LOST, SAVED], {}, Cause.SIGNAL, True),
        ([STOP, SAVED], {"bad_task": KILLED}, Cause.SIGNAL, True),
    ],
)  # fmt: skip
def test_causes_that_the_run_goes_on_after(
    events: list[Event], fields: dict[str, Any], cause: Cause, *, saved: bool
) -> None:
    end = ended(*events, **fields)
    assert isinstance(end, AllocationEnd)
    assert (end.cause, end.saved) == (cause, saved)
    assert end.exit_code == (75 if saved else 1 if cause is Cause.NODE_LOST else 143)


def test_a_lost_node_is_named() -> None:
    """F012 F094: by the head agent's word, or by srun's."""
    by_head, by_srun = ended(LOST), ended(bad_task=KILLED)
    for end in (by_head, by_srun):
        assert isinstance(end, AllocationEnd)
        assert (end.node, end.host) == (1, "n4")
    assert by_head.reason == "node 1 (n4) was lost: nothing heard for 20 s"
    assert by_srun.reason == "node 1 (n4) was lost: the launcher's process there ended by Killed"


def test_a_killed_srun_is_the_loss_of_the_first_node() -> None:
    """As a killed agent there: no code of the run has failed."""
    start = event("allocation_started", allocation=1, nodes=["n3", "n4"])
    end = ended(start, srun_exit_code=-9)
    assert isinstance(end, AllocationEnd)
    assert (end.node, end.host, end.exit_code) == (0, "n3", 1)
    assert end.reason == "node 0 (n3) was lost: srun there was ended by SIGKILL"


def test_a_requeue_because_of_a_node_that_is_down_names_it() -> None:
    """SLURM says of the job only that it was requeued, as after `scontrol requeue`."""
    end = ended(STOP, SAVED, views=[REQUEUED])
    assert isinstance(end, AllocationEnd)
    assert by_lost_node(end, ["n3", "n4"], []) == end
    lost = by_lost_node(end, ["n3", "n4"], ["n4"])
    assert (lost.cause, lost.node, lost.host, lost.saved, lost.requeued_already) == (
        Cause.NODE_LOST, 1, "n4", True, True,
    )  # fmt: skip
    assert lost.reason == "node 1 (n4) was lost: it is down for SLURM, which has requeued the job"
    preempted = ended(STOP, SAVED, views=[PREEMPTED])
    assert isinstance(preempted, AllocationEnd)
    assert by_lost_node(preempted, ["n3", "n4"], ["n4"]) == preempted


def test_agents_that_cannot_write_how_they_ended_are_not_to_blame() -> None:
    end = ended(srun_exit_code=1)
    assert isinstance(end, Finish)
    assert by_full_disk(end, free_bytes=1 << 30) == end
    full = by_full_disk(end, free_bytes=0)
    assert (full.cause, full.exit_code, full.reason) == (Cause.DISK, 1, "the disk of the run directory is full")


def test_who_asked_for_the_requeue_makes_it_unnecessary() -> None:
    end = ended(STOP, SAVED, views=[REQUEUED])
    assert isinstance(end, AllocationEnd)
    assert end.requeued_already
    again = ended(STOP, SAVED, views=[REQUEUED], restart_count=1)
    assert isinstance(again, Finish), "it was its second start already, so this is a cancel"


@pytest.mark.parametrize(
    ("events", "fields", "finish"),
    [
        ([STOP, SAVED], {"views": [COMPLETING], "terminated": True}, (RunState.CANCELLED, Cause.CANCELLED, 75)),
        ([STOP, SAVED], {"views": [LENGTHENED], "seconds_left": -1.0}, (RunState.CANCELLED, Cause.CANCELLED, 75)),
        ([], {"views": [COMPLETING], "bad_task": KILLED}, (RunState.CANCELLED, Cause.CANCELLED, 143)),
        ([STOP, SAVED, event("cancel_requested")], {}, (RunState.CANCELLED, Cause.CANCELLED, 75)),
        ([], {"srun_exit_code": 127}, (RunState.FAILED, Cause.INTERNAL, 127)),
        ([], {"srun_exit_code": 1, "bad_task": BadTask(host="n4", task=1, what="Exited with exit code 9")},
         (RunState.FAILED, Cause.INTERNAL, 9)),
        ([event("node_failed", node=1, host="n4", cause="setup", exit_code=3, message="line 1 of `setup` ended")],
         {"views": [], "srun_exit_code": 3}, (RunState.FAILED, Cause.SETUP, 3)),
    ],
)  # fmt: skip
def test_causes_that_end_the_run(
    events: list[Event], fields: dict[str, Any], finish: tuple[RunState, Cause, int]
) -> None:
    end = ended(*events, **fields)
    assert isinstance(end, Finish)
    assert (end.state, end.cause, end.exit_code) == finish


def test_a_task_that_ended_badly_is_named_with_its_node_and_code() -> None:
    """F012."""
    end = ended(srun_exit_code=1, bad_task=BadTask(host="n4", task=1, what="Exited with exit code 7"))
    assert "on node 1 (n4) ended: Exited with exit code 7" in end.reason


def test_what_an_earlier_allocation_said_does_not_count() -> None:
    events = [CREATED, STARTED, LOST, LIMIT, event("allocation_started", allocation=2), {**SAVED, "allocation": 2}]
    end = end_of_allocation(
        events,
        2,
        views=[RUNNING],
        restart_count=1,
        seconds_left=None,
        terminated=False,
        srun_exit_code=0,
        bad_task=None,
    )
    assert isinstance(end, AllocationEnd)
    assert end.cause is Cause.SIGNAL


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("srun: error: n3: task 2: Exited with exit code 7\nsrun: error: n4: task 3: Killed\n", ("n3", 2, 7, False)),
        ("srun: Job step aborted\nsrun: error: n[3-4]: tasks 0-1: Killed\n", ("n3", 0, 137, True)),
        ("srun: error: gpu-01: task 0: Segmentation fault (core dumped)\n", ("gpu-01", 0, 1, True)),
        ("srun: error: n10: tasks 1,3: Terminated\n", ("n10", 1, 1, True)),
    ],
)
def test_the_first_bad_task_of_sruns_words(text: str, bad: tuple[str, int, int, bool]) -> None:
    found = first_bad_task(text)
    assert found is not None
    assert (found.host, found.task, found.exit_code, found.was_killed) == bad


def test_other_words_of_srun_name_no_task() -> None:
    assert first_bad_task("srun: error: Unable to create step for job 7: Invalid node count\n") is None


def test_a_cancel_counts_until_a_person_resumes() -> None:
    cancel = event("cancel_requested")
    assert is_cancelled([CREATED, STARTED, cancel])
    assert not is_cancelled([CREATED, cancel, event("resumed"), STARTED])
    assert not is_cancelled([CREATED, STARTED])


SIGNAL = AllocationEnd(cause=Cause.SIGNAL, reason="TERM from outside", saved=True, exit_code=75)
FAR = Progress(step=100, kept="step-100:1")


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        (Cause.SIGNAL, RunState.CANCELLED),
        (Cause.PREEMPTED, RunState.PREEMPTED),
        (Cause.TIME_LIMIT, RunState.TIMED_OUT),
        (Cause.NODE_LOST, RunState.FAILED),
        (Cause.REQUEUED, RunState.PREEMPTED),
    ],
)
def test_without_a_way_on_each_cause_has_its_state(tmp_path: Path, cause: Cause, state: RunState) -> None:
    end = AllocationEnd(cause=cause, reason="because", exit_code=75)
    plan = slurm_plan(tmp_path, continue_how="none", continue_reason="the site requeues nothing")
    final = goes_on(plan, end, [CREATED], FAR, chain_left=False)
    assert final is not None
    assert (final.state, final.cause, final.exit_code) == (state, cause, 75)
    assert final.reason == "because; not continued: slurm.continue is none: the site requeues nothing"


def test_what_cannot_resume_never_goes_on(tmp_path: Path) -> None:
    """F043."""
    final = goes_on(slurm_plan(tmp_path, resumable=False), SIGNAL, [CREATED], FAR, chain_left=False)
    assert final is not None
    assert "declares no `resume:`" in final.reason


def test_a_chain_goes_on_while_a_job_waits(tmp_path: Path) -> None:
    plan = slurm_plan(tmp_path, continue_how="chain", chain=3)
    assert goes_on(plan, SIGNAL, [CREATED], FAR, chain_left=True) is None
    final = goes_on(plan, SIGNAL, [CREATED], FAR, chain_left=False)
    assert final is not None
    assert "all 3 jobs of the chain are used" in final.reason


def after(*steps: tuple[int | None, str]) -> list[Event]:
    return [CREATED, *(event("allocation_ended", step=step, kept=kept) for step, kept in steps)]


@pytest.mark.parametrize(
    ("before", "now", "idle"),
    [
        ([], (5, ""), 0),
        ([(5, "")], (5, ""), 1),
        ([(5, ""), (5, "")], (5, ""), 2),
        ([(5, ""), (5, ""), (5, "")], (5, ""), 3),
        ([(5, ""), (5, ""), (5, "")], (6, ""), 0),
        ([(9, ""), (5, ""), (8, "")], (7, ""), 3),
        ([(5, "a"), (5, "b")], (5, "c"), 0),
        ([(None, "a"), (None, "a")], (None, "a"), 2),
        ([(None, ""), (None, "")], (None, ""), 3),
    ],
)
def test_progress_is_a_newer_step_or_another_checkpoint(
    before: list[tuple[int | None, str]], now: tuple[int | None, str], idle: int
) -> None:
    """F043."""
    assert idle_allocations(after(*before), Progress(step=now[0], kept=now[1])) == idle


def test_a_script_whose_progress_nobody_sees_is_not_judged_by_it() -> None:
    events = [*after((None, ""), (None, ""), (None, "")), event("worker_started")]
    assert idle_allocations(events, Progress(step=None, kept="")) == 0


def test_a_resume_by_a_person_begins_the_count_anew() -> None:
    events = [*after((5, ""), (5, ""), (5, "")), event("resumed")]
    assert idle_allocations(events, Progress(step=5, kept="")) == 0


def test_three_in_a_row_without_progress_end_the_run(tmp_path: Path) -> None:
    """F043: whatever ends them."""
    final = goes_on(
        slurm_plan(tmp_path), SIGNAL, after((5, "a"), (5, "a"), (5, "a")), Progress(step=5, kept="a"), chain_left=False
    )
    assert final is not None
    assert (final.state, final.cause, final.exit_code) == (RunState.FAILED, Cause.NO_PROGRESS, 1)
    assert final.reason == "TERM from outside; 3 allocations in a row ended without a new step or checkpoint"
    assert (
        goes_on(slurm_plan(tmp_path), SIGNAL, after((5, "a"), (5, "a")), Progress(step=5, kept="a"), chain_left=False)
        is None
    )
