"""What the tests of the agent share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import runs_values

from launcher.planning.plan import NodePlan, Plan, SlurmPlan

TOKEN = bytes(range(32))
"""Of every run here."""


def slurm_plan(run_dir: Path, **fields: Any) -> Plan:
    """Two nodes of one worker each, in a job of SLURM: nobody knows yet which nodes."""
    known: dict[str, Any] = {
        "flags": (),
        "script": "#!/bin/bash\n",
        "srun": ("srun",),
        "continue_how": "requeue",
        "continue_reason": "the site allows it",
        "cpus_per_node": 2,
    }
    names = {field.name for field in dataclasses.fields(SlurmPlan)}
    slurm = SlurmPlan(**{**known, **{name: fields.pop(name) for name in names & fields.keys()}})
    nodes = tuple(NodePlan(index=index, host="", address="", cpus=(), gpus=()) for index in range(2))
    return runs_values.plan(run_dir, **{"executor": "slurm", "slurm": slurm, "nodes": nodes, **fields})
