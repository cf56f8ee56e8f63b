"""What is said of a run on SLURM: status, report, what a follower is told. Golden texts (`--force-regen`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from fake_executor import FakeExecutor
from pytest_regressions.file_regression import FileRegressionFixture

from launcher.cli.follow import Job, follow
from launcher.cli.report import report_text
from launcher.cli.signals import SignalInbox
from launcher.cli.status import status_fields, status_text
from launcher.cli.story import Story, Watch
from launcher.errors import RecipeError
from launcher.executors import base
from launcher.executors.base import JobRef, Watcher
from launcher.planning.plan import NodePlan, Plan
from launcher.runs.create import record_event
from launcher.runs.events import Event
from launcher.runs.find import find_run, find_runs
from launcher.runs.fold import RunRecord, fold
from launcher.runs.follow import Tail
from launcher.runs.observed import Observation
from launcher.runs.queue import waiting_for
from launcher.runs.rundir import RunDir
from launcher.runs.states import RunState

RUN_ID = values.RUN_ID
AT_S = 1_796_030_000.0
WAITS = Observation(alive=True, state="PENDING", reason="Resources", starts_s=AT_S + 7200)
HELD = Observation(alive=True, state="PENDING", reason="QOSMaxWallDurationPerJobLimit")
RUNS = Observation(alive=True, state="RUNNING", nodes="n[3-4]", ends_s=AT_S + 4800)


def story(*told: tuple[float, str, dict[str, Any]]) -> list[Event]:
    return [{"time": AT_S + time_s, "event": name, **fields} for time_s, name, fields in told]


SUBMITTED = story((0, "created", {"host": "login"}), (1, "submitted", {"ref": "slurm:7"}))
FIRST = story(
    (601, "allocation_started", {"allocation": 1, "job": "7", "nodes": ["n1", "n2"], "seconds_left": 3600.0}),
    *((602 + node, "agent_started", {"node": node, "host": f"n{node + 1}", "pid": 10 + node}) for node in (0, 1)),
    *((603, "node_joined", {"node": node}) for node in (0, 1)),
    (604, "attempt_started", {"attempt": 1}),
    (610, "training_started", {"attempt": 1, "step": 0, "total_steps": 632}),
    (900, "checkpoint_saved", {"attempt": 1, "step": 120, "time_s": 1.0}),
    (900, "stopped", {"reason": "TERM", "saved": True, "exit_code": 75}),
    (901, "allocation_ended", {"allocation": 1, "cause": "preempted", "saved": True, "step": 120}),
    (901, "requeued", {"allocation": 1, "how": "requeue", "cause": "preempted", "ref": "slurm:7"}),
)
SECOND = story(
    (1201, "allocation_started", {"allocation": 2, "job": "7", "nodes": ["n3", "n4"], "seconds_left": 3600.0}),
    *((1202 + node, "agent_started", {"node": node, "host": f"n{node + 3}", "pid": 20 + node}) for node in (0, 1)),
    *((1203, "node_joined", {"node": node}) for node in (0, 1)),
    (1204, "attempt_started", {"attempt": 2}),
    *((1204, "worker_started", {"attempt": 2, "node": k, "rank": k, "pid": 30 + k}) for k in (0, 1)),
    (1210, "training_started", {"attempt": 2, "step": 120, "total_steps": 632}),
)
LOST = story(
    (1300, "node_lost", {"node": 1, "host": "n4", "reason": "it did not answer for 20 s"}),
    (1300, "failure", {"attempt": 2, "node": 1, "rank": -1, "cause": "node_lost", "message": "no answer for 20 s"}),
    (1300, "attempt_ended", {"attempt": 2, "cause": "node_lost", "node": 1, "message": "no answer for 20 s"}),
    (1301, "allocation_ended", {"allocation": 2, "cause": "node_lost", "node": 1, "host": "n4", "step": 120}),
    (1302, "finished", {"state": "FAILED", "cause": "node_lost", "exit_code": 70, "reason": "requeue was refused"}),
)
BAD_NODE = story(
    (601, "allocation_started", {"allocation": 1, "job": "7", "nodes": ["n1", "n2"], "seconds_left": None}),
    (603, "node_failed", {"node": 1, "host": "n2", "cause": "setup", "exit_code": 3, "message": "n2 has no torch"}),
    (604, "allocation_ended", {"allocation": 1, "cause": "setup", "node": 1, "host": "n2", "exit_code": 3}),
    (604, "finished", {"state": "FAILED", "cause": "setup", "exit_code": 3, "reason": "n2 has no torch"}),
)

CASES: dict[str, tuple[list[Event], Observation, float]] = {
    "pending": (SUBMITTED, WAITS, 60),
    "never": (SUBMITTED, HELD, 60),
    "running": ([*SUBMITTED, *FIRST, *SECOND], RUNS, 1250),
    "requeued": ([*SUBMITTED, *FIRST], WAITS, 1000),
    "lost": ([*SUBMITTED, *FIRST, *SECOND, *LOST], Observation(alive=False), 2000),
    "bad_node": ([*SUBMITTED, *BAD_NODE], Observation(alive=False), 2000),
    "vanished": ([*SUBMITTED, *FIRST], Observation(alive=False, detail="SLURM does not know it any more"), 9000),
}


def slurm_plan() -> Plan:
    nodes = tuple(NodePlan(index=index, host="", address="", cpus=(), gpus=()) for index in (0, 1))
    return values.plan(Path("/data/runs"), executor="slurm", nodes=nodes, interface="auto")


def told(case: str) -> tuple[RunRecord, list[Event], float]:
    events, seen, after_s = CASES[case]
    return fold(events, seen, None, run_id=RUN_ID, now_s=AT_S + after_s), events, AT_S + after_s


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the day are those of the reader."""
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.mark.parametrize("case", CASES)
def test_status_and_report(case: str, file_regression: FileRegressionFixture) -> None:
    """F012: the node that failed, by its host. F051: what vanished."""
    record, events, now_s = told(case)
    run = RunDir(Path("/data/runs") / RUN_ID)
    text = status_text(record, run, now_s=now_s)
    text += "\n\n" + report_text(record, None, slurm_plan(), events, now_s=now_s, cwd=Path("/data"))
    file_regression.check(text, extension=".txt", basename=case)


