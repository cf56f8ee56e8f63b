"""What can be seen before a job waits in the queue: partition and limits, interpreter, script, folders, space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem
from launcher.planning import calls
from launcher.planning.slurm_facts import SlurmProbe
from launcher.planning.slurm_site import site_problems
from launcher.wording import first_line

if TYPE_CHECKING:
    from launcher.planning.plan import Plan

_NEEDED_BYTES = 100 << 20
_NEEDED_FILES = 1000
_BASH_LIMIT_S = 5.0


def preflight(plan: Plan) -> Sequence[Problem]:
    """Why this plan cannot run as a job of this cluster, all of it at once."""
    probe = SlurmProbe(recent=True)
    files = check_files(plan)  # while SLURM is asked
    site = probe.answer()
    return [*files, *([] if site is None else site_problems(plan, site))]


def check_files(plan: Plan) -> list[Problem]:
    """What is not there on this machine, which is what the nodes see, too: they share its folders."""
    return [*_program(plan), *_script(plan), *_data(plan), *_room(plan)]


def _program(plan: Plan) -> Iterator[Problem]:
    assert plan.slurm is not None
    worker, in_image = plan.worker, (plan.recipe.get("slurm") or {}).get("container") is not None
    if not in_image and not os.access(worker.python, os.X_OK):
        yield Problem(where="python", message=f"{worker.python} is not an interpreter")
    if not Path(worker.cwd).is_dir():
        yield Problem(where="workdir", message=f"{worker.cwd} is not a folder")
    live = None if plan.code is None or not plan.code.snapshot else plan.code.root
    if worker.kind == "script" and live is None and worker.script is not None and not Path(worker.script).is_file():
        yield Problem(where="script", message=f"there is no such file: {worker.script}")
    image = ((plan.recipe.get("slurm") or {}).get("container") or {}).get("image", "")
    if in_image and image.startswith("/") and not Path(image).exists():
        yield Problem(where="slurm.container.image", message=f"there is no such file: {image}")


def _script(plan: Plan) -> Iterator[Problem]:
    """A site's own batch script that bash cannot read: it would wait in the queue first."""
    assert plan.slurm is not None
    template = (plan.recipe.get("slurm") or {}).get("template")
    bash = shutil.which("bash")
    if template is None or bash is None:
        return
    done = calls.run([bash, "-n"], limit_s=_BASH_LIMIT_S, told=plan.slurm.script)
    if done.returncode:
        said = done.stderr.replace(f"{bash}: ", "").strip()
        message = f"bash cannot read the batch script that {template} makes: {first_line(said)}"
        yield Problem(where="slurm.template", message=message, hint="--dry-run shows it whole")


def _data(plan: Plan) -> Iterator[Problem]:
    """A dataset whose folder is not there, unless it is downloaded into it, or `prepare` makes it."""
    data: Mapping[str, Any] = plan.recipe.get("data") or {}
    for key in ("root", "folder", "path"):
        value = data.get(key)
        if not isinstance(value, str) or not value or plan.prepare or data.get("full"):
            continue
        folder = Path(value).expanduser()
        if not (folder if folder.is_absolute() else Path(plan.worker.cwd) / folder).exists():
            hint = "the folder that the nodes see; lines of `prepare` may make it"
            yield Problem(where=f"data.{key}", message=f"data.{key}: there is no such folder: {folder}", hint=hint)


def _room(plan: Plan) -> Iterator[Problem]:
    """A run directory that cannot be made, or a disk without room for it."""
    folder = next(path for path in Path(plan.run_dir).parents if path.exists())
    hint = "another place for runs: --runs-dir DIR, or LAUNCH_RUNS"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Problem(
            where=str(folder), message="the run directory cannot be made there: it cannot be written", hint=hint
        )
        return
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < _NEEDED_BYTES:
        message = (
            f"{free_bytes >> 20} MiB are free on its disk (or in your quota), and a run needs {_NEEDED_BYTES >> 20}"
        )
        yield Problem(where=str(folder), message=message, hint=hint)
    if disk.f_files > 0 and disk.f_favail < _NEEDED_FILES:
        message = f"{disk.f_favail} files can be made on its disk, and a run needs up to {_NEEDED_FILES}"
        yield Problem(where=str(folder), message=message, hint=hint)
