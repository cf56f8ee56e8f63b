"""The script of a task of SkyPilot, on two machines with disks of their own: it trains, and goes on on others."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import criteria
import pytest
from hosts import MakeBed
from launched import LAUNCH
from rented import MAIN, Rented

from launcher.executors.sky_home import bring_home, copy_record
from launcher.runs.events import read_events

pytestmark = [pytest.mark.process, pytest.mark.needs("netns"), pytest.mark.timeout(300)]

SHORT = (
    "train.until=80 steps",
    "train.eval_every=40 steps",
    "checkpoint.every=20 steps",
    "tracking.wandb.mode=disabled",
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the same on two nodes of this machine."""
    folder = tmp_path_factory.mktemp("local")
    done = subprocess.run(
        [LAUNCH, str(MAIN), *SHORT, "--nodes", "2", "--on", "local", "--runs-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(next(folder.glob("*/result.json")).read_text()))


def test_the_script_trains_the_main_recipe_on_two_machines(make_bed: MakeBed, local: dict[str, Any]) -> None:
    rented = Rented(make_bed(2), *SHORT)
    rented.rent()
    assert rented.codes() == [0, 0], rented.said()
    assert not rented.run.result.exists()
    assert bring_home(rented.plan, rented.run, machines=True, last=True)
    assert rented.result["state"] == "SUCCEEDED"
    assert rented.result["weights_sha256"] == local["weights_sha256"]
    assert rented.result["attempts"] == 1
    hosts = {event["node"]: event["host"] for event in rented.happened("node_bound")}
    assert hosts == {0: "h0", 1: "h1"}
    assert rented.step == 80
    token = rented.run.token.read_text()
    kept = [path for path in rented.store.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if token.encode() in path.read_bytes()], "the token has left the machines"
    assert rented.on(0).token.stat().st_mode & 0o077 == 0
    assert all(host.pids() == {} for host in rented.bed.hosts)


SLOW = ("train.until=400 steps", "checkpoint.every=10 steps", "train.eval_every=null", "tracking.wandb.mode=disabled")


def until_step(rented: Rented, step: int, machine: int = 0) -> None:
    """Wait until a step is written down on a machine."""
    metrics = rented.on(machine).metrics

    def reached() -> bool:
        lines = metrics.read_bytes().splitlines()[:-1] if metrics.exists() else []
        return any(json.loads(line).get("step", 0) >= step for line in lines[-3:])

    rented.until(reached)


def test_skypilots_cancel_leaves_a_checkpoint(make_bed: MakeBed) -> None:
    """It sends TERM to every process at once: the agents hear it more than once, and it is one request."""
    rented = Rented(make_bed(2), *SLOW)
    rented.rent()
    until_step(rented, 15)
    rented.cancel()
    codes = rented.codes()
    assert codes[0] == 75, rented.said()
    assert bring_home(rented.plan, rented.run, machines=True, last=True)
    assert rented.result["state"] == "CANCELLED"
    saved = [event["step"] for event in rented.happened("checkpoint_saved")]
    assert max(saved) == rented.result["step"]
    assert all(host.pids() == {} for host in rented.bed.hosts)


@pytest.mark.long
def test_a_stop_goes_by_the_store(make_bed: MakeBed) -> None:
    """Of a managed job nobody knows the machines; the nodes look at the store."""
    rented = Rented(make_bed(2), *SLOW, "sky.spot=true")
    rented.rent()
    until_step(rented, 15)
    assert rented.plan.sky is not None
    assert copy_record(f"stop:{int(signal.SIGTERM)}", rented.plan.sky.store, rented.run.path)
    assert rented.codes()[0] == 75, rented.said()
    assert bring_home(rented.plan, rented.run, machines=True, last=True)
    saved = rented.result["step"]
    assert rented.result["state"] == "CANCELLED"
    # `launch resume` takes back what has ended it; other machines go on.
    rented.run.result.unlink()
    rented.lose_machines()
    assert copy_record("withdraw", rented.plan.sky.store, rented.run.path)
    rented.rent()
    begun = rented.until(
        lambda: [e for e in read_events(rented.on(0).path) if e["event"] == "training_started" and e["attempt"] == 2]
    )
    assert begun[0]["step"] == saved
    rented.cancel()
    assert rented.codes()[0] == 75, rented.said()


def test_spot_machines_that_are_lost_are_replaced_and_the_run_goes_on(make_bed: MakeBed, local: dict[str, Any]) -> None:
    """All machines and their disks are gone; SkyPilot's controller starts the task again on others."""
    rented = Rented(make_bed(2), *SHORT, "sky.spot=true")
    # Each step takes long enough for what is copied away every now and then.
    slow = criteria.SITECUSTOMIZE.replace("launcher[./]agent", r"agent/start\.py --run-dir")
    (rented.bed.folder / "sitecustomize.py").write_text(slow)
    rented.rent(PYTHONPATH=str(rented.bed.folder), TEST_STEP_S="0.5")
    rented.until(lambda: list(rented.store.rglob("step-*/manifest.json")))
    rented.until(lambda: [path for path in rented.store.rglob("head.jsonl") if b"attempt_started" in path.read_bytes()])
    rented.lose_machines()
    rented.rent()
    assert rented.codes() == [0, 0], rented.said()
    assert bring_home(rented.plan, rented.run, machines=True, last=True)
    result = rented.result
    assert (result["state"], result["attempts"]) == ("SUCCEEDED", 2)
    assert result["weights_sha256"] == local["weights_sha256"]
    resumed = rented.happened("training_started", attempt=2)[0]
    assert resumed["step"] > 0, "it goes on from the store"
    assert [event["how"] for event in rented.happened("requeued")] == ["rented"]
    assert result.get("restarts", 0) == 0, "a machine that is taken away costs no restart"


def test_a_run_that_is_over_is_not_started_again(make_bed: MakeBed) -> None:
    rented = Rented(make_bed(1), "train.until=5 steps", "tracking.wandb.mode=disabled", nodes=1)
    rented.rent()
    assert rented.codes() == [0], rented.said()
    rented.lose_machines()
    rented.rent()
    assert rented.codes() == [0], rented.said()
    assert "the run is over: SUCCEEDED; nothing is started" in rented.said()


def test_a_store_that_cannot_be_read_starts_nothing(make_bed: MakeBed) -> None:
    """Whether the run has begun is not known: one from zero over it would be worse."""
    rented = Rented(make_bed(1), "train.until=5 steps", nodes=1)
    rented.task["run"] = rented.task["run"].replace("file://", "nowhere://")
    rented.rent()
    assert rented.codes() == [1]
    assert "whether the run has begun is not known" in rented.said()


def test_fewer_machines_than_the_plan_has_are_refused(make_bed: MakeBed) -> None:
    rented = Rented(make_bed(2), "train.until=5 steps")
    rented.rent(SKYPILOT_NUM_NODES="1")
    assert rented.codes() == [1, 1]
    assert "1 machines, and the plan has 2" in rented.said()


def test_a_script_runs_in_the_copy_of_its_code(make_bed: MakeBed, tmp_path: Path) -> None:
    """It needs torch there and nothing of ours."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "helper.py").write_text("VALUE = 7\n")
    (project / "train.py").write_text(
        "import os, pathlib, helper\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "assert pathlib.Path(__file__).parent == pathlib.Path.cwd(), pathlib.Path.cwd()\n"
        "print('total', int(total), helper.VALUE, flush=True)\n"
    )
    (project / "recipe.yaml").write_text("name: mine\nscript: train.py\nworkdir: .\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    rented = Rented(make_bed(2), target=project / "recipe.yaml", is_script=True)
    rented.rent()
    assert rented.codes() == [0, 0], rented.said()
    console = rented.on(0).console.read_text()
    assert "total 2 7" in console, console
