"""Facts, plans and runs as tests write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.planning.facts import Facts
from launcher.planning.plan import Limits, NodePlan, Plan, WorkerPlan
from launcher.runs import create as creating
from launcher.runs.rundir import RunDir

RUN_ID = "mnist-ddp-1130-0214-k7qz"


def facts(**fields: Any) -> Facts:
    """One machine with two CPUs."""
    known: dict[str, Any] = {
        "hostname": "here",
        "user": "ada",
        "cwd": "/home/ada",
        "python": "/usr/bin/python",
        "python_version": "3.12.1",
        "torch_version": "2.13.0",
        "cpus": (0, 1),
        "gpus": (),
        "interfaces": (),
        "environment": {},
        "slurm_configured": False,
        "git": {"sha": None, "dirty": False},
    }
    return Facts(**{**known, **fields})


def plan(runs_dir: Path, *, run_id: str = RUN_ID, **fields: Any) -> Plan:
    """Two nodes of one worker each, on one machine."""
    node = {"host": "here", "address": "127.0.0.1", "cpus": (), "gpus": ()}
    known: dict[str, Any] = {
        "run_id": run_id,
        "name": "mnist-ddp",
        "executor": "local",
        "run_dir": str(runs_dir / run_id),
        "recipe_source": "/home/ada/mnist_ddp.yaml",
        "overrides": (),
        "recipe": {"name": "mnist-ddp", "train": {"until": "8 epochs"}, "checkpoint": {"best": "eval/accuracy max"}},
        "values": (),
        "nodes": (NodePlan(index=0, **node), NodePlan(index=1, **node)),
        "nproc_per_node": 1,
        "device": "cpu",
        "device_reason": "no GPU here",
        "backend": "gloo",
        "interface": "lo",
        "threads": 1,
        "master_port": None,
        "worker": WorkerPlan(
            kind="job", module="jobs.train", script=None, argv=(), cwd="/home/ada", preload=(), python="python"
        ),
        "env": (),
        "limits": Limits(max_restarts=3, grace_s=30.0, network_timeout_s=600.0, join_timeout_s=300.0),
        "resumable": True,
        "agent_argv": (),
        "torchrun": (),
        "notes": (),
    }
    return Plan(**{**known, **fields})


def create(runs_dir: Path, *, run_id: str = RUN_ID, facts: Facts | None = None, **fields: Any) -> RunDir:
    """A run directory of such a plan."""
    made = plan(runs_dir, run_id=run_id, **fields)
    where = facts if facts is not None else globals()["facts"](cwd=str(runs_dir))
    return creating.create(
        made, recipe_text="name: x\n", resolved=creating.resolved_recipe(made), command=["launch"], facts=where
    )
