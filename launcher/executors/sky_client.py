"""SkyPilot on this machine: where its command is, what its own loader says of a task, what machines cost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from launcher.errors import Problem, Refused
from launcher.planning import calls
from launcher.planning.plan import Plan
from launcher.recipe.paths import expanded
from launcher.wording import first_line

_HELPER = Path(__file__).with_name("sky_helper.py")
_LOAD_S = 60.0
_PRICE_S = 180.0
"""The first question starts SkyPilot's server on this machine, and fetches the lists of prices."""
_INSTALL = "pip install 'skypilot[aws]>=0.14,<0.15' (or [gcp], ...), here or in an environment of its own: sky.command"


def find_command(name: str) -> Problem | None:
    """Why SkyPilot's command cannot be run."""
    if _path_of(name) is not None:
        return None
    return Problem(where="sky.command", message=f"there is no command {name!r} on this machine", hint=_INSTALL)


def command_path(name: str) -> str:
    """Where it is; the name itself where it is not found."""
    return _path_of(name) or name


def load_problems(plan: Plan) -> list[Problem]:
    """What SkyPilot's own loader says of the task."""
    assert plan.sky is not None
    said = ask_helper(plan.sky.submit[0], "load", plan.sky.task, limit_s=_LOAD_S)
    return [] if isinstance(said, str) else [said]


def price_text(plan: Plan) -> str:
    """What SkyPilot would rent, and what it costs per hour, in its own words. Raises Refused."""
    assert plan.sky is not None
    said = ask_helper(plan.sky.submit[0], "price", plan.sky.task, limit_s=_PRICE_S)
    if isinstance(said, str):
        return said.strip()
    raise Refused([said])


def _path_of(name: str) -> str | None:
    """On PATH, or beside our own interpreter, where the extra `cloud` puts it."""
    found = shutil.which(str(expanded(name))) if "/" in name else shutil.which(name)
    beside = Path(sys.executable).parent / name
    return found or (str(beside) if "/" not in name and beside.is_file() else None)


def ask_helper(name: str, mode: str, tasks: str, *, limit_s: float = _LOAD_S) -> str | Problem:
    """What the helper prints, in the interpreter of SkyPilot, or what went wrong. tasks: one YAML document or more."""
    command = command_path(name)
    python = Path(command).resolve().with_name("python")
    if not python.is_file():
        message = f"{command}: its environment has no interpreter at {python}"
        return Problem(where="sky.command", message=message, hint="the `sky` of an environment: ENVIRONMENT/bin/sky")
    try:
        done = calls.run([str(python), "-P", str(_HELPER), mode], limit_s=limit_s, told=tasks)
    except subprocess.TimeoutExpired:
        return Problem(where="SkyPilot", message=f"it has not answered within {limit_s:.0f} s", hint="sky api status")
    if done.returncode == 0:
        return done.stdout
    said = [line for line in done.stderr.splitlines() if line.strip()]
    message = first_line(said[-1]) if said else f"exit code {done.returncode}"
    hint = (
        "`sky check` says which clouds it has access to"
        if mode == "price"
        else "keys of sky: in the recipe, or profile"
    )
    return Problem(where="SkyPilot", message=message, hint=hint)
