"""Profiles on a cluster: what they say reaches the job, and `launch init-site` writes one that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Recipe
from slurm_cluster import COMMAND, SlurmCluster
from slurm_launched import Login, OnSlurm

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

SITE = """\
executor: slurm
slurm:
  partition: low
  time: 5m
  mem: 200M
  sbatch: {comment: "of the site"}
resources: {device: cpu}
env: {FROM_SITE: "yes"}
setup: [export FROM_SETUP="on $(hostname)"]
prepare: [echo once >> prepared]
internet: false
"""
SAYS = """
import os, pathlib, toy
names = ("FROM_SITE", "FROM_SETUP", "FROM_RECIPE", "HF_HUB_OFFLINE")
(toy.RUN / f"said.{toy.RANK}").write_text("|".join(os.environ.get(name, "-") for name in names))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return path


def test_a_job_is_what_the_profile_and_the_recipe_say(
    slurm_cluster: SlurmCluster, on_slurm: OnSlurm, recipe: Recipe, site: Path, tmp_path: Path
) -> None:
    """F055 F097: lines of the profile first; what is prepared once is prepared once. F028 F040: null is not sent."""
    path = recipe(SAYS, nodes=2, nproc=1, setup=["export FROM_RECIPE=$FROM_SETUP"], slurm={"mem": None})
    run = on_slurm(path, "--on", str(site))
    assert run.wait() == 0, run.text
    shown = slurm_cluster.run("scontrol", "show", "job", run.job)
    assert "Partition=low" in shown
    assert "Comment=of the site" in shown
    assert "TimeLimit=00:05:00" in shown
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    said = [(run.run.path / f"said.{rank}").read_text().split("|") for rank in (0, 1)]
    assert [words[:3] for words in said] == [["yes", f"on n{n}", f"on n{n}"] for n in _nodes(run.run.path)]
    assert {words[3] for words in said} == {"1"}
    assert (tmp_path / "prepared").read_text() == "once\n"
    (script,) = run.run.slurm.glob("batch-*.sh")
    assert "--mem" not in script.read_text()
    assert "--account" not in script.read_text()


def _nodes(run_dir: Path) -> list[str]:
    """The numbers of the nodes, as they are said in the events."""
    from launcher.runs.events import read_events

    (started,) = [event for event in read_events(run_dir) if event["event"] == "allocation_started"]
    return [name.removeprefix("n") for name in started["nodes"]]


def test_a_launch_with_hardly_an_environment_runs_all_the_same(
    slurm_cluster: SlurmCluster, on_slurm: OnSlurm, recipe: Recipe, site: Path, tmp_path: Path
) -> None:
    """F055: the interpreter is known by its path, whatever the PATH of the one who submits, or of the node."""
    state = f"XDG_STATE_HOME={tmp_path / 'state'}"
    bare = ("env", "-i", "PATH=/usr/bin:/bin", f"HOME={tmp_path}", state, f"SLURM_CONF={slurm_cluster.config}")
    run = on_slurm(recipe("import sys, toy\nprint(sys.prefix)", nproc=1), "--on", str(site), prefix=bare)
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert run.log(0).startswith(f"{sys.prefix}\n")


def test_what_slurm_refuses_is_said_with_the_line_of_the_profile(on_slurm: OnSlurm, recipe: Recipe, site: Path) -> None:
    """F028"""
    site.write_text(SITE.replace("partition: low", "partition: low\n  constraint: nosuch"))
    run = on_slurm(recipe("print(1)", nodes=1, nproc=1), "--on", str(site))
    assert run.wait() == 3
    assert "Invalid feature specification" in run.text
    assert "--constraint=nosuch (slurm.constraint)" in run.text
    assert "Traceback" not in run.text
    assert list(run.runs.glob("*")) == []


def test_a_setup_line_of_the_profile_that_fails_is_the_cause(on_slurm: OnSlurm, recipe: Recipe, site: Path) -> None:
    """F055"""
    site.write_text(SITE.replace("setup: [", "setup: [module load nosuch, "))
    run = on_slurm(recipe("print(1)", nodes=1, nproc=1), "--on", str(site))
    result = run.wait_for_result()
    assert (result["state"], result["cause"]) == ("FAILED", "setup"), run.console
    assert "module load nosuch" in result["reason"]


def test_init_site_writes_a_profile_that_works_here(slurm_cluster: SlurmCluster, login: Login, recipe: Recipe) -> None:
    said = login("init-site", "here-too")
    assert said.returncode == 0, said.stderr
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "launcher/profiles/here-too.yaml"
    text = path.read_text()
    assert "  partition: low              # the default; or high" in text
    assert "  gpus_per_node: 4 " in text
    assert "KillWait is 10 s" in text
    assert login("init-site", "here-too").stdout == f"{path} says so already\n"
    target = str(recipe("print(1)", nproc=4))
    assert login("check", target, "--on", "here-too").stdout == f"ok  {target} on here-too\n"
    shown = login(target, "--nodes", "2", "--on", "here-too", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --gpus-per-node=4" in shown.stdout
    path.unlink()


def test_the_demo_leaves_a_cluster_that_is_up_alone(slurm_cluster: SlurmCluster) -> None:
    done = subprocess.run([COMMAND.with_name("demo")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("slurm-demo: a test cluster is up already")
    assert slurm_cluster.run("sinfo", "-h", "-o", "%a").split()[0] == "up"
