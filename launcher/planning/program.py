"""What each rank runs, and where: the training program, or a script with its arguments. Pure."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.placeholders import fill, fill_plan
from launcher.planning.arguments import words_of
from launcher.planning.codeplan import absolute
from launcher.planning.plan import WorkerPlan
from launcher.recipe.schema import ResumeSection

if TYPE_CHECKING:
    from launcher.recipe.schema import Argument, Recipe

JOB_MODULE = "jobs.train"
JOB_PRELOAD = ("torch._dynamo", JOB_MODULE)
"""torch._dynamo is what the first DDP or optimizer would import."""

Args = Mapping[str, "Argument"] | tuple[str, ...]


def placeholders_of(recipe: Recipe, run_dir: str, nproc_per_node: int) -> dict[str, str]:
    """Those that are known when the plan is made."""
    return {
        "run_dir": run_dir,
        "checkpoint_dir": f"{run_dir}/checkpoints",
        "nodes": str(recipe.resources.max_nodes),
        "nproc": str(nproc_per_node),
    }


def plan_worker(
    recipe: Recipe, *, folder: str, cwd: str, python: str, fresh: bool, placeholders: Mapping[str, str]
) -> WorkerPlan:
    """What each rank runs. `folder` is the recipe's; `fresh`: there is no process that could preload anything."""
    if not recipe.is_script:
        preload = None if fresh else JOB_PRELOAD
        return WorkerPlan(kind="job", module=JOB_MODULE, script=None, argv=(), cwd=cwd, preload=preload, python=python)
    resume = recipe.resume
    own = resume if isinstance(resume, ResumeSection) else None
    return WorkerPlan(
        kind="script",
        module=recipe.module,
        script=None if recipe.script is None else absolute(folder, recipe.script),
        argv=_filled(recipe.args, placeholders),
        cwd=cwd,
        preload=None if fresh else _preload(recipe.preload),
        python=python,
        adapter=resume if resume in ("lightning", "hf") else None,
        resume_newest=None if own is None else _pattern(own.newest, cwd, placeholders),
        resume_argv=() if own is None else _filled(own.args, placeholders),
        progress_log=None if recipe.progress is None else recipe.progress.log,
    )


def _filled(args: Args, placeholders: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(fill_plan(word, placeholders) for word in words_of(args))


def _pattern(text: str, cwd: str, placeholders: Mapping[str, str]) -> str:
    """Absolute, from where the script runs. A folder of ours with a `[` in its name is that folder."""
    literal = {name: glob.escape(value) for name, value in placeholders.items()}
    return absolute(glob.escape(cwd), fill(text, literal))


def _preload(preload: bool | tuple[str, ...]) -> tuple[str, ...] | None:
    if isinstance(preload, bool):
        return () if preload else None
    return preload
