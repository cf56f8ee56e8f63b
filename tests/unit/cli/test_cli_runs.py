"""Commands about runs, each from a directory that has nothing to do with them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from fake_executor import STARTS, Ends, FakeExecutor, Happens, Prints

from launcher.cli.resume import complete_text
from launcher.cli.status import status_text
from launcher.runs.create import claimed
from launcher.runs.events import read_events
from launcher.runs.find import all_runs, state_folder
from launcher.runs.fold import fold
from launcher.runs.observed import GONE
from launcher.runs.rundir import RunDir

Launch = Callable[..., Any]
Place = type[FakeExecutor]


@pytest.fixture
def alive(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDir:
    """A detached run that goes on until it is stopped, seen from another directory."""
    monkeypatch.setattr(place, "script", STARTS)
    monkeypatch.setattr(place, "stays", True)
    assert launch("train.py", "--nodes", "2", "--detach", "resume=self").code == 0
    (pointer,) = all_runs()
    for _ in STARTS:
        launch("status", "last")
    monkeypatch.chdir(tmp_path)
    return pointer.run


@pytest.fixture
def done(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDir:
    """A run that has succeeded, seen from another directory."""
    logs = [Prints(f"words of {k}\n", f"attempt-1/node-{k}/rank-{k}.log") for k in (0, 1)]
    again = [Prints(f"more of {k}\n", f"attempt-2/node-{k}/rank-{k}.log") for k in (0, 1)]
    monkeypatch.setattr(place, "script", (*STARTS, *logs, *again, Prints("0:0 hello\n"), Ends("SUCCEEDED", "done", 0)))
    assert launch("train.py", "--nodes", "2", "--", "--lr", "1").code == 0
    (pointer,) = all_runs()
    monkeypatch.chdir(tmp_path)
    return pointer.run


def test_status_of_a_live_run_lists_nodes_and_workers(launch: Launch, alive: RunDir) -> None:
    fields = launch("status", "last", "--json").json
    assert fields["state"] == "RUNNING"
    assert fields["run_dir"] == str(alive.path)
    assert fields["workers"] == [{"node": k, "rank": k, "pid": 20 + k, "attempt": 1} for k in (0, 1)]
    assert [(node["node"], node["host"], node["pid"]) for node in fields["nodes"]] == [(0, "here", 10), (1, "here", 11)]
    text = launch("status", alive.run_id[-4:]).out
    assert "RUNNING" in text
    assert "rank 1    node 1   pid 21   attempt 1" in text


def test_status_of_a_run_that_has_ended(launch: Launch, done: RunDir) -> None:
    fields = launch("status", str(done.path), "--json").json
    assert (fields["state"], fields["cause"], fields["exit_code"], fields["workers"]) == ("SUCCEEDED", "done", 0, [])


def test_status_of_a_run_that_was_killed_says_so(launch: Launch, alive: RunDir, place: Place) -> None:
    place.jobs.clear()
    fields = launch("status", "last", "--json").json
    assert fields["state"] == "FAILED"
    assert "did not say why" in fields["sentence"]


def test_ls_shows_the_newest_and_what_is_gone(launch: Launch, done: RunDir, place: Place) -> None:
    shutil.rmtree(done.path)
    (state_folder() / "20000101T000000.000000_cut-off.json").write_text("")
    lines = launch("ls").out.splitlines()
    assert lines[2].split()[:2] == ["cut-off", "GONE"]
    assert lines[0].split() == ["RUN", "STATE", "AGE", "STEP", "WHY"]
    assert lines[1].split()[:2] == [done.run_id, "GONE"]
    fields = launch("ls", "--json").json
    assert fields["total"] == 2
    assert fields["runs"][0]["run_dir"] == str(done.path)


def test_ls_shows_twenty_and_says_how_to_see_all(launch: Launch, place: Place) -> None:
    assert launch("ls").out.strip() == "no runs yet"
    for number in range(22):
        values.create(Path.cwd(), run_id=f"run-{number}")
    lines = launch("ls").out.splitlines()
    assert len(lines) == 22
    assert lines[-1] == "... and 2 older: launch ls --all"
    assert len(launch("ls", "--all").out.splitlines()) == 23


def test_logs_are_the_console_or_chosen_ranks(launch: Launch, done: RunDir) -> None:
    assert launch("logs", "last").out == "0:0 hello\n"
    assert launch("logs", "last", "--rank", "1").out == "more of 1\n"
    assert launch("logs", "last", "--rank", "1", "--attempt", "1").out == "words of 1\n"
    assert launch("logs", "last", "--node", "0").out == "more of 0\n"
    both = launch("logs", "last", "--attempt", "1").out
    assert both.splitlines()[:2] == ["==> logs/attempt-1/node-0/rank-0.log <==", "words of 0"]
    assert "words of 1" in both


def test_logs_that_are_not_there_exit_2_with_those_that_are(launch: Launch, done: RunDir) -> None:
    said = launch("logs", "last", "--rank", "9")
    assert said.code == 2
    assert "logs/attempt-1/node-0/rank-0.log" in said.err


def test_logs_follow_until_the_end_of_the_run(
    launch: Launch, alive: RunDir, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.jobs["0"] = [
        Prints("one\n"),
        Prints("rank 1\n", "attempt-1/node-1/rank-1.log"),
        Prints("two"),
        Ends("FAILED", "oom", 1),
    ]
    said = launch("logs", "last", "-f")
    assert said.out == "one\ntwo\n"
    assert said.err.endswith("FAILED: CUDA out of memory\n")
    assert launch("logs", "last", "-f", "--rank", "1").out == "rank 1\n"


def test_cancel_stops_a_run_and_waits_for_its_end(launch: Launch, alive: RunDir, place: Place) -> None:
    said = launch("cancel", "last")
    assert said.code == 0
    assert place.signals == [signal.SIGTERM]
    assert said.out.splitlines()[-1] == f"{alive.run_id} CANCELLED: stopped on request"
    assert "cancel_requested" in [event["event"] for event in read_events(alive.path)]
    again = launch("cancel", "last")
    assert (again.code, place.signals) == (0, [signal.SIGTERM])
    assert "has ended already: CANCELLED" in again.out


def test_cancel_from_another_host_names_the_host(
    launch: Launch, alive: RunDir, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "elsewhere", True)
    said = launch("cancel", "last")
    assert said.code == 3
    assert "it runs on here, and this is" in said.err
    assert f"launch cancel {alive.run_id}" in said.err
    assert place.signals == []


def test_cancel_gives_up_waiting_and_says_so(
    launch: Launch, alive: RunDir, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.runs._LEAVE_S", -100.0)
    monkeypatch.setattr(place, "when_stopped", [Prints("")] * 1000)
    said = launch("cancel", "last")
    assert said.code == 1
    assert "is still there" in said.out


def test_path_prints_the_run_and_its_checkpoints(launch: Launch, done: RunDir) -> None:
    assert launch("path", "last").out == f"{done.path}\n"
    (done.checkpoints / "step-7").mkdir(parents=True)
    for which in ("7", "latest"):
        assert launch("path", "last", "--checkpoint", which).out == f"{done.checkpoints / 'step-7'}\n"
    assert launch("path", "last", "--checkpoint", "8").code == 2


def test_a_live_run_cannot_be_resumed(launch: Launch, alive: RunDir, place: Place) -> None:
    said = launch("resume", "last")
    assert said.code == 3
    assert "it is alive (RUNNING)" in said.err
    assert len(place.plans) == 1


def test_a_run_that_may_be_alive_elsewhere_cannot_be_resumed(
    launch: Launch, alive: RunDir, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "elsewhere", True)
    said = launch("resume", "last")
    assert said.code == 3
    assert "it may still be alive" in said.err


def test_resume_goes_on_under_the_same_id_with_what_was_understood(
    launch: Launch, alive: RunDir, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch("cancel", "last")
    place.signals.clear()
    monkeypatch.setattr(place, "script", (*STARTS, Ends("SUCCEEDED", "done", 0, {"attempts": 2})))
    monkeypatch.setattr(place, "stays", False)
    alive.console.write_text("of the past\n")
    said = launch("resume", "last", "env.A=x", "--nodes", "1")
    assert said.code == 0, said.err
    assert "of the past" not in said.out
    assert "SUCCEEDED" in said.out
    first, second = place.plans
    assert (second.run_id, second.run_dir) == (first.run_id, first.run_dir)
    assert (second.worker.script, second.worker.cwd) == (first.worker.script, first.worker.cwd)
    assert (len(first.nodes), len(second.nodes)) == (2, 1)
    assert {variable.name: variable.value for variable in second.env}["A"] == "x"
    assert json.loads(alive.plan.read_text())["env"] != json.loads((alive.path / "plan-1.json").read_text())["env"]
    assert (alive.path / "result-1.json").exists()
    assert "resumed" in [event["event"] for event in read_events(alive.path)]
    assert len(all_runs()) == 1
    launch("resume", "last")
    assert len(place.plans) == 2


def test_arguments_come_back_unchanged_in_a_resume(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """F003, F025: what looks like something else than text is text still."""
    args = ["1e10", "no", "null", "${HOME}", "\\${x}", "a: b", "", "é\n", "-"]
    monkeypatch.setattr(place, "script", (*STARTS, Ends("CANCELLED", "cancelled", 75)))
    assert launch("train.py", "--name", "1e10", "--", *args).code == 75
    monkeypatch.chdir(tmp_path)
    assert launch("resume", "last").code == 75
    assert [plan.worker.argv for plan in place.plans] == [tuple(args)] * 2
    assert [plan.name for plan in place.plans] == ["1e10"] * 2


def test_a_run_is_resumed_by_one_person_at_a_time(launch: Launch, alive: RunDir, place: Place) -> None:
    launch("cancel", "last")
    with claimed(alive):
        said = launch("resume", "last")
    assert said.code == 3
    assert "another `launch resume` of it is at work" in said.err
    assert len(place.plans) == 1


def test_a_mistake_in_a_resume_changes_nothing(launch: Launch, alive: RunDir, place: Place) -> None:
    launch("cancel", "last")
    before = alive.plan.read_text()
    said = launch("resume", "last", "nokey=1")
    assert said.code == 2
    assert alive.plan.read_text() == before
    assert not (alive.path / "plan-1.json").exists()


def test_resuming_what_is_complete_starts_nothing(launch: Launch, done: RunDir, place: Place) -> None:
    """F022: a finished run that is started again is complete, it does not train on."""
    said = launch("resume", "last")
    assert said.code == 0
    assert "is already complete" in said.out
    assert "train.until" not in said.out, "a script has no length that could be raised"
    assert launch("resume", "last", "--json").json["state"] == "SUCCEEDED"
    assert len(place.plans) == 1


@pytest.mark.parametrize(
    ("until", "complete"), [("8 epochs", True), ("632 steps", True), ("633 steps", False), ("9 epochs", False)]
)
def test_until_is_a_total_length(until: str, complete: bool) -> None:
    from launcher.cli.resume import already_complete
    from launcher.runs.fold import RunRecord
    from launcher.runs.states import RunState

    record = RunRecord(state=RunState.SUCCEEDED, step=632, steps_per_epoch=79)
    assert already_complete(record, {"train": {"until": until}}) is complete
    failed = RunRecord(state=RunState.FAILED, step=632, steps_per_epoch=79)
    assert not already_complete(failed, {"train": {"until": until}})
    assert already_complete(record, {"train": {"until": until}}, changed=True) is complete


def test_a_script_that_has_succeeded_is_run_again_with_other_arguments_or_code() -> None:
    """`launch resume last args.max_epochs=10`: it trained for 3, and its checkpoints are there."""
    from launcher.cli.resume import already_complete
    from launcher.runs.fold import RunRecord
    from launcher.runs.states import RunState

    record = RunRecord(state=RunState.SUCCEEDED, step=192)
    assert already_complete(record, {"script": "t.py"})
    assert not already_complete(record, {"script": "t.py"}, changed=True)


def test_events_of_an_old_kind_do_not_stop_ls(launch: Launch, done: RunDir) -> None:
    Happens("head", "from the future", {"x": [1]}).play(done)
    assert done.run_id in launch("ls").out


def test_status_says_how_far_the_training_is_and_why_it_failed(tmp_path: Path) -> None:
    events = [
        {"event": "training_started", "step": 0, "total_steps": 632},
        {"event": "checkpoint_saved", "step": 300},
        {"event": "tracking", "wandb": {"mode": "offline", "sync": "wandb sync x"}},
    ]
    result = {"state": "FAILED", "cause": "oom", "reason": "no memory; not retried", "metrics": {"eval/loss": 0.0812}}
    text = status_text(fold(events, GONE, result, run_id="a"), RunDir(tmp_path), now_s=0.0)
    for line in (
        "step      300/632",
        "metrics   eval/loss 0.0812",
        "saved     step-300",
        "W&B       offline: wandb sync x",
    ):
        assert f"  {line}\n" in f"{text}\n"
    assert "why       no memory; not retried" in text
    assert "step " not in status_text(fold([], GONE, None, run_id="a"), RunDir(tmp_path), now_s=0.0), (
        "a script says no steps"
    )


def test_status_of_a_run_that_was_stopped_names_failures_only(tmp_path: Path) -> None:
    ended = {"event": "failure", "attempt": 1, "cause": "signal", "message": "killed by SIGTERM"}
    events = [
        {"event": "attempt_started", "attempt": 1},
        {"event": "stop_requested", "reason": "Ctrl-C"},
        {**ended, "node": 0, "rank": 0},
        {**ended, "node": 1, "rank": 1, "cause": "worker_error", "message": f"ValueError: {'x' * 500}"},
    ]
    text = status_text(fold(events, GONE, {"state": "CANCELLED"}, run_id="a"), RunDir(tmp_path), now_s=0.0)
    assert "SIGTERM" not in text
    (line,) = (line for line in text.splitlines() if "failure" in line)
    assert line.endswith("x ...")
    assert len(line) < 200


def test_what_is_complete_says_how_to_go_on() -> None:
    record = fold([], GONE, {"state": "SUCCEEDED", "cause": "done", "step": 632}, run_id="a")
    said = complete_text(record, {"train": {"until": "8 epochs"}})
    assert said == "a is already complete at step 632; to go on, give a larger total: train.until=... (now 8 epochs)"
    said = complete_text(record, {"script": "t.py", "args": {"epochs": 3}})
    assert said == "a is already complete at step 632; to go on, change what it is told: args.NAME=VALUE"
    assert complete_text(record, {"script": "t.py"}).endswith("args=[...]")


def test_ctrl_c_ends_the_following_and_not_the_run(
    launch: Launch, alive: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.cli.logs.time.sleep", interrupt)
    said = launch("logs", "last", "-f")
    assert said.code == 130
    assert f"{alive.run_id} goes on; `launch cancel last` stops it" in said.err


def test_logs_of_a_run_that_never_had_a_worker_are_those_of_its_agents(launch: Launch, done: RunDir) -> None:
    done.console.unlink()
    done.agents_log.write_text("ImportError: no such module\n")
    assert launch("logs", done.run_id).out == "ImportError: no such module\n"


def test_report_is_the_last_screen_the_attempts_and_the_time(launch: Launch, done: RunDir) -> None:
    said = launch("report", done.run_id).out
    assert said.startswith(f"{done.run_id}  SUCCEEDED")
    assert "ended by" in said
    assert "from the command to the first step" in said
    fields = launch("report", done.run_id, "--json").json
    assert (fields["run_id"], fields["state"], fields["exit_code"]) == (done.run_id, "SUCCEEDED", 0)
    assert [attempt["ended_by"] for attempt in fields["attempts"]] == ["finished"]
    time = fields["time"]
    assert sum(value for name, value in time.items() if name != "total_s") == pytest.approx(time["total_s"], abs=0.01)


def test_report_of_a_run_that_is_alive_says_so(launch: Launch, alive: RunDir) -> None:
    said = launch("report", alive.run_id).out
    assert said.startswith(f"{alive.run_id}  RUNNING")
    assert "it goes on, or nobody wrote it down" in said
