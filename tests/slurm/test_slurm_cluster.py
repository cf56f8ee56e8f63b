"""The test cluster itself: what it is, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

LINK = Path("/sys/class/net/launch-slurm")


def test_up_and_down_can_be_repeated_and_leave_nothing(
    own_cluster: SlurmCluster, tmp_path: Path, processes_with: Callable[[str, str], list[int]]
) -> None:
    hosts_before = Path("/etc/hosts").read_bytes()
    own_cluster.up("--no-accounting", "--nodes", "2")
    pids = own_cluster.pids()
    assert {name for name in pids if name[1] == "slurmd"} == {("n1", "slurmd"), ("n2", "slurmd")}
    assert own_cluster.command("run", "sacct").stderr.strip() == "Slurm accounting storage is disabled"

    assert "up already" in own_cluster.up("--no-accounting", "--nodes", "2")
    assert own_cluster.pids() == pids
    other = own_cluster.command("up")
    assert other.returncode == 2
    assert "2 nodes of 4 GPUs (no accounting), not 4 nodes of 4 GPUs (accounting)" in other.stderr
    elsewhere = own_cluster.command("up", "--scratch", str(tmp_path / "other"))
    assert elsewhere.returncode == 2
    assert f"a cluster is up in {own_cluster.scratch}" in elsewhere.stderr

    os.kill(pids["n2", "slurmd"], signal.SIGKILL)
    own_cluster.wait_until(lambda: ("n2", "slurmd") not in own_cluster.pids(), lambda: "slurmd lives")
    assert own_cluster.command("status").returncode == 1
    assert "started anew: slurmd.n2" in own_cluster.up("--no-accounting", "--nodes", "2")
    assert own_cluster.pids().keys() == pids.keys()

    mark = tmp_path / "runs"
    own_cluster.submit(f"touch {mark}\nsrun sleep inf", "--nodes=2")
    own_cluster.wait_until(mark.exists, lambda: "the job does not run")
    assert processes_with("SLURM_CONF", str(own_cluster.config))

    assert "is removed" in own_cluster.down()
    assert own_cluster.down() == "no cluster is up\n"
    assert processes_with("SLURM_CONF", str(own_cluster.config)) == []
    assert not LINK.exists()
    assert not own_cluster.scratch.exists()
    assert str(own_cluster.scratch) not in Path("/proc/self/mountinfo").read_text()
    assert Path("/etc/hosts").read_bytes() == hosts_before
    assert own_cluster.command("status").returncode == 1
    assert own_cluster.command("run", "sinfo").returncode == 2


def test_a_start_that_fails_says_why_and_leaves_nothing(
    own_cluster: SlurmCluster, tmp_path: Path, processes_with: Callable[[str, str], list[int]]
) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "slurmctld").write_text("#!/bin/sh\necho 'fatal: no luck today' >&2\nexit 3\n")
    (broken / "slurmctld").chmod(0o755)
    done = own_cluster.command(
        "up", "--scratch", str(own_cluster.scratch), "--no-accounting", PATH=f"{broken}:{os.environ['PATH']}"
    )
    assert done.returncode == 2
    assert "slurmctld has ended with 3" in done.stderr
    assert "no luck today" in done.stderr
    assert not LINK.exists()
    assert not own_cluster.scratch.exists()
    assert processes_with("SLURM_CONF", str(own_cluster.config)) == []


def test_a_scratch_folder_that_cannot_be_made_is_said(own_cluster: SlurmCluster) -> None:
    done = own_cluster.command("up", "--scratch", "/nowhere/c")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slurm/cluster up: [Errno 2] No such file or directory: '/nowhere/c'\n"
    assert not LINK.exists()


def test_four_idle_nodes_with_gpus_and_two_partitions(slurm_cluster: SlurmCluster) -> None:
    assert slurm_cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T %G").splitlines() == [
        f"n{number} idle gpu:4" for number in range(1, 5)
    ]
    assert slurm_cluster.run("sinfo", "-h", "-o", "%P %p").split("\n") == ["low* 1", "high 10", "short 1"]


def test_a_job_on_two_nodes_has_two_names_two_addresses_and_gpus(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    says = 'echo "$(hostname)" "$(hostname -i)" "$CUDA_VISIBLE_DEVICES" > ' + f"{tmp_path}/$SLURM_PROCID"
    job = slurm_cluster.submit(f"srun bash -c '{says}'", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2")
    slurm_cluster.wait_for(job, "COMPLETED")
    said = [(tmp_path / rank).read_text().split() for rank in "01"]
    assert [words[0] for words in said] == ["n1", "n2"]
    assert [words[1] for words in said] == ["198.18.77.11", "198.18.77.12"]
    assert all(len(words[2].split(",")) == 2 for words in said)
    slurm_cluster.wait_until(
        lambda: slurm_cluster.run("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,NodeList") == "COMPLETED|n[1-2]",
        lambda: slurm_cluster.run("sacct", "-j", job),
    )


def test_high_preempts_low_which_is_requeued(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    low = slurm_cluster.submit(
        f'echo "${{SLURM_RESTART_COUNT:-0}}" >> {starts}\n[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] || exec sleep inf',
        *("--nodelist=n1", "--exclusive"),
    )
    slurm_cluster.wait_until(starts.exists, lambda: slurm_cluster.state_of(low))
    high = slurm_cluster.submit(f"cp {starts} {tmp_path}/then", "--partition=high", "--nodelist=n1", "--exclusive")
    slurm_cluster.wait_for(high, "COMPLETED")
    slurm_cluster.wait_for(low, "COMPLETED")
    assert starts.read_text().split() == ["0", "1"]
    assert len((tmp_path / "then").read_text().splitlines()) == 1, "high was to come in between"


def test_a_node_is_cut_off_and_a_daemon_ended_and_both_come_back(slurm_cluster: SlurmCluster) -> None:
    def answers() -> bool:
        try:
            socket.create_connection(("198.18.77.14", 6818), timeout=0.3).close()
        except OSError:
            return False
        return True

    assert answers()
    slurm_cluster.cut("n4")
    assert not answers()
    slurm_cluster.mend("n4")
    slurm_cluster.wait_until(answers, lambda: "n4 is not reached")
    assert "there is no such node; they are n1, n2, n3, n4" in slurm_cluster.command("cut", "n5").stderr

    slurm_cluster.stop("slurmdbd")
    assert ("ctl", "slurmdbd") not in slurm_cluster.pids()
    slurm_cluster.start()
    assert ("ctl", "slurmdbd") in slurm_cluster.pids()
    assert slurm_cluster.command("stop", "slurm").returncode == 2


def test_what_is_installed_and_whether_there_is_a_real_slurm_can_be_asked(slurm_cluster: SlurmCluster) -> None:
    done = slurm_cluster.command("check")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    done = slurm_cluster.command("check", SLURM_CONF="/etc/other.conf")
    assert done.returncode == 2
    assert "a real SLURM is configured here: SLURM_CONF=/etc/other.conf" in done.stderr
