"""What is looked at before a job waits in the queue, and what the whole costs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs_values

from launcher.executors.base import EXECUTORS, JobRef, get_executor
from launcher.executors.slurm_check import check_files
from launcher.planning.plan import Plan, SlurmPlan, WorkerPlan

SLURM = SlurmPlan(
    flags=(),
    script="#!/bin/bash\n",
    srun=("srun",),
    continue_how="requeue",
    continue_reason="as asked",
    cpus_per_node=1,
)


def plan(folder: Path, **changes: Any) -> Plan:
    worker = WorkerPlan(
        kind="script", module=None, script=None, argv=(), cwd=str(folder), preload=None, python=sys.executable
    )
    made = dataclasses.replace(runs_values.plan(folder / "runs"), worker=worker, slurm=SLURM, executor="slurm")
    return dataclasses.replace(made, **changes)


def wheres(made: Plan) -> list[str]:
    return [problem.where for problem in check_files(made)]


def test_what_is_there_is_no_problem(tmp_path: Path) -> None:
    assert wheres(plan(tmp_path)) == []


def test_what_is_not_there_is_seen_at_once(tmp_path: Path) -> None:
    """F055"""
    made = plan(tmp_path)
    gone = dataclasses.replace(
        made.worker, python="/nonexistent/python", cwd="/nonexistent", script="/nonexistent/t.py"
    )
    recipe = {"data": {"name": "folder", "root": "/nonexistent/data"}}
    assert wheres(plan(tmp_path, worker=gone, recipe=recipe)) == ["python", "workdir", "script", "data.root"]


def test_data_that_is_made_before_the_job_need_not_be_there(tmp_path: Path) -> None:
    recipe = {"data": {"name": "folder", "root": "data"}}
    assert wheres(plan(tmp_path, recipe=recipe)) == ["data.root"]
    (tmp_path / "data").mkdir()
    assert wheres(plan(tmp_path, recipe=recipe)) == []
    assert wheres(plan(tmp_path, recipe={"data": {"root": "/nonexistent"}}, prepare=("fetch",))) == []
    assert wheres(plan(tmp_path, recipe={"data": {"root": "/nonexistent", "full": True}})) == []


def test_the_interpreter_of_an_image_is_not_looked_for_but_the_image_is(tmp_path: Path) -> None:
    made = plan(tmp_path)
    inside = dataclasses.replace(made.worker, python="python3")
    recipe = {"slurm": {"container": {"runtime": "apptainer", "image": "/nonexistent/a.sif"}}}
    assert wheres(plan(tmp_path, worker=inside, recipe=recipe)) == ["slurm.container.image"]
    recipe["slurm"]["container"]["image"] = "docker://pytorch"
    assert wheres(plan(tmp_path, worker=inside, recipe=recipe)) == []


def test_a_sites_script_that_bash_cannot_read_does_not_wait_in_the_queue(tmp_path: Path) -> None:
    recipe = {"slurm": {"template": "/etc/site.j2"}}
    assert wheres(plan(tmp_path, recipe=recipe)) == []
    broken = dataclasses.replace(SLURM, script="#!/bin/bash\nif true; then\n")
    (problem,) = check_files(plan(tmp_path, slurm=broken, recipe=recipe))
    assert problem.where == "slurm.template"
    assert "that /etc/site.j2 makes: line 3: syntax error: unexpected end of file" in problem.message


def test_a_full_disk_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F027"""
    assert wheres(plan(tmp_path, run_dir="/proc/runs/r0")) == ["/proc"]
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, real.f_frsize, 9, 9, 0, 5000, 10, 10, real.f_flag, real.f_namemax))
    monkeypatch.setattr("launcher.executors.slurm_check.os.statvfs", lambda path: full)
    said = [problem.message for problem in check_files(plan(tmp_path))]
    assert len(said) == 2
    assert "0 MiB are free" in said[0]
    assert "10 files can be made" in said[1]


def test_a_reference_of_a_job_is_printed_and_read_back() -> None:
    ref = JobRef("slurm", "101", following=("102",))
    assert str(ref) == "slurm:101"
    assert JobRef.parse("slurm:101") == ref
    assert JobRef.parse("slurm:101_7").ident == "101_7"
    assert {get_executor(name).name for name in EXECUTORS} == set(EXECUTORS)


def test_a_dry_run_for_a_thousand_nodes_imports_nothing_that_submits(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code = (
        "import sys; from launcher.cli.app import run_app\n"
        "code = run_app(['train.py', '--on', 'slurm', '--nodes', '1024', '--nproc-per-node', '8', '--dry-run'])\n"
        "assert 'submitit' not in sys.modules and 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    env = {**os.environ, "PATH": "/nowhere", "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1024 nodes" in done.stdout or "1,024 nodes" in done.stdout
    assert len(done.stdout.splitlines()) < 120
    assert not (tmp_path / "runs").exists()
