"""Hosts without a shared file system: what they need is sent there, what they write comes home, nothing stays there."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from launched import Launch, Recipe
from ssh_hosts import MakeSshBed, SshBed
from test_ssh_runs import is_idle, on_hosts, small, wait_for_step, weights_here

from launcher.runs.checkpoints import checkpoint_steps

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(240)]

REPLICATED = "checkpoint.store=replicate"


def left_on(bed: SshBed, runs: Path) -> list[str]:
    return [line for host in bed.hosts for line in bed.on(host, "ls", "-A", str(runs)).split()]


def own_disks(make_ssh_bed: MakeSshBed, folder: Path, count: int = 2) -> SshBed:
    bed = make_ssh_bed(count)
    bed.own_disk(folder / "runs")
    return bed


def test_the_run_comes_home_and_goes_on_elsewhere(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = own_disks(make_ssh_bed, tmp_path, 4), small(tmp_path, steps=5000)
    bed.write_profile(hosts=["h0", "h1"])
    run = on_hosts(launch, bed, target, REPLICATED)
    wait_for_step(run, 150)  # read here: metrics come home while it runs
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    saved = run.result["step"]
    assert max(checkpoint_steps(run.run)) == saved
    assert left_on(bed, tmp_path / "runs") == []
    assert is_idle(bed)

    bed.write_profile(hosts=["h2", "h3"])
    done = bed.call("resume", run.run_id, "--on", str(bed.profile))
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.result["weights_sha256"] == weights_here(launch, target)
    steps = [json.loads(line)["step"] for line in run.run.metrics.read_text().splitlines() if '"step"' in line]
    assert sorted(set(steps)) == list(range(1, 5001)), "each step is there"
    console = run.run.console.read_text()
    assert console.count("weights_sha256") == 1, "no line twice"
    assert "resuming" in console
    assert left_on(bed, tmp_path / "runs") == []
    assert is_idle(bed)


def test_one_folder_for_checkpoints_that_is_none_is_refused(
    make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path
) -> None:
    bed, target = own_disks(make_ssh_bed, tmp_path), small(tmp_path)
    done = bed.call(
        str(target), "--nodes", "2", "--on", str(bed.profile), "--runs-dir", str(tmp_path / "runs"), "--name", "r"
    )
    assert done.returncode == 3
    assert "checkpoint.store: shared, and h1 does not see" in done.stderr
    assert "checkpoint.store: replicate" in done.stderr
    assert left_on(bed, tmp_path / "runs") == []
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_script_finds_its_code_and_what_it_writes_comes_home(
    make_ssh_bed: MakeSshBed, launch: Launch, recipe: Recipe, tmp_path: Path
) -> None:
    bed = own_disks(make_ssh_bed, tmp_path)
    source = (
        "import os, pathlib, toy\n"
        "out = pathlib.Path(os.environ['LAUNCH_RUN_DIR'], 'out')\n"
        "out.mkdir(exist_ok=True)\n"
        "toy.join()\n"
        "(out / f'{toy.RANK}.txt').write_text('from ' + os.uname().nodename)\n"
        "print('rank', toy.RANK, 'in', os.getcwd())\n"
    )
    target = recipe(source, nodes=2, nproc=1)
    folder = tmp_path / "own" / "code"  # which no host has
    folder.mkdir(parents=True)
    for name in ("toy.py", "script.py", "script.yaml"):
        (tmp_path / name).rename(folder / name)
    bed.own_disk(folder.parent)
    target = folder / target.name
    run = on_hosts(launch, bed, target, f"workdir={folder}")
    assert run.wait() == 3, run.text
    assert f"workdir: h0 has no {folder}, and the code is not copied" in run.text

    for words in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    run = on_hosts(launch, bed, target, f"workdir={folder}")
    assert run.wait() == 0, run.text
    assert [(run.run.path / "out" / f"{rank}.txt").read_text() for rank in (0, 1)] == ["from h0", "from h1"]
    assert "rank 1 in" in run.log(1, node=1)
    assert left_on(bed, tmp_path / "runs") == []


def test_a_run_that_cannot_start_leaves_nothing(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = own_disks(make_ssh_bed, tmp_path), small(tmp_path)
    # Found only by the copy: the disk is too small for what is sent there.
    bed.on(bed.hosts[1], "mount", "-t", "tmpfs", "-o", "size=120m,nr_inodes=40", "tmpfs", str(tmp_path / "runs"))
    run = on_hosts(launch, bed, target, REPLICATED)
    assert run.wait() == 3, run.text
    assert "h1: the run cannot be copied there" in run.text
    assert left_on(bed, tmp_path / "runs") == []
    assert not list((tmp_path / "runs").glob("r0-*"))
    assert is_idle(bed)


def test_the_disk_of_the_first_host_is_lost(make_ssh_bed: MakeSshBed, launch: Launch, tmp_path: Path) -> None:
    bed, target = own_disks(make_ssh_bed, tmp_path), small(tmp_path, steps=5000)
    run = on_hosts(launch, bed, target, REPLICATED)
    wait_for_step(run, 150)
    first = bed.hosts[0]
    first.kill()
    first.boot()
    bed.on(first, "mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(tmp_path / "runs"))
    bed.start_sshd(first)
    assert run.wait() == 0, run.text
    assert run.happened("node_replaced", node=0)
    assert run.result["restarts"] >= 1
    assert run.result["weights_sha256"] == weights_here(launch, target)
    assert left_on(bed, tmp_path / "runs") == []
    assert is_idle(bed)
