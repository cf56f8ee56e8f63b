"""Machines that are lost, cut off, frozen, late, or back again: on namespaces that are machines to all that matters."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import criteria
import pytest
from criteria import Reference
from hosts import Bed, HostsRun, MakeBed
from tiny import tiny

pytestmark = [pytest.mark.process, pytest.mark.needs("netns")]

STEPS, EVERY = 60, 10


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "name": "hosts",
            "train": {"until": f"{STEPS} steps", "eval_every": "20 steps", "schedule": {"name": "cosine"}},
            "checkpoint": {"every": f"{EVERY} steps"},
            "resources": {"nproc_per_node": 1, "threads": 1},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """On two nodes."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), recipe_of(), nodes=2)


def planned(bed: Bed, *, nodes: int | str = 2, step_s: float = 0.05, **sections: Any) -> HostsRun:
    path = bed.folder / "hosts.yaml"
    path.write_text(json.dumps(recipe_of(**sections)))
    run = bed.plan(path, nodes=nodes)
    run.env |= {**criteria.install(bed.folder), "TEST_STEP_S": str(step_s)}
    return run


def left(run: HostsRun) -> dict[str, object]:
    """What is left on all machines that are up."""
    hosts = [host for host in run.bed.hosts if host.is_up]
    return {
        f"{host.name}: {what}": found
        for host in hosts
        for what, found in (
            ("processes", host.pids()), ("ports", host.listening()), ("/dev/shm", host.shared_memory())
        )
    }  # fmt: skip


def test_two_machines_train_as_two_nodes_of_one_do(make_bed: MakeBed, reference: Reference) -> None:
    run = planned(make_bed(2), step_s=0.0)
    run.start()
    assert run.wait() == 0, run.text
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    criteria.assert_clean(lambda: left(run))
    hosts = {event["node"]: event["host"] for event in run.happened("node_bound")}
    assert hosts == {0: "h0", 1: "h1"}
    assert "GLOO_SOCKET_IFNAME" in run.happened("node_bound")[0]["env"]
