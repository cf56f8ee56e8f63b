"""Carries out what `sync.py` has planned, by processes of the run's own interpreter: the package W&B is theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher import redact
from launcher.planning.plan import Plan
from launcher.planning.worker_env import group_of
from launcher.runs.rundir import RunDir
from launcher.runs.sync import FOLDER, ORDER, Part, is_synced

_HELP_LIMIT_S = 60.0
_LAST_LINES = 5


class UploadError(Exception):
    """What W&B said when it did not work, without secrets."""


def upload_metrics(run: RunDir, plan: Plan, *, exit_code: int) -> str:
    """Send what metrics.jsonl has and W&B has not, by a tracking process like that of an attempt. Returns its words."""
    order = json.loads((run.path / FOLDER / ORDER).read_text(encoding="utf-8"))
    order |= {"upload": True, "tensorboard": False, "run_dir": str(run.path)}
    order["wandb"] = {**order["wandb"], "mode": "online"}
    lines = json.dumps(order) + "\n" + json.dumps({"finish": exit_code}) + "\n"
    command = [plan.worker.python, "-P", "-m", "jobs.follower"]
    own = {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true"}  # of this process, not of the training
    return _run(command, {"WANDB_RUN_GROUP": group_of(run.run_id), **own}, given=lines)


def upload_part(part: Part, *, first: bool, program: Sequence[str], appends: bool) -> None:
    """Upload one folder under its id, so that a later one goes on where it ended. Raises UploadError."""
    command = [*program, "sync", "--id", part.wandb_id]
    if appends and not first:
        command.append("--append")
    said = _run([*command, str(part.path)], {"WANDB_DIR": str(part.path.parents[1])})
    if not is_synced(part.path):  # its exit code is 0 also where the server refused
        raise UploadError("\n".join(said.splitlines()[-_LAST_LINES:]))


def wandb_program(python: str) -> list[str] | None:
    """The `wandb` command beside the run's interpreter, beside ours, or on PATH."""
    for beside in (python, sys.executable):
        program = Path(beside).with_name("wandb")
        if os.access(program, os.X_OK):
            return [str(program)]
    found = shutil.which("wandb")
    return [found] if found else None


def must_append(program: Sequence[str]) -> bool:
    """Whether this `wandb sync` replaces a run unless it is told to append. Newer ones (0.30) go on by themselves."""
    return "--append" in _run([*program, "sync", "--help"], {}, limit_s=_HELP_LIMIT_S)


def _run(command: Sequence[str], env: Mapping[str, str], *, given: str = "", limit_s: float | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    try:
        with tempfile.TemporaryDirectory(prefix="launch-sync-") as scratch:  # W&B leaves a log there
            done = subprocess.run(
                command,
                input=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**environment, "PYTHONSAFEPATH": "1", "TMPDIR": scratch, **env},
                timeout=limit_s,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UploadError(str(error)) from error
    said = redact.own().text(done.stdout).strip()
    if done.returncode:
        raise UploadError("\n".join(said.splitlines()[-_LAST_LINES:]) or f"exit code {done.returncode}")
    return said
