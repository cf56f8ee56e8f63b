"""The script of a task of SkyPilot, on two machines with disks of their own: it trains, and goes on on others."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from hosts import MakeBed
from launched import LAUNCH
from rented import MAIN, Rented

from launcher.executors.sky_home import bring_home

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
