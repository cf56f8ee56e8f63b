"""`launch sync` with the real W&B package, against as much of a server as that needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import runs_values as values
from fake_wandb_server import FakeWandbServer, fake_wandb_server

from jobs.metrics import MetricsLog
from launcher.planning.plan import WorkerPlan
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.network]

Command = Callable[..., CompletedProcess[str]]
KEY = "c0ffee" * 6 + "beef"
SCRIPT = """
import sys, time
now, part = time.time, int(sys.argv[3])
time.time = lambda: now() + 60 * part  # two parts of one second would be one folder
import wandb
settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
run = wandb.init(id=sys.argv[1], resume="allow", mode="offline", project="demo", dir=sys.argv[2], settings=settings)
for step in map(int, sys.argv[4:]):
    run.log({"train/loss": step / 10, "step": step})
run.finish()
"""


@pytest.fixture
def server() -> Iterator[FakeWandbServer]:
    with fake_wandb_server() as server:
        yield server


@pytest.fixture
def logged_in(server: FakeWandbServer, monkeypatch: pytest.MonkeyPatch) -> FakeWandbServer:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return server


def make_run(runs: Path, *, kind: str) -> RunDir:
    """A run that has ended."""
    wandb: dict[str, Any] = {"mode": "auto", "project": "demo", "entity": None, "tags": []}
    worker = WorkerPlan(
        kind=kind,
        module="jobs.train" if kind == "job" else None,
        script=None if kind == "job" else "/train.py",
        argv=(),
        cwd=str(runs),
        preload=(),
        python=sys.executable,
    )
    run = values.create(runs, worker=worker, recipe={"name": "mnist-ddp", "tracking": {"wandb": wandb}})
    EventWriter(run.path, "head").write("finished", state="SUCCEEDED", cause="done", exit_code=0)
    run.result.write_text(json.dumps({"state": "SUCCEEDED", "cause": "done", "exit_code": 0}))
    return run


def follow_offline(run: RunDir, attempt: int) -> None:
    """The tracking process of one attempt, without a key."""
    wandb = {"mode": "auto", "project": "demo", "entity": None, "tags": []}
    order = {"run_dir": str(run.path), "run_id": run.run_id, "attempt": attempt, "name": "mnist-ddp", "wandb": wandb}
    order |= {"tensorboard": False, "config": {"train": {"seed": 0}}}
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    lines = json.dumps(order) + "\n" + json.dumps({"finish": 0}) + "\n"
    subprocess.run([sys.executable, "-m", "jobs.follower"], input=lines, text=True, env=env, check=True, timeout=60)


def test_a_run_of_three_offline_attempts_becomes_one_curve_with_each_step_once(
    tmp_path: Path, command: Command, server: FakeWandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F062."""
    run = make_run(tmp_path / "runs", kind="job")
    for attempt, (resumed_from, steps) in enumerate([(0, (1, 2, 3)), (2, (3, 4)), (4, (5,))], start=1):
        log = MetricsLog(run.metrics, attempt=attempt, resumed_from=resumed_from)
        for step in steps:
            log.write(step, **{"train/loss": attempt + step / 10, "samples_seen": step})
        log.close()
        if attempt != 2:  # the tracking of the second was killed before it wrote anything
            follow_offline(run, attempt)

    planned = command("sync", run.run_id, "--dry-run")
    assert "5 steps, 1 to 5, in place of 2 offline parts" in planned.stdout, planned.stderr
    refused = command("sync", run.run_id)
    assert refused.returncode == 3
    assert "there is no key" in refused.stderr

    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    done = command("sync", run.run_id)
    assert done.returncode == 0, done.stdout + done.stderr
    curve = [(line["step"], line["train/loss"]) for line in server.history(run.run_id)]
    assert curve == [(1, 1.1), (2, 1.2), (3, 2.3), (4, 2.4), (5, 3.5)]
    again = command("sync", run.run_id)
    assert "every step was sent" in again.stdout
    assert len(server.history(run.run_id)) == 5
    assert f"W&B       online: {server.url}" in command("status", run.run_id).stdout
    hits = [path for path in run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert hits == []


def test_the_parts_of_a_script_are_uploaded_in_order_as_one_run(
    tmp_path: Path, command: Command, logged_in: FakeWandbServer
) -> None:
    """F062."""
    run = make_run(tmp_path / "runs", kind="script")
    for part, steps in enumerate((("1", "2"), ("3", "4"), ("5",))):
        arguments = [run.run_id, str(run.path), str(part), *steps]
        subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=True, timeout=60)
    wandb = run.path / "wandb"
    assert len(list(wandb.glob("offline-run-*"))) == 3

    planned = command("sync", run.run_id, "--dry-run").stdout.splitlines()
    assert [line.split()[:4] for line in planned[1:]] == [["part", str(k), "of", "3"] for k in (1, 2, 3)]

    logged_in.authorised = False
    failed = command("sync", run.run_id)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert KEY not in failed.stdout + failed.stderr
    logged_in.authorised = True
    done = command("sync", run.run_id)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in logged_in.history(run.run_id)] == [1, 2, 3, 4, 5]
    assert [line["_step"] for line in logged_in.history(run.run_id)] == [0, 1, 2, 3, 4]
    assert "already uploaded" in command("sync", run.run_id, "--dry-run").stdout
