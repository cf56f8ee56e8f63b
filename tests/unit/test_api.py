"""`launcher.run` and what it returns, on an executor where nothing runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_executor import STARTS, Ends, FakeExecutor, Prints

import launcher
from launcher import api
from launcher.errors import Problem
from launcher.executors import base
from launcher.runs.states import RunState

Place = type[FakeExecutor]
METRICS = '{"attempt": 1, "step": 1, "train/loss": 0.5}\n{"attempt": 1, "step": 2, "train/loss": 0.25}\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A folder with a script in it, where `local` is the fake executor."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(base.EXECUTORS, "local", "fake_executor:FakeExecutor")
    monkeypatch.setattr("launcher.planning.facts._slurm_configured", lambda: False)
    monkeypatch.setattr(api, "_POLL_S", 0.0005)
    monkeypatch.setattr(api, "_attached", [])
    for name, value in {"jobs": {}, "runs": {}, "plans": [], "attached": [], "signals": []}.items():
        monkeypatch.setattr(FakeExecutor, name, value)
    return FakeExecutor


def test_a_run_returns_at_once_and_can_be_waited_for(place: Place) -> None:
    run = launcher.run("train.py", args=["--lr", "1"], nodes=2, name="mine", overrides={"env.A": "x"})
    assert run.run_id.startswith("mine-")
    assert run.run_dir == Path.cwd() / "runs" / run.run_id
    assert (run.exit_code, run.result) == (None, None)
    assert run.wait() == 0
    assert run.exit_code == 0
    assert run.status().state is RunState.SUCCEEDED
    assert run.result is not None
    assert run.result["state"] == "SUCCEEDED"
    assert run.logs() == "0:0 hello\n"
    (plan,) = place.plans
    assert (len(plan.nodes), plan.worker.argv) == (2, ("--lr", "1"))
    assert {variable.name: variable.value for variable in plan.env}["A"] == "x"
    assert place.attached == [True]


def test_metrics_and_the_log_of_a_rank_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Prints("of rank 1\n", "attempt-1/node-1/rank-1.log")
    monkeypatch.setattr(place, "script", (*STARTS, log, Ends("SUCCEEDED", "done", 0)))
    run = launcher.run("train.py", nodes=2, wait=True)
    assert run.logs(rank=1) == "of rank 1\n"
    assert run.logs(rank=7) == ""
    assert run.metrics() == []
    (run.run_dir / "metrics.jsonl").write_text(METRICS)
    assert [record["train/loss"] for record in run.metrics()] == [0.5, 0.25]


def test_what_is_wrong_is_an_exception_with_all_problems(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(launcher.RecipeError) as caught:
        launcher.run("train.py", overrides=["nokey=1", "resources.nodes=-1"])
    assert len(caught.value.problems) == 2
    monkeypatch.setattr(place, "refusals", [Problem(where="port", message="taken")])
    with pytest.raises(launcher.Refused, match="taken"):
        launcher.run("train.py")
    assert place.plans == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"args": "--lr 1"}, "args is one text"),
        ({"args": ["--lr", 1]}, r"args\[1\] is 1, and has to be a text"),
        ({"overrides": "train.until=3 steps"}, "overrides is one text"),
        ({"overrides": [("a", "b")]}, r"overrides\[0\] is"),
    ],
)
def test_what_is_no_list_of_texts_is_said_at_once(place: Place, asked: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        launcher.run("train.py", **asked)
    assert not Path("runs").exists()


def test_a_run_that_takes_longer_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "script", STARTS)
    monkeypatch.setattr(place, "stays", True)
    run = launcher.run("train.py", nodes=2, overrides=["resume=self"])
    with pytest.raises(TimeoutError, match=run.run_id):
        run.wait(timeout_s=0.0)
    for _ in STARTS:
        run.status()
    assert run.status().state is RunState.RUNNING
    assert run.cancel()
    assert place.signals == [signal.SIGTERM]
    assert run.wait() == 75
    assert not run.cancel()


def test_any_run_is_found_again(place: Place) -> None:
    run = launcher.run("train.py", detached=True, wait=True)
    assert place.attached == [False]
    found = launcher.find("last")
    assert (found.run_id, found.run_dir, found.exit_code) == (run.run_id, run.run_dir, 0)
    assert found.wait() == 0
    with pytest.raises(launcher.RecipeError, match="no run has this id"):
        launcher.find("nosuch")


def test_no_signal_handler_is_touched(place: Place) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(signum) for signum in signals]
    launcher.run("train.py", wait=True)
    assert [signal.getsignal(signum) for signum in signals] == before


def test_a_run_that_nobody_keeps_is_kept_while_it_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "stays", True)
    monkeypatch.setattr(place, "script", STARTS)
    launcher.run("train.py")
    assert len(api._attached) == 1
    place.signals.append(signal.SIGTERM)
    for _ in range(2 * len(STARTS)):
        api._attached[0].status()
    launcher.run("train.py")
    assert len(api._attached) == 1


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, launcher; print(*sys.modules); launcher.run; launcher.RecipeError; dir(launcher)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    assert not modules & {"click", "pydantic", "omegaconf", "yaml", "psutil", "torch", "json"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        launcher.nothing  # noqa: B018


def test_the_public_names_are_all_there() -> None:
    assert {name: getattr(launcher, name) for name in launcher.__all__}
    assert set(launcher.__all__) <= set(dir(launcher))