def test_the_fields_of_a_status_are_those_of_the_text() -> None:
    record, _, _ = told("pending")
    fields = json.loads(json.dumps(status_fields(record, RunDir(Path("/x")))))
    assert fields["queue"] == {
        "state": "PENDING",
        "reason": "Resources",
        "meaning": "it is next, as soon as enough nodes are free",
        "hint": "",
        "starts_s": AT_S + 7200,
        "ends_s": None,
        "nodes": "",
        "detail": "",
    }
    record, _, _ = told("running")
    fields = json.loads(json.dumps(status_fields(record, RunDir(Path("/x")))))
    assert fields["ends_s"] == AT_S + 4800
    assert [(each["job"], each["cause"]) for each in fields["allocations"]] == [("7", "preempted"), ("7", None)]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "it is next"),
        ("Priority", "higher priority"),
        ("QOSMaxWallDurationPerJobLimit", "longer than allowed"),
        ("QOSMaxJobsPerUserLimit", "as many jobs of yours run"),
        ("QOSMaxGRESPerUser", "a limit of what one user may have"),
        ("AssocGrpGRES", "share of GPUs"),
        ("AssocGrpCPUMinutesLimit", "budget of hours"),
        ("QOSGrpNodeLimit", "your group is at a limit"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved"),
        ("(Nodes required for job are DOWN, DRAINED or reserved)", "are down"),
        ("PartitionTimeLimit", "longer than the partition allows"),
        ("DependencyNeverSatisfied", "did not end well"),
        ("JobHeldUser", "held by its owner"),
        ("MaxCpuPerAccount", "a limit"),
    ],
)
def test_reasons_have_words(reason: str, words: str) -> None:
    waiting = waiting_for(reason)
    assert waiting is not None
    assert words in waiting.meaning


def test_a_reason_that_is_not_known_stays_as_it_is() -> None:
    assert waiting_for("BurstBufferStageIn") is None
    assert waiting_for("") is None


def test_a_scheduler_is_asked_every_few_seconds_and_at_once_when_the_files_know_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("launcher.cli.story._READ_SHARE", 0)
    monkeypatch.setattr(base, "_ASK_EVERY_S", {"slurm": 60.0})
    run = values.create(tmp_path / "runs", executor="slurm")
    record_event(run, "submitted", ref="slurm:7")
    answers = iter([WAITS, RUNS, HELD])
    watch = Watch(run, lambda _: next(answers))
    assert [watch.look().state for _ in range(3)] == [RunState.PENDING] * 3
    record_event(run, "allocation_started", allocation=1, job="7", nodes=["n1", "n2"])
    assert [watch.look().state for _ in range(3)] == [RunState.STARTING] * 3


def test_a_place_is_asked_no_more_often_than_it_likes() -> None:
    asked: list[str] = []

    def observe(ref: str) -> Observation:
        asked.append(ref)
        return RUNS

    watcher = Watcher(observe)
    for _ in range(3):
        watcher("slurm:7")
        watcher("local:here:1:2")
    watcher("slurm:8")
    assert asked.count("slurm:7") == asked.count("slurm:8") == 1
    assert asked.count("local:here:1:2") == 3
    watcher.forget()
    watcher("slurm:7")
    assert asked.count("slurm:7") == 2


