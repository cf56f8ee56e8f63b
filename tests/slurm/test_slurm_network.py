"""The preflight on the nodes of a job, and the doctor on those of an allocation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from launched import LAUNCH, LIMIT_S, Recipe
from slurm_cluster import COMMAND, SlurmCluster
from slurm_launched import OnSlurm

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm"), pytest.mark.timeout(180)]

JOINS = "from toy import join\njoin().barrier()\n"


def test_nodes_that_do_train(on_slurm: OnSlurm, recipe: Recipe) -> None:
    run = on_slurm(recipe(JOINS, nodes=2), "faults.preflight=true")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    (found,) = run.happened("preflight")
    assert (found["faults"], found["took_s"] < 3.0) == ([], True)
    assert {node["interface"] for node in found["nodes"].values()} == {"eth0"}
    assert len({node["host"] for node in found["nodes"].values()}) == 2


def test_an_interface_that_setup_has_named_and_that_leads_nowhere(on_slurm: OnSlurm, recipe: Recipe) -> None:
    path = recipe(JOINS, nodes=2, setup=["export GLOO_SOCKET_IFNAME=lo"])
    run = on_slurm(path, "faults.preflight=true")
    result = run.wait_for_result()
    assert (result["state"], result["cause"], result["attempts"]) == ("FAILED", "preflight", 0), run.console
    assert "GLOO_SOCKET_IFNAME=lo (the node's environment) is loopback" in result["reason"]
    assert not run.happened("worker_started")


def test_the_doctor_looks_at_each_node_of_the_allocation(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    assert slurm_cluster.scratch.exists()
    argv = [
        str(COMMAND),
        "run",
        "salloc",
        "--nodes=2",
        "--ntasks-per-node=1",
        LAUNCH,
        "doctor",
        "--on",
        "here",
        "--json",
    ]
    done = subprocess.run(
        argv, cwd=tmp_path, env=dict(os.environ), text=True, stdin=subprocess.DEVNULL, capture_output=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])["findings"]
    hosts = {each["where"] for each in found if each["what"] == "torch" and each["level"] == "ok"}
    assert len(hosts) == 2, done.stderr
    (summed,) = [each for each in found if each["what"] == "all-reduce"]
    assert summed["message"].startswith("2 hosts, 2 processes over gloo: ")
    assert [each["level"] for each in found if each["what"] == "shared folder"] == ["ok"]
