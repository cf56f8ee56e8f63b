"""Sweeps on the command line, as far as nothing is started: dry runs, refusals, lists."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
RECIPE = """\
name: many
script: train.py
args: {lr: 1e-3}
sweep:
  grid: {args.lr: [1e-3, 1e-2], args.word: [a, b c]}
"""


@pytest.fixture
def launch_sweep(launch: Launch) -> Launch:
    Path("a.yaml").write_text(RECIPE)
    return launch


def test_a_dry_run_shows_the_points_and_the_plan_of_the_first(launch_sweep: Launch) -> None:
    said = launch_sweep("a.yaml", "--on", "local", "--dry-run", "sweep.max_parallel=1")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[2:8] == [
        "4 points, 1 at a time",
        "POINT  args.lr  args.word",
        "0      1e-3     a",
        "1      1e-3     b c",
        "2      1e-2     a",
        "3      1e-2     b c",
    ]
    assert "Plan of point 0" in lines
    assert not Path("runs").exists()


def test_what_only_a_queue_can_do_is_refused_on_one_machine(launch_sweep: Launch) -> None:
    said = launch_sweep("a.yaml", "--on", "local", "--dry-run", "--begin", "now+1hour")
    assert (said.code, said.out) == (2, "")
    assert "--begin: local has no queue" in said.err


def test_a_dry_run_of_arrays_shows_their_script_anywhere(launch_sweep: Launch) -> None:
    """F045: MaxArraySize is 1001 where nobody says another."""
    values = ",".join(map(str, range(501)))
    said = launch_sweep("a.yaml", "--on", "slurm", "--dry-run", "--sweep", f"args.lr={values}")
    assert said.code == 0, said.err
    assert "1,002 points, as many at a time as SLURM starts" in said.out
    assert "... 962 more" in said.out
    assert "Job array 0: sbatch --array=0-1000\n" in said.out
    assert said.out.count("#!/bin/bash") == 1, "what is sent, and not the job that one point would have alone"
    assert "Batch script, submitted by `sbatch --array=0-1000`" in said.out
    assert re.search(r"^  --array=0-1000 +sweep$", said.out, re.MULTILINE)
    assert re.search(r"--output=.*/slurm/%A_%a.log +plan$", said.out, re.MULTILINE)
    assert "Job array 1: sbatch --array=0, indices + 1001" in said.out
    assert "$((SLURM_ARRAY_TASK_ID + 0))" in said.out
    fields = launch_sweep("a.yaml", "--on", "slurm", "--dry-run", "--json").json
    assert [point["set"] for point in fields["points"]][:2] == [
        {"args.lr": "1e-3", "args.word": "a"},
        {"args.lr": "1e-3", "args.word": "b c"},
    ]
    assert len(fields["arrays"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "here"), "a sweep runs on one machine or as job arrays of SLURM, not with --on here"),
        (("--on", "slurm", "slurm.continue=chain:3"), "the tasks of an array have no chain"),
        (("--on", "local", "network.master_port=29500", "resources.threads=1"), "at a time on one machine"),
        (("--on", "local", "--sweep", "args.lr"), "is not KEY=VALUE,VALUE,..."),
        (("--on", "local", "--sweep", "name=a,b"), "sweep: name is the same for all points"),
    ],
)
def test_what_no_sweep_can_do_starts_nothing(launch_sweep: Launch, arguments: tuple[str, ...], said: str) -> None:
    if "network.master_port=29500" in arguments and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one point at a time fits here")
    result = launch_sweep("a.yaml", *arguments)
    assert result.code in (2, 3)
    assert said in result.err
    assert not Path("runs").exists()


def test_a_secret_in_a_sweep_is_refused_and_not_repeated(launch_sweep: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-canary")
    result = launch_sweep("a.yaml", "--on", "local", "--sweep", "args.word=x,0123456789abcdef-canary")
    assert result.code == 2
    assert "this holds the value of WANDB_API_KEY" in result.err
    assert "canary" not in result.err + result.out


def test_check_says_how_many_points(launch_sweep: Launch) -> None:
    assert launch_sweep("check", "a.yaml").out == "ok  a.yaml   a sweep of 4\n"


def test_ls_of_what_is_no_sweep(launch_sweep: Launch) -> None:
    result = launch_sweep("ls", "nothing")
    assert result.code == 2
    assert "nothing is no sweep of yours" in result.err
