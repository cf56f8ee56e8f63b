"""`profiler.tool: nsys`: Nsight Systems around a worker. Standard library only."""

from __future__ import annotations

from launcher.planning.plan import Plan
from launcher.runs.rundir import RunDir

_TRACED = {"cuda": "cuda,nvtx,osrt,cudnn,cublas", "cpu": "osrt,nvtx"}


def nsys_command(plan: Plan, run: RunDir, *, attempt: int, rank: int) -> tuple[str, ...]:
    """What is put before the command of this rank; empty where the recipe does not want it.

    Our own training says by the API of the CUDA profiler which steps count; all else is recorded from start to end.
    """
    section = plan.recipe.get("profiler") or {}
    if section.get("tool") != "nsys" or rank not in section["ranks"]:
        return ()
    run.profile.mkdir(exist_ok=True)
    says_when = plan.worker.kind == "job" and plan.device == "cuda"
    return (
        "nsys",
        "profile",
        f"--output={run.profile}/attempt-{attempt}-rank-{rank}",
        "--force-overwrite=true",
        f"--trace={_TRACED[plan.device]}",
        *(("--capture-range=cudaProfilerApi", "--capture-range-end=stop") if says_when else ()),
    )


class MissingNsysError(RuntimeError):
    """A node has no `nsys`."""

    launch_plain = True

    def __init__(self, host: str) -> None:
        super().__init__(
            f"profiler.tool: nsys was asked for, and there is no `nsys` in the PATH of {host}; "
            "`setup: [module load cuda]`, or tool: torch"
        )
