"""The newcomer's demo, from nothing to the result; it leaves nothing, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import COMMAND, LIMIT_S

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

LINK = Path("/sys/class/net/launch-slurm")


@pytest.fixture
def demo(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start it with the environment of the tests in place of a new one; its output goes to a file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "make").symlink_to("/bin/true")

    def start(*arguments: str) -> subprocess.Popen[str]:
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHON": sys.executable, "LAUNCH_RUNS": str(tmp_path / "runs")}
        with (tmp_path / "out").open("w") as output:
            argv = [str(COMMAND.with_name("demo")), *arguments]
            return subprocess.Popen(
                argv, env=environment, text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    return start


def test_the_demo_shows_each_command_and_a_run_to_its_end(
    demo: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert demo("train.until=60 steps").wait(LIMIT_S) == 0, (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    shown = [line.removeprefix("\x1b[1m$ ").removesuffix("\x1b[0m") for line in said.splitlines() if "$ slurm" in line]
    assert shown == [
        "slurm/cluster up --no-accounting",
        "slurm/cluster run sinfo",
        "slurm/cluster run launch recipes/mnist_ddp.yaml --nodes 2 --on testcluster --follow train.until=60 steps",
        "slurm/cluster run launch status last",
        "slurm/cluster run launch report last",
        "slurm/cluster down",
    ]
    assert "step 60/60" in said
    assert "SUCCEEDED" in said
    assert not LINK.exists()


def test_ctrl_c_takes_the_cluster_down(demo: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = demo()
    deadline_s = time.monotonic() + LIMIT_S
    while "allocation 1: job 1" not in (tmp_path / "out").read_text():
        assert time.monotonic() < deadline_s, (tmp_path / "out").read_text()
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT_S) == 130, (tmp_path / "out").read_text()
    assert "is removed" in (tmp_path / "out").read_text().splitlines()[-1]
    assert not LINK.exists()
