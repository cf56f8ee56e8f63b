"""Which machines `launch doctor --on WHERE` looks at."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import launcher
from launcher.agent import hostlist
from launcher.errors import Problem, Refused
from launcher.executors.base import EXECUTORS
from launcher.executors.machines import Machine, ThisMachine
from launcher.recipe.loader import script_recipe
from launcher.recipe.whereto import find_place

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe

_ANY_SCRIPT = Path(launcher.__file__).parent.with_name("jobs") / "all_reduce.py"
"""A profile is read as what lies below a recipe: this is one that asks for nothing."""
_NOT_THERE = {
    "slurm": ("nodes are SLURM's to give", "salloc -N 2, and in that allocation `launch doctor --on here`"),
    "sky": ("machines are rented when a run begins", "faults.preflight: true measures them before it starts"),
}


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What to look at."""

    machines: tuple[Machine, ...]
    """Empty: this machine alone, as without `--on`."""
    python: str
    runs_dir: str | None
    """Of the profile."""


def machines_of(where: str | None, overrides: Sequence[str], *, gpus: bool) -> Looked:
    """The machines of a place, or of a profile. gpus: whether this one has some. Raises RecipeError and Refused."""
    place = find_place(where or "local", EXECUTORS)
    recipe = script_recipe(_ANY_SCRIPT, (), overrides, profile=place.profile).recipe
    if place.executor in _NOT_THERE:
        message, hint = _NOT_THERE[place.executor]
        raise Refused([Problem(where="--on", message=f"{place.name}: {message}", hint=hint)])
    machines, python = _machines(place.executor, recipe, gpus=gpus)
    return Looked(machines=machines, python=python, runs_dir=recipe.runs_dir)


def _machines(executor: str, recipe: Recipe, *, gpus: bool) -> tuple[tuple[Machine, ...], str]:
    own = recipe.python or sys.executable
    if executor == "here":
        from launcher.executors.job_node import JobNode

        return tuple(JobNode(name) for name in _nodes()), own
    if executor == "ssh":
        from launcher.executors.ssh_machine import SshMachine

        if not recipe.ssh.hosts:
            hint = "a profile with `executor: ssh` and `ssh: {hosts: [node0, node1]}`, or ssh.hosts=[node0,node1]"
            raise Refused([Problem(where="ssh.hosts", message="ssh.hosts: there is none", hint=hint)])
        found = tuple(SshMachine(host, config=recipe.ssh.config) for host in recipe.ssh.hosts)
        return found, recipe.ssh.python or own
    if executor == "docker":
        from launcher.executors.docker_probe import engine_problem
        from launcher.executors.job_node import Container
        from launcher.planning.docker import image_of, mount_text, read_mount

        there = ThisMachine()
        if (problem := engine_problem(there)) is not None:
            raise Refused([problem])
        mounts = [mount for text in recipe.docker.mounts if (mount := read_mount(text, str(Path.cwd()))) is not None]
        options = (
            *(("--gpus", "all") if gpus else ()),
            *(word for mount in mounts for word in ("--mount", mount_text(mount))),
            *recipe.docker.args,
        )
        return (Container(there, image_of(recipe, gpus=gpus), options),), recipe.python or "python3"
    return (), own


def _nodes() -> list[str]:
    """Of the allocation that this process is in. Raises Refused outside of one."""
    text = os.environ.get("SLURM_JOB_NODELIST")
    if not text:
        from launcher.executors.here import not_inside

        raise Refused(not_inside(os.environ))
    return list(hostlist.expand(text))
