"""The allocation that this process is in (`salloc`): the batch side is a child, at the user's terminal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from launcher.errors import Problem
from launcher.executors.base import JobRef
from launcher.executors.local import LocalExecutor
from launcher.planning.plan import Plan
from launcher.planning.slurm_facts import allocation_of
from launcher.runs.rundir import RunDir
from launcher.wording import count


class HereExecutor(LocalExecutor):
    """Runs a plan on the nodes of the allocation. It ends with the launch, or with the allocation."""

    name: ClassVar[str] = "here"

    def check(self, plan: Plan) -> Sequence[Problem]:
        """Whether there is an allocation, and whether it has what the plan takes."""
        if problems := not_inside(os.environ):
            return problems
        allocation = allocation_of(os.environ)
        assert allocation is not None
        problems = []
        if (least := plan.min_nodes or len(plan.nodes)) > allocation.nodes:
            message = (
                f"{count(least, 'node')} are asked for, but job {allocation.job} has "
                f"{count(allocation.nodes, 'node')} ({allocation.nodelist})"
            )
            hint = f"--nodes {allocation.nodes} or fewer, or --on slurm for a job of its own"
            problems.append(Problem(where="resources.nodes", message=message, hint=hint))
        if shutil.which("srun") is None:
            problems.append(Problem(where="--on here", message="there is no srun on this machine"))
        from launcher.executors.slurm_check import check_files

        return [*problems, *check_files(plan)]

    def warm(self, run_dir: Path) -> None:
        """Agents run on other machines: there is nothing to import here."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Start the batch side, which starts the agents by srun. Attached: it ends with this process."""
        run.slurm.mkdir(exist_ok=True)
        return super().submit(plan, run, attached=attached)


def not_inside(environment: Mapping[str, str]) -> list[Problem]:
    """Why there is no allocation to use."""
    if (allocation := allocation_of(environment)) is not None:
        if "SLURM_HET_SIZE" not in environment:
            return []
        message = f"job {allocation.job} is heterogeneous, and all nodes of a run are alike"
        hint = "`salloc --nodes N` without a `:` first; or --on slurm submits a job"
        return [Problem(where="--on here", message=message, hint=hint)]
    hint = "`salloc --nodes N` first, then launch in it; or --on slurm submits a job"
    return [Problem(where="--on here", message="this is not inside an allocation of SLURM", hint=hint)]
