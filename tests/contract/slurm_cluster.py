"""The test cluster in the hands of tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "slurm" / "cluster"
LIMIT_S = 90.0


class SlurmCluster:
    """`slurm/cluster` with a scratch folder, and the clients of SLURM."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.config = scratch / "etc" / "slurm.conf"

    def command(self, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """`slurm/cluster ...`, whatever comes of it."""
        return subprocess.run(
            [COMMAND, *arguments], input=stdin, capture_output=True, text=True, check=False, env=os.environ | variables
        )

    def up(self, *options: str) -> str:
        done = self.command("up", "--scratch", str(self.scratch), *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def down(self) -> str:
        done = self.command("down")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *argv: str, stdin: str = "") -> str:
        """What a client prints that has to succeed."""
        done = self.command("run", *argv, stdin=stdin)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def cut(self, node: str) -> None:
        """Cut a node off from the network. Mend it again, whatever happens."""
        assert self.command("cut", node).returncode == 0

    def mend(self, node: str) -> None:
        assert self.command("mend", node).returncode == 0

    def stop(self, daemon: str) -> None:
        """End a daemon at once: `slurmdbd`, `slurmctld`, `slurmd.n2`. Start it again, whatever happens."""
        done = self.command("stop", daemon)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start the daemons that do not run."""
        done = self.command("start")
        assert done.returncode == 0, done.stderr

    def submit(self, script: str, *flags: str) -> str:
        """Submit a batch script; its job id."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", *flags, stdin=f"#!/bin/bash\n{script}\n")

    def state_of(self, job: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def wait_for(self, job: str, state: str) -> None:
        self.wait_until(lambda: self.state_of(job) == state, lambda: f"job {job} is {self.state_of(job)}")

    def wait_until(
        self, has_happened: Callable[[], bool], otherwise: Callable[[], str], *, limit_s: float = LIMIT_S
    ) -> None:
        deadline_s = time.monotonic() + limit_s
        while not has_happened():
            assert time.monotonic() < deadline_s, f"after {limit_s:.0f} s: {otherwise()}"
            time.sleep(0.1)

    def pids(self) -> dict[tuple[str, str], int]:
        """(machine, program) -> pid, as `status` says."""
        lines = [line.split() for line in self.command("status").stdout.splitlines()]
        return {(words[0], words[2]): int(words[4]) for words in lines if words[3:4] == ["pid"]}


@contextmanager
def cut_off(cluster: SlurmCluster, node: str) -> Iterator[None]:
    """Cut a node off from the network for a while. Afterwards jobs are sent to it again."""
    cluster.cut(node)
    try:
        yield
    finally:
        cluster.mend(node)
        cluster.wait_until(lambda: _takes_jobs(cluster, node), lambda: cluster.run("sinfo", "-N", "-l"))


def _takes_jobs(cluster: SlurmCluster, node: str) -> bool:
    """Of a node that was mended: one that is DOWN for SLURM, which looks for it every other minute, is told so."""
    state = cluster.run("sinfo", "-h", "-n", node, "-p", "low", "-o", "%T").split()[0]
    if state.startswith("down"):
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    return state in ("idle", "mixed")