def test_a_follower_is_told_each_thing_once() -> None:
    tale = Story()
    steps = [
        (SUBMITTED, WAITS),
        (SUBMITTED, WAITS),
        ([*SUBMITTED, *FIRST[:4]], RUNS),
        ([*SUBMITTED, *FIRST], WAITS),
        ([*SUBMITTED, *FIRST], WAITS),
        ([*SUBMITTED, *FIRST, *SECOND], RUNS),
    ]
    said = [
        tale.lines(fold(events, seen, None, run_id=RUN_ID, now_s=AT_S + 10_000), now_s=AT_S + 10)
        for events, seen in steps
    ]
    assert said[0] == [f"{RUN_ID} waits: Resources: it is next, as soon as enough nodes are free, expected 11:13"]
    assert said[1] == said[4] == []
    assert said[2] == ["allocation 1: job 7 on n1, n2"]
    assert said[3][0] == "allocation 1 ended: preempted by another job; step 120 is saved"
    assert said[3][1].startswith(f"{RUN_ID} waits: Resources")
    assert said[5] == ["allocation 2: job 7 on n3, n4"]


def test_of_many_ranks_that_fail_at_once_the_first_are_shown() -> None:
    failed = story(
        *((1300 + rank, "failure", {"attempt": 2, "rank": rank, "node": 0, "message": "x"}) for rank in range(64))
    )
    record = fold([*SUBMITTED, *FIRST, *SECOND, *failed], RUNS, None, run_id=RUN_ID, now_s=AT_S)
    shown = status_text(record, RunDir(Path("runs") / RUN_ID), now_s=AT_S).splitlines()
    assert sum(line.startswith("  failure ") for line in shown) == 8
    assert "  ... and 56 more failures: launch status -v" in shown
    every = status_text(record, RunDir(Path("runs") / RUN_ID), now_s=AT_S, verbose=True)
    assert every.count("  failure ") == 64


def test_who_waits_without_a_reason_is_told_that_there_is_none() -> None:
    waits = Observation(alive=True, state="PENDING", reason="")
    record = fold(SUBMITTED, waits, None, run_id=RUN_ID, now_s=AT_S)
    assert Story().lines(record, now_s=AT_S) == [f"{RUN_ID} waits: SLURM has not said why yet"]


def test_beside_the_console_which_says_it_too_an_allocation_begins_in_silence() -> None:
    record = fold([*SUBMITTED, *FIRST, *SECOND], RUNS, None, run_id=RUN_ID, now_s=AT_S)
    assert Story().lines(record, now_s=AT_S) == ["allocation 2: job 7 on n3, n4"]
    assert Story(beside_console=True).lines(record, now_s=AT_S) == []


def test_who_comes_late_is_not_told_what_is_over() -> None:
    record, _, now_s = told("running")
    assert Story().lines(record, now_s=now_s) == ["allocation 2: job 7 on n3, n4"]
    record, _, now_s = told("lost")
    assert Story().lines(record, now_s=now_s) == []


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    known = ["lr-1130-0214-aaaa", *(f"lr-1130-0214-aaaa.{index}" for index in range(3)), "lr-1130-0215-bbbb"]
    for run_id in known:
        values.create(tmp_path / "runs", run_id=run_id)
    return known


def test_runs_are_found_by_patterns_each_once(runs: list[str]) -> None:
    assert [run.run_id for run in find_runs(["lr-*-bbbb", "bbbb"])] == [runs[-1]]
    assert [run.run_id for run in find_runs(["aaaa", "lr-*-aaaa.*"])] == [runs[0], *reversed(runs[1:4])]
    with pytest.raises(RecipeError, match="no run has an id of this pattern"):
        find_runs(["zz*"])


def test_points_of_a_sweep_do_not_stand_in_the_way(runs: list[str]) -> None:
    assert find_run("aaaa").run_id == find_run("lr-1130-0214").run_id == runs[0]
    assert find_run("aaaa.2").run_id == find_run("lr-1130-0214-aaaa.2").run_id == runs[3]


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stop_while_following_looks_away_and_stops_nothing(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job belongs to SLURM: Ctrl-C in a follow only detaches. A job that vanished ends it (F051)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("launcher.cli.follow._POLL_FAR_S", 0.001)
    run = values.create(tmp_path / "runs", executor="slurm")
    record_event(run, "submitted", ref="slurm:7")
    looks: list[str] = []

    class Slurm(FakeExecutor):
        def observe(self, ref: JobRef) -> Observation:
            looks.append(str(ref))
            return WAITS if stopped else Observation(alive=False, state="NODE_FAIL", ends_s=AT_S)

    monkeypatch.setattr(base, "_ASK_EVERY_S", {"slurm": 60.0})
    monkeypatch.setattr("launcher.runs.fold._LAST_WORDS_S", 0.0)
    inbox = SignalInbox()
    inbox.wait = lambda timeout_s: [2] if stopped else []  # type: ignore[method-assign]
    job = Job(executor=Slurm(), ref=JobRef("slurm", "7"), plan=slurm_plan(), run=run, console=Tail(run.console))
    code = follow(job, inbox)
    said = capfd.readouterr()
    assert looks
    if stopped:
        assert code == 0
        assert f"{RUN_ID} goes on (PENDING)" in said.err
        assert "launch logs k7qz -f" in said.err
        assert Slurm.signals == []
    else:
        assert code == 70
        assert "FAILED: a node was lost (SLURM: NODE_FAIL)" in said.out
