"""Sweeps as job arrays on the real cluster: chunks, points that fail, resume of some, cancel of all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from slurm_launched import Login, cancel_jobs_below

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

RECIPE = """\
name: many
model: {name: mlp, hidden: 8}
data: {name: synthetic, samples: 64, global_batch_size: 16}
train: {until: 4 steps, eval_every: null}
"""
SCRIPT = """
import argparse, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--number", type=int)
number = parser.parse_args().number
run = pathlib.Path(os.environ["LAUNCH_RUN_DIR"])
(run.parent / f"begun.{number}.{os.environ['LAUNCH_ATTEMPT']}").touch()
while number == 9 and not (run.parent / "go").exists():
    time.sleep(0.05)
if number == 2 and not (run.parent / "mended").exists():
    sys.exit("two is bad")
"""
SCONTROL = """#!/bin/bash
"{real}" "$@" | sed 's/^MaxArraySize .*/MaxArraySize            = 5/'
exit "${{PIPESTATUS[0]}}"
"""


@pytest.fixture
def folder(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(RECIPE)
    text = "name: many\nscript: train.py\nargs: {number: 0}\nresume: self\nfaults: {max_restarts: 0}\n"
    (tmp_path / "script.yaml").write_text(text)
    yield tmp_path
    cancel_jobs_below(slurm_cluster, tmp_path)


@pytest.fixture
def small_arrays(folder: Path) -> dict[str, str]:
    """A site whose MaxArraySize is 5: what its scontrol says is all that the launcher knows of it."""
    import shutil

    front = folder / "front"
    front.mkdir()
    (front / "scontrol").write_text(SCONTROL.format(real=shutil.which("scontrol")))
    (front / "scontrol").chmod(0o755)
    return {"PATH": f"{front}:{os.environ['PATH']}"}


def started(login: Login, folder: Path, recipe: str, *options: str, env: dict[str, str] | None = None) -> Path:
    """The directory of a sweep that was submitted."""
    runs = ("--runs-dir", str(folder / "runs"))
    done = login(str(folder / recipe), "--on", "slurm", *runs, "--json", *options, env=env)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])


def points(login: Login, sweep: Path) -> list[dict[str, Any]]:
    done = login("ls", str(sweep), "--json")
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout)["points"], key=lambda point: int(point["index"]))


def states(login: Login, sweep: Path) -> list[str]:
    return [point["state"] for point in points(login, sweep)]


def until(cluster: SlurmCluster, condition: Callable[[], bool], otherwise: Callable[[], Any]) -> None:
    cluster.wait_until(condition, lambda: str(otherwise()))


def test_twenty_points_in_arrays_of_five_run_to_the_end(
    login: Login, folder: Path, small_arrays: dict[str, str], slurm_cluster: SlurmCluster
) -> None:
    """F045: MaxArraySize 5, twenty points: four arrays, twenty distinct runs, no error that is passed over."""
    numbers = list(range(10, 30))
    axis = f"args.number={','.join(map(str, numbers))}"
    sweep = started(login, folder, "script.yaml", "--sweep", axis, env=small_arrays)
    assert len(list((sweep / "slurm").glob("batch-*.sh"))) == 4
    until(slurm_cluster, lambda: states(login, sweep) == ["SUCCEEDED"] * 20, lambda: points(login, sweep))
    assert {path.name for path in sweep.parent.glob("begun.*")} == {f"begun.{number}.1" for number in numbers}
    runs = [sweep.with_name(f"{sweep.name}.{index}") for index in range(20)]
    assert [json.loads((run / "plan.json").read_text())["worker"]["argv"] for run in runs] == [
        ["--number", str(number)] for number in numbers
    ]
    assert all((run / "events" / "batch-1.jsonl").exists() for run in runs)
    one = login("status", f"{sweep.name}.19")
    assert one.stdout.startswith(f"{sweep.name}.19  SUCCEEDED"), one.stderr


def test_points_of_the_built_in_job_train_what_they_say(
    login: Login, folder: Path, slurm_cluster: SlurmCluster
) -> None:
    sweep = started(login, folder, "job.yaml", "--sweep", "train.optimizer.lr=1e-3,1e-1", "--sweep", "train.seed=1")
    until(slurm_cluster, lambda: states(login, sweep) == ["SUCCEEDED"] * 2, lambda: points(login, sweep))
    runs = [sweep.with_name(f"{sweep.name}.{index}") for index in range(2)]
    assert len({json.loads((run / "result.json").read_text())["weights_sha256"] for run in runs}) == 2
    recipes = [json.loads((run / "plan.json").read_text())["recipe"] for run in runs]
    assert [recipe["train"]["optimizer"]["lr"] for recipe in recipes] == [1e-3, 1e-1]
    assert (sweep / "code.json").samefile(runs[1] / "code.json")


def test_a_failed_point_alone_runs_again(login: Login, folder: Path, slurm_cluster: SlurmCluster) -> None:
    """F097: `prepare` is run once for the sweep, where `launch` is called."""
    counter = folder / "counter"
    with (folder / "script.yaml").open("a") as file:
        file.write(f'prepare: ["echo $LAUNCH_RUN_ID >> {counter}"]\n')
    sweep = started(login, folder, "script.yaml", "--sweep", "args.number=1,2,3", "sweep.max_parallel=2")
    expected = ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    until(slurm_cluster, lambda: states(login, sweep) == expected, lambda: points(login, sweep))
    assert "FAILED: a worker failed   1 point: 1" in login("report", str(sweep)).stdout
    (sweep.parent / "mended").touch()
    again = login("resume", str(sweep))
    assert again.returncode == 0, again.stderr
    until(slurm_cluster, lambda: states(login, sweep) == ["SUCCEEDED"] * 3, lambda: points(login, sweep))
    assert counter.read_text().split() == [sweep.name]
    begun = sorted(path.name for path in sweep.parent.glob("begun.*"))
    assert begun == ["begun.1.1", "begun.2.1", "begun.2.2", "begun.3.1"]
    assert "nothing to resume" in login("resume", str(sweep)).stdout


def test_a_sweep_is_stopped_as_a_whole_and_goes_on(login: Login, folder: Path, slurm_cluster: SlurmCluster) -> None:
    sweep = started(login, folder, "script.yaml", "--sweep", "args.number=9,1,3", "sweep.max_parallel=1")
    begun = sweep.parent / "begun.9.1"
    until(slurm_cluster, begun.exists, lambda: points(login, sweep))
    assert states(login, sweep) == ["RUNNING", "PENDING", "PENDING"]
    waiting = login("status", f"{sweep.name}.2")
    assert "PENDING" in waiting.stdout, waiting.stderr
    stopped = login("cancel", str(sweep))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert states(login, sweep) == ["CANCELLED"] * 3
    (sweep.parent / "go").touch()
    alone = login("resume", f"{sweep.name}.1")
    assert alone.returncode == 0, alone.stderr
    until(slurm_cluster, lambda: states(login, sweep)[1] == "SUCCEEDED", lambda: points(login, sweep))
    assert states(login, sweep) == ["CANCELLED", "SUCCEEDED", "CANCELLED"]


def test_what_slurm_refuses_leaves_nothing(login: Login, folder: Path) -> None:
    """F045: the answer of sbatch is always looked at."""
    runs = ("--runs-dir", str(folder / "runs"))
    done = login(str(folder / "job.yaml"), "--on", "slurm", *runs, "--sweep", "train.seed=1,2", "slurm.reservation=no")
    assert done.returncode == 3
    assert "reservation" in done.stderr
    assert list((folder / "runs").glob("*")) == []
