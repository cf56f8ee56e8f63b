"""`--on here`: the allocation that one is in, on purpose only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launched import LAUNCH, LIMIT_S
from slurm_cluster import COMMAND, SlurmCluster

from launcher.runs.events import read_events

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

TRAINS = """
import os, pathlib, signal, sys, time
run, rank = pathlib.Path(os.environ["LAUNCH_RUN_DIR"]), os.environ["RANK"]
def save(*_):
    (run / f"saved-{rank}").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(run / f"runs-{rank}").write_text(os.uname().nodename)
while not os.environ.get("SHORT"):
    time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def salloc(folder: Path, *command: str, nodes: int = 2, **variables: str) -> subprocess.Popen[str]:
    argv = [str(COMMAND), "run", "salloc", f"--nodes={nodes}", "--ntasks-per-node=1", *command]
    return subprocess.Popen(
        argv, cwd=folder, env={**os.environ, **variables}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_all_nodes_of_the_allocation_are_used(slurm_cluster: SlurmCluster, tmp_path: Path, script: Path) -> None:
    process = salloc(tmp_path, LAUNCH, str(script), "--on", "here", SHORT="1")
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + errors
    (run,) = (tmp_path / "runs").iterdir()
    first, second = ((run / f"runs-{rank}").read_text() for rank in (0, 1))
    assert first != second
    assert json.loads((run / "result.json").read_text())["state"] == "SUCCEEDED"
    (submitted,) = [event for event in read_events(run) if event["event"] == "submitted"]
    assert submitted["ref"].startswith("here:")


def test_ctrl_c_stops_with_a_checkpoint_and_leaves_the_allocation(
    slurm_cluster: SlurmCluster, tmp_path: Path, script: Path
) -> None:
    process = salloc(tmp_path, "bash", "-c", f"{LAUNCH} {script} --on here & echo $! >pid; wait $!; echo code $?")

    def run_or_over() -> bool:
        return len(list(tmp_path.glob("runs/*/runs-*"))) == 2 or process.poll() is not None

    slurm_cluster.wait_until(run_or_over, lambda: "no workers")
    assert process.poll() is None, process.communicate()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    out, errors = process.communicate(timeout=LIMIT_S)
    assert "code 75" in out, out + errors
    assert len(list(tmp_path.glob("runs/*/saved-*"))) == 2
    (result,) = tmp_path.glob("runs/*/result.json")
    assert json.loads(result.read_text())["state"] == "CANCELLED"


def test_a_bare_launch_in_an_allocation_says_what_there_is(
    slurm_cluster: SlurmCluster, tmp_path: Path, script: Path
) -> None:
    process = salloc(tmp_path, "bash", "-c", f"{LAUNCH} {script}; {LAUNCH} {script} --nodes 3 --on here", nodes=1)
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, out + errors
    assert "add --on slurm (a new job, also by a profile), --on here (job " in errors
    assert "3 nodes are asked for, but job" in errors
    assert not (tmp_path / "runs").exists()


def test_outside_of_an_allocation_there_is_no_here(slurm_cluster: SlurmCluster, tmp_path: Path, script: Path) -> None:
    said = slurm_cluster.command("run", LAUNCH, str(script), "--on", "here", "--runs-dir", str(tmp_path / "none"))
    assert said.returncode == 3
    assert "this is not inside an allocation of SLURM" in said.stderr
    assert not (tmp_path / "none").exists()
