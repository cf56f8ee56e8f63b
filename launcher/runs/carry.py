"""What of ours travels in the run directory: for an interpreter that has nothing of ours, and for a user's script."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import launcher

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_PACKAGE = Path(launcher.__file__).parent
_CARRIED = (".", "agent", "agent/adapters", "planning", "runs")
"""Folders of our package that the agent imports from. What else is in them stays unread there."""


def carry_agent(run: RunDir, plan: Plan) -> None:
    """Copy the agent where the plan starts it from the run directory, and the client for a script."""
    starts = plan.agent_argv if plan.slurm is None else (*plan.agent_argv, *plan.slurm.srun)
    if str(run.agent_start) in starts and plan.executor in ("docker", "ssh", "sky") and plan.worker.kind == "job":
        # The training program, too: a host needs nothing of ours, and every node runs the same one.
        for package in (_PACKAGE, _PACKAGE.with_name("jobs")):
            for file in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"):
                _copy([file], run.agent_code / package.name / file.relative_to(package).parent)
        shutil.copyfile(_PACKAGE / "agent" / "start.py", run.agent_start)
    elif str(run.agent_start) in starts:
        for folder in _CARRIED:
            _copy(sorted((_PACKAGE / folder).glob("*.py")), run.agent_code / "launcher" / folder)
        shutil.copyfile(_PACKAGE / "agent" / "start.py", run.agent_start)
    if plan.worker.kind == "script":
        _copy([_PACKAGE.with_name("launch_client.py")], run.client_code)


def _copy(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
