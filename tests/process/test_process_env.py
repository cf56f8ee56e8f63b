"""What workers find around them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launched import Launch, Recipe

from launcher.planning.worker_env import LAUNCH_NAMES, TORCHRUN_NAMES

pytestmark = pytest.mark.process

SAYS = (
    "import json, os, sys, threading\n"
    "torch = sys.modules.get('torch')\n"
    "print(json.dumps({'env': dict(os.environ), 'cpus': len(os.sched_getaffinity(0)), 'cwd': os.getcwd(),\n"
    "    'threads': torch and torch.get_num_threads(), 'others': threading.active_count(),\n"
    "    'fds': sorted(int(fd) for fd in os.listdir('/proc/self/fd'))}))\n"
)
ON_CPU = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])]); os.execv(sys.argv[2], sys.argv[2:])"


def test_a_worker_has_every_variable_of_torchrun_and_ours(launch: Launch, recipe: Recipe, tmp_path: Path) -> None:
    run = launch(recipe(SAYS, nproc=1, env={"MINE": "a $HOME b"}))
    assert run.wait() == 0, run.text
    seen = json.loads(run.log(0))
    assert set(seen["env"]) >= TORCHRUN_NAMES | LAUNCH_NAMES - {"LAUNCH_NODE"}
    assert seen["env"]["MINE"] == "a $HOME b"
    assert seen["env"]["LAUNCH_CHECKPOINT_DIR"] == str(run.run.checkpoints)
    assert seen["cwd"] == str(tmp_path)
    assert seen["others"] == 1, "a fork of a process with threads"
    assert not any("token" in value.lower() and name.startswith("LAUNCH") for name, value in seen["env"].items())
    assert run.run.token.read_text() not in json.dumps(seen)


def test_a_worker_inherits_no_descriptor_of_ours(launch: Launch, recipe: Recipe) -> None:
    """A socket of the agent's in a worker would keep peers from noticing the agent's end."""
    runs = [launch(recipe(SAYS, name=f"preload-{preload}", preload=preload)) for preload in (True, False)]
    for run in runs:
        assert run.wait() == 0, run.text
        for rank in range(2):
            seen = json.loads(run.log(rank))
            assert seen["env"].keys().isdisjoint({"LAUNCH_CONTROL_FD"}), "a script has nobody to answer there"
            fds = set(seen["fds"]) - {int(seen["env"]["LAUNCH_CLOCK_FD"])}
            assert {0, 1, 2} < fds
            assert len(fds) == 4, "more than the standard ones and the listing itself"


def test_threads_follow_from_the_cores_that_may_be_used(launch: Launch, recipe: Recipe) -> None:
    """F075"""
    cores = sorted(os.sched_getaffinity(0))
    one_core = (sys.executable, "-c", ON_CPU, str(cores[0]))
    path = recipe(SAYS, resources={"nodes": 1})
    runs = [
        (launch(path, "--nproc-per-node", "2", prefix=one_core), 1),
        (launch(path, "--nproc-per-node", "1"), len(cores)),
        (launch(path, "--nproc-per-node", "2", env={"OMP_NUM_THREADS": "3"}), 3),
    ]
    for run, threads in runs:
        assert run.wait() == 0, run.text
        seen = json.loads(run.log(0))
        assert seen["env"]["OMP_NUM_THREADS"] == str(threads)
        assert seen["threads"] == threads, "torch was imported before the variable was set"


def test_an_interface_that_is_not_there_stops_before_anything_is_made(
    launch: Launch, recipe: Recipe, tmp_path: Path
) -> None:
    """F037"""
    run = launch(recipe("pass"), "network.interface=nope0")
    assert run.wait() in (2, 3), run.text
    assert "nope0" in run.text
    assert "lo" in run.text, "the names that there are"
    assert not (tmp_path / "runs").exists()
