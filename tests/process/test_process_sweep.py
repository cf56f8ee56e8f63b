"""Sweeps on one machine, with real runs: side by side, apart from each other, stopped, killed and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S

pytestmark = pytest.mark.process

SCRIPT = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--number", type=int)
number = parser.parse_args().number
run = pathlib.Path(os.environ["LAUNCH_RUN_DIR"])
begun = run.parent / f"begun.{number}.{os.environ['LAUNCH_ATTEMPT']}"
begun.write_text(json.dumps({"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0)), "at": time.time()}))
while not (run.parent / "go").exists():
    time.sleep(0.01)
if number == 2 and not (run.parent / "mended").exists():
    sys.exit("two is bad")
(run / "done").touch()
"""


class Sweep:
    """A sweep of a script over `args.number`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "a.yaml").write_text(
            "name: many\nscript: train.py\nargs: {number: 0}\nresume: self\nfaults: {max_restarts: 0}\n"
        )

    def start(self, numbers: str, *options: str) -> subprocess.Popen[str]:
        command = [LAUNCH, "a.yaml", "--on", "local", "--runs-dir", str(self.runs), "--sweep", f"args.number={numbers}"]
        return subprocess.Popen([*command, *options], cwd=self.folder, stdout=subprocess.PIPE, text=True)

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LAUNCH, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def go(self) -> None:
        (self.runs / "go").touch()

    def begun(self) -> dict[int, dict[str, Any]]:
        """What each point that has begun wrote down, of its newest attempt."""
        paths = sorted(self.runs.glob("begun.*"), key=lambda path: int(path.name.split(".")[2]))
        return {int(path.name.split(".")[1]): json.loads(text) for path in paths if (text := path.read_text())}

    def states(self) -> list[str]:
        said = json.loads(self.launch("ls", "last", "--json").stdout)
        return [point["state"] for point in sorted(said["points"], key=lambda point: point["index"])]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"after {LIMIT_S:.0f} s: {what}"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def test_points_run_side_by_side_and_a_failed_one_stops_nobody(sweep: Sweep) -> None:
    cpus = len(os.sched_getaffinity(0))
    process = sweep.start("1,2,3,4")
    together = until(lambda: len(sweep.begun()) == min(cpus, 4) and sweep.begun(), "the first points run")
    taken = [cpu for point in together.values() for cpu in point["cpus"]]
    assert len(taken) == len(set(taken))
    sweep.go()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    assert f"{min(cpus, 4)} at a time on this machine" in output
    assert "point 1   FAILED   a worker failed" in output
    assert sweep.states() == ["SUCCEEDED", "FAILED", "SUCCEEDED", "SUCCEEDED"]
    report = sweep.launch("report", "last").stdout
    assert "FAILED: a worker failed   1 point: 1" in report

    (sweep.runs / "mended").touch()
    again = sweep.launch("resume", "last")
    assert again.returncode == 0, again.stderr
    assert sweep.states() == ["SUCCEEDED"] * 4
    assert sorted(path.name for path in sweep.runs.glob("begun.*")) == [
        "begun.1.1",
        "begun.2.1",
        "begun.2.2",
        "begun.3.1",
        "begun.4.1",
    ]
    (line,) = [line for line in sweep.launch("ls").stdout.splitlines() if "many-" in line]
    assert line.endswith("4 points: 4 SUCCEEDED")


@pytest.mark.parametrize("in_git", [True, False])
def test_with_mended_code_the_points_that_failed_go_on_when_somebody_says_so(sweep: Sweep, in_git: bool) -> None:
    """As of one run: other code is never taken, or passed over, without a word. Who has not begun gets it, too."""
    if in_git:
        subprocess.run(["git", "init", "--quiet", "."], cwd=sweep.folder, check=True)
    process = sweep.start("2,1,3", "sweep.max_parallel=1")
    until(lambda: 2 in sweep.begun(), "the first point runs")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert sweep.states()[1:] == ["UNSTARTED", "UNSTARTED"]
    sweep.go()
    mended = (sweep.folder / "train.py").read_text().replace(
        "number == 2", "number == 9"
    ) + '(run / "mended").touch()\n'
    (sweep.folder / "train.py").write_text(mended)
    refused = sweep.launch("resume", "last")
    assert refused.returncode == 3
    assert "is changed since: modified train.py" in refused.stderr
    assert ("--code same goes on" in refused.stderr) is in_git
    again = sweep.launch("resume", "last", "--code", "current")
    assert again.returncode == 0, again.stderr
    assert f"code: {sweep.folder} as it is now" in again.stderr
    assert sweep.states() == ["SUCCEEDED"] * 3
    assert len(list(sweep.runs.glob("many-*.*/mended"))) == 3


def test_a_queue_that_is_killed_leaves_no_run_and_goes_on(sweep: Sweep) -> None:
    """Its runs belong to it, as a run in the foreground belongs to its launcher."""
    process = sweep.start("1,3,4,5", "sweep.max_parallel=1")
    worker = until(lambda: sweep.begun().get(1), "the first point runs")["pid"]
    process.kill()
    process.communicate()
    until(lambda: gone(worker), "its worker is gone")
    until(lambda: sweep.states() == ["CANCELLED", "UNSTARTED", "UNSTARTED", "UNSTARTED"], "the states say so")
    sweep.go()
    again = sweep.launch("resume", "last")
    assert again.returncode == 0, again.stderr
    assert sweep.states() == ["SUCCEEDED"] * 4


def test_a_detached_sweep_is_stopped_as_a_whole(sweep: Sweep) -> None:
    process = sweep.start("1,3,4", "sweep.max_parallel=1", "--detach")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert "3 points, 1 at a time on this machine" in output
    worker = until(lambda: sweep.begun().get(1), "the first point runs")["pid"]
    assert sweep.states() == ["RUNNING", "PENDING", "PENDING"]
    alone = sweep.launch("status", "last.2")
    assert alone.returncode == 0, alone.stderr  # which makes the run directory of a point that has not begun
    assert sweep.states() == ["RUNNING", "PENDING", "PENDING"]
    stopped = sweep.launch("cancel", "last")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert gone(worker)
    assert sweep.states() == ["CANCELLED", "CANCELLED", "CANCELLED"]
    sweep.go()
    (sweep_id,) = [path.parent.name for path in sweep.runs.glob("*/sweep.json")]
    third = sweep.launch("resume", f"{sweep_id}.2")
    assert third.returncode == 0, third.stdout + third.stderr
    assert sweep.states() == ["CANCELLED", "CANCELLED", "SUCCEEDED"]


def test_a_stop_saves_what_runs_and_begins_no_more(sweep: Sweep) -> None:
    process = sweep.start("1,3,4", "sweep.max_parallel=1")
    until(lambda: sweep.begun().get(1), "the first point runs")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert sweep.states()[1:] == ["UNSTARTED", "UNSTARTED"]
    assert len(sweep.begun()) == 1
