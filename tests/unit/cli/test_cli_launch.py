"""`launch RECIPE|SCRIPT.py`: the road from arguments to an exit code, on an executor where nothing runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import STARTS, Ends, FakeExecutor, Happens, Prints

from launcher.errors import Problem
from launcher.runs.events import read_events
from launcher.runs.find import all_runs
from launcher.runs.rundir import RunDir

Launch = Callable[..., Any]
Place = type[FakeExecutor]


def only_run() -> Path:
    """The directory of the one run that there is."""
    (pointer,) = all_runs()
    return pointer.run.path


def test_a_run_in_the_foreground_shows_its_console_and_how_it_ended(launch: Launch, place: Place) -> None:
    said = launch("train.py", "--nodes", "2")
    assert said.code == 0
    assert said.out.startswith("0:0 hello\n")
    assert f"{only_run().name}  SUCCEEDED in 21 s" in said.out
    assert "2 nodes (both on this machine: 2 agents)   2 ranks   cpu, gloo over lo" in said.out
    assert place.attached == [True]
    assert only_run().parent == Path.cwd() / "runs"
    events = [event["event"] for event in read_events(only_run())]
    assert events[0] == "created"
    assert "submitted" in events


def test_a_detached_run_returns_at_once_with_what_to_do_next(launch: Launch, place: Place) -> None:
    said = launch("train.py", "--detach")
    assert said.code == 0
    assert said.out.splitlines()[0] == only_run().name
    assert "launch logs last -f" in said.out
    assert place.attached == [False]


def test_nodes_may_be_a_range(launch: Launch, place: Place) -> None:
    said = launch("train.py", "--nodes", "1:2", "resume=self", "--dry-run")
    assert (said.code, "1 to 2 nodes" in said.out) == (0, True)
    plan = json.loads(launch("train.py", "--nodes", "1:2", "resume=self", "--dry-run", "--json").out)
    assert (len(plan["nodes"]), plan["min_nodes"]) == (2, 1)
    assert place.plans == []


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("0", "0 is not in the range x>=1"),
        ("1:", "'1:' is not a range of nodes; write MIN:MAX, as in 1:4"),
        ("3:1", "resources.nodes: 3:1 begins above its end"),
    ],
)
def test_nodes_that_are_none(launch: Launch, nodes: str, says: str) -> None:
    said = launch("train.py", "--nodes", nodes, "resume=self", "--dry-run")
    assert said.code == 2
    assert says in said.err


def test_a_dry_run_creates_nothing(launch: Launch, place: Place, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    said = launch("train.py", "--nodes", "2", "--dry-run")
    assert said.code == 0
    assert "dry run: nothing was started" in said.out
    plan = json.loads(launch("train.py", "--nodes", "2", "--dry-run", "--json").out)
    assert len(plan["nodes"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert place.plans == []


@pytest.mark.parametrize("args", [["--lr", "1e-3"], ["a b", "'q'", '"', "$HOME", "--", "--nodes", "7", "", "k=v", "*"]])
def test_arguments_of_a_script_are_not_touched(launch: Launch, place: Place, args: list[str]) -> None:
    assert launch("train.py", "--nodes", "2", "--", *args).code == 0
    assert place.plans[0].worker.argv == tuple(args)
    assert len(place.plans[0].nodes) == 2


def test_options_may_stand_before_the_recipe(launch: Launch, place: Place) -> None:
    assert launch("--nodes", "2", "--name", "mine", "train.py", "env.A=x").code == 0
    assert only_run().name.startswith("mine-")
    assert {variable.name: variable.value for variable in place.plans[0].env}["A"] == "x"


@pytest.mark.parametrize(
    ("flag", "environment", "override", "expected"),
    [
        ("from flag", "from env", "from recipe", "from flag"),
        ("", "from env", "from recipe", "from env"),
        ("", "", "from recipe", "from recipe"),
        ("", "", "", "runs"),
    ],
)
def test_where_runs_are_made(
    *, launch: Launch, monkeypatch: pytest.MonkeyPatch, flag: str, environment: str, override: str, expected: str
) -> None:
    monkeypatch.setenv("LAUNCH_RUNS", environment)
    arguments = (["--runs-dir", flag] if flag else []) + ([f"runs_dir='{override}'"] if override else [])
    assert launch("train.py", *arguments).code == 0
    assert only_run().parent == Path.cwd() / expected


def test_the_last_line_of_json_is_for_programs(launch: Launch) -> None:
    said = launch("train.py", "--json")
    assert said.json == {
        "run_id": only_run().name,
        "run_dir": str(only_run()),
        "ref": "local:0",
        "state": "SUCCEEDED",
        "exit_code": 0,
    }
    detached = launch("train.py", "--json", "--detach")
    assert list(detached.json) == ["run_id", "run_dir", "ref"]
    assert len(detached.out.splitlines()) == 1


FIRST = {
    "node": 1,
    "rank": 1,
    "cause": "worker_error",
    "exit_code": 7,
    "message": "ValueError: boom",
    "place": "t.py:3",
}


@pytest.mark.parametrize("code", [1, 7, 137, 139])
def test_the_exit_code_is_that_of_the_first_failing_worker(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """F013: the exit code is kept."""
    failure = {**FIRST, "exit_code": code, "log": "logs/attempt-1/node-1/rank-1.log"}
    end = Ends(
        "FAILED", "worker_error", code, {"first_failure": failure, "reason": "ValueError: boom; not retried: no"}
    )
    monkeypatch.setattr(place, "script", (*STARTS, end))
    said = launch("train.py", "--nodes", "2")
    assert said.code == code
    assert "first   rank 1 on node 1 (here)" in said.out
    assert "        ValueError: boom\n" in said.out
    assert f"   exit {code} (" in said.out
    assert launch("train.py", "--nodes", "2", "--json").json["exit_code"] == code


def test_a_run_without_a_result_is_a_fault_of_ours(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "script", STARTS)
    said = launch("train.py")
    assert said.code == 70
    assert "did not say why" in said.out
    assert "logs/agents.log" in said.out


class Removed:
    """Somebody removes the run directory."""

    def play(self, run: RunDir) -> None:
        shutil.rmtree(run.path)


def test_a_run_directory_that_is_removed_meanwhile_is_said(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "script", (*STARTS, Prints("0:0 hello\n"), Removed()))
    said = launch("train.py")
    assert said.code == 70
    assert "was removed while it was alive" in said.out
    assert "fault of the launcher" not in said.err


def test_an_unfinished_last_line_of_the_console_is_shown(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "script", (*STARTS, Ends("SUCCEEDED", "done", 0), Prints("0:0 bye")))
    assert "0:0 bye\n" in launch("train.py").out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_is_passed_on_once_and_the_run_ends_with_75(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """F011: signals reach the agents, and the launcher waits for them."""

    class Kill(Prints):
        def play(self, run: Any) -> None:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(place, "script", (*STARTS, Kill("")))
    monkeypatch.setattr(place, "stays", True)
    before = signal.getsignal(signum)
    said = launch("train.py", "resume=lightning")
    assert said.code == 75
    assert place.signals == [signum]
    assert "stopping: saving a checkpoint (again to end at once)" in said.err
    assert "0:0 saved" in said.out
    assert "CANCELLED" in said.out
    assert "launch resume last" in said.out
    assert signal.getsignal(signum) == before


def test_the_second_request_is_passed_on_too(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kill(Prints):
        def play(self, run: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(place, "script", (*STARTS, Kill("")))
    monkeypatch.setattr(place, "stays", True)
    monkeypatch.setattr(place, "when_stopped", (Kill(""), *[Prints("")] * 9, Ends("CANCELLED", "cancelled", 130)))
    said = launch("train.py", "resume=self")
    assert place.signals == [signal.SIGINT, signal.SIGINT]
    assert "stopping: the workers are asked to end" in said.err, "whether they save is not known"
    assert "ending at once" in said.err


def test_an_ignored_hangup_stays_ignored(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangup(Prints):
        def play(self, run: Any) -> None:
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(place, "script", (*STARTS, Hangup(""), Ends("SUCCEEDED", "done", 0)))
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch("train.py").code == 0
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert place.signals == []


def test_what_a_place_refuses_exits_3_and_creates_nothing(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [Problem(where="network.master_port", message=f"port {port} is in use", hint="auto") for port in (1, 2)]
    monkeypatch.setattr(place, "refusals", problems)
    said = launch("train.py", "--json")
    assert said.code == 3
    assert said.err.count("is in use") == 2
    assert [problem["hint"] for problem in said.json["error"]["problems"]] == ["auto", "auto"]
    assert all_runs() == []
    assert not Path("runs").exists()


def test_a_cluster_wants_to_be_told_where_to_run(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.planning.facts._slurm_configured", lambda: True)
    said = launch("train.py")
    assert said.code == 3
    assert "add --on slurm (a new job, also by a profile), --on here" in said.err
    assert "or --on local" in said.err
    assert place.plans == []
    assert launch("train.py", "--on", "local").code == 0


def test_inside_an_allocation_nothing_is_used_by_accident(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    said = launch("train.py")
    assert said.code == 3
    assert "this is inside job 77 of SLURM" in said.err
    assert place.plans == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "did you mean `launch ls`?"),
        (["nosuch.yaml"], "there is no such file"),
        (["nosuch.py"], "nosuch.py: there is no such file"),
        (["trian.py"], "did you mean 'train.py'?"),
        (["recipes/a.yaml"], "there is no folder recipes"),
        ([], "Usage: launch RECIPE|SCRIPT.py"),
        (["train.py", "--nodes", "0"], "--nodes"),
        (["train.py", "--on", "moon"], "'moon' is not a place"),
        (["train.py", "nokey=1"], "nokey"),
        (["train.py", "lr=1e-3"], "arguments of the script stand after `--`: -- --lr ..."),
        (["torchrun", "train.py"], "launch train.py --nodes 2"),
        (["-m", "pkg.train"], "`module: pkg.train` in a recipe"),
        (["train.py", "--nodes", "two"], "'two' is not a whole number"),
        (["train.py", "--lr", "3"], "arguments of the script stand after `--`: launch train.py -- --lr ..."),
        (["train.py", "--time", "3"], "an option of sbatch: use slurm.time"),
        (["train.py", "-p", "gpu"], "an option of sbatch: use slurm.partition"),
        (["a.yaml", "--mail-type", "END"], "an option of sbatch: use slurm.sbatch.mail-type"),
        (["train.py", "--on", "slrm"], "did you mean 'slurm'? executors: local"),
        (["train.py", "--nproc_per_node", "2"], "Did you mean '--nproc-per-node'?"),
        (["a.yaml", "--", "--lr", "1"], "arguments after `--` (--lr 1) go with SCRIPT.py"),
        (["status"], "`launch status --help` shows the usage"),
        (["list"], "Choose from: models, datasets, tasks, strategies, optimizers, schedules, profiles, executors\n"),
        (["status", "nosuch"], "no run has this id"),
    ],
)
def test_usage_errors_exit_2_and_create_nothing(launch: Launch, place: Place, arguments: list[str], said: str) -> None:
    result = launch(*arguments)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert all_runs() == []


def test_a_fault_of_ours_is_a_sentence_and_a_file(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(place, "check", breaks)
    said = launch("train.py")
    assert said.code == 70
    assert "this is a fault of the launcher: ZeroDivisionError: deep inside" in said.err
    assert "Traceback" not in said.err
    path = Path(said.err.partition("the traceback is in ")[2].partition(";")[0])
    assert "deep inside" in path.read_text()


def test_an_interrupt_before_anything_started_is_no_traceback(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, "check", interrupted)
    said = launch("train.py")
    assert said.code == 130
    assert said.err.strip() == "interrupted"
    assert all_runs() == []


def test_waiting_for_a_node_ends_up_in_the_record(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Happens("head", "waiting", {"missing": [1], "waited_s": 40.0})
    monkeypatch.setattr(place, "script", (*STARTS[:4], waits, Ends("FAILED", "rendezvous", 1, {"reason": "node 1"})))
    said = launch("train.py", "--nodes", "2")
    assert said.code == 1
    assert "FAILED: the nodes did not come together, after 21s   exit 1" in said.out


@pytest.mark.parametrize(("time_", "problem"), [("0s", "it has to be longer than nothing"), ("soon", "soon")])
def test_a_rehearsal_in_no_time_is_refused(launch: Launch, time_: str, problem: str) -> None:
    said = launch("try", "train.py", "--timeout", time_)
    assert (said.code, said.out) == (2, "")
    assert "--timeout" in said.err
    assert problem in said.err
