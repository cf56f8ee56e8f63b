"""What every executor must do, the fake one included. A new executor is one more line in PLACES."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import runs_values
from fake_executor import FakeExecutor

from launcher.executors.base import EXECUTORS, Executor, JobRef, get_executor
from launcher.executors.local import LocalExecutor
from launcher.planning.plan import Limits, Plan, WorkerPlan
from launcher.recipe.schema import ExecutorName
from launcher.runs.load import read_result
from launcher.runs.rundir import RunDir

LIMIT_S = 60.0
STAYS = (
    "import os, pathlib, time\nwhile not pathlib.Path(os.environ['LAUNCH_RUN_DIR'], 'go').exists(): time.sleep(0.01)\n"
)


@dataclass
class Place:
    """An executor, and what it needs to let a run end or go on."""

    executor: Executor
    make: Callable[[], tuple[Plan, RunDir]]
    let_end: Callable[[RunDir], None]


def fake_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("jobs", "runs", "plans", "attached", "signals"):
        monkeypatch.setattr(FakeExecutor, name, type(getattr(FakeExecutor, name))())
    monkeypatch.setattr(FakeExecutor, "stays", True)

    def make() -> tuple[Plan, RunDir]:
        run = runs_values.create(folder)
        return Plan.from_json(run.plan.read_text()), run

    def let_end(run: RunDir) -> None:
        monkeypatch.setattr(FakeExecutor, "stays", False)

    return Place(FakeExecutor(), make, let_end)


def local_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    script = folder / "stays.py"
    script.write_text(STAYS)

    work = WorkerPlan(
        kind="script", module=None, script=str(script), argv=(), cwd=str(folder), preload=(), python=sys.executable
    )
    run_dir = str(folder / runs_values.RUN_ID)

    def make() -> tuple[Plan, RunDir]:
        run = runs_values.create(
            folder,
            worker=work,
            recipe={"name": "stays", "tracking": {"wandb": {"mode": "disabled"}}},
            agent_argv=(sys.executable, "-P", "-m", "launcher.agent", "--run-dir", run_dir, "--local"),
            limits=Limits(max_restarts=0, grace_s=2.0, network_timeout_s=60.0, join_timeout_s=60.0),
        )
        return Plan.from_json(run.plan.read_text()), run

    return Place(LocalExecutor(), make, lambda run: (run.path / "go").touch())


PLACES = {
    "fake": fake_place,
    "local": pytest.param(local_place, marks=pytest.mark.process),
}
ELSEWHERE = {
    "slurm": "slurm/test_slurm_contract.py",
    "here": "slurm/test_slurm_here.py",
    "docker": "docker/test_docker_contract.py",
    "ssh": "ssh/test_ssh_contract.py",
    "sky": "sky/test_sky_contract.py",
}
"""Executors that need more than this machine, and the tests that hold them to the same."""


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    folder = tmp_path / "runs"
    folder.mkdir()
    made: Place = request.param(folder, monkeypatch)
    return made


def wait_until_gone(place: Place, ref: JobRef) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while place.executor.observe(ref).alive is not False:
        assert time.monotonic() < deadline_s, "it is still there"
        time.sleep(0.01)


def test_a_job_is_seen_from_its_submission_to_its_end(place: Place) -> None:
    plan, run = place.make()
    assert list(place.executor.check(plan)) == []
    ref = place.executor.submit(plan, run, attached=False)
    assert place.executor.observe(ref).alive is True
    place.let_end(run)
    wait_until_gone(place, ref)
    result = read_result(run)
    assert result is not None
    assert result["state"] == "SUCCEEDED"


def test_a_reference_is_text_that_another_process_can_use(place: Place) -> None:
    plan, run = place.make()
    ref = place.executor.submit(plan, run, attached=False)
    again = JobRef.parse(str(ref))
    assert again == ref
    assert again.executor == place.executor.name
    other = type(place.executor)()
    assert other.observe(again).alive is True
    place.let_end(run)
    wait_until_gone(place, ref)
    assert other.observe(again).alive is False


def test_a_request_to_stop_ends_the_job(place: Place) -> None:
    plan, run = place.make()
    ref = place.executor.submit(plan, run, attached=False)
    assert place.executor.cancel(ref, signum=signal.SIGTERM) is True
    wait_until_gone(place, ref)
    result = read_result(run)
    assert result is not None
    assert result["state"] == "CANCELLED"


def test_checking_changes_nothing(place: Place) -> None:
    plan, run = place.make()
    before = sorted(path.name for path in run.path.rglob("*"))
    place.executor.check(plan)
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_a_job_that_never_was_is_no_error(place: Place) -> None:
    ref = JobRef(place.executor.name, f"{runs_values.facts().hostname}:1:1")
    assert place.executor.observe(ref).alive in (None, False)


def test_every_executor_of_the_table_is_here() -> None:
    assert set(EXECUTORS) <= PLACES.keys() | ELSEWHERE.keys()
    assert set(get_args(ExecutorName)) == set(EXECUTORS), "a profile may name every one of them"
    assert all((Path(__file__).parents[1] / file).exists() for file in ELSEWHERE.values())
    for name in EXECUTORS:
        assert get_executor(name).name == name
