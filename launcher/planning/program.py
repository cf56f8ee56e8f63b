"""What each rank runs, and where: the training program, or a script with its arguments. Pure."""

from __future__ import annotations

import glob
import posixpath
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launcher.planning.arguments import words_of
from launcher.planning.placeholders import LATE_NAMES, fill, fill_plan, names_in
from launcher.planning.plan import WorkerPlan
from launcher.planning.topology import Finding, Remarks
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
        "nodes": str(recipe.resources.nodes),
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
        script=None if recipe.script is None else posixpath.normpath(posixpath.join(folder, recipe.script)),
        argv=_filled(recipe.args, placeholders),
        cwd=cwd,
        preload=None if fresh else _preload(recipe.preload),
        python=python,
        adapter=resume if resume in ("lightning", "hf") else None,
        resume_newest=None if own is None else _pattern(own.newest, cwd, placeholders),
        resume_argv=() if own is None else _filled(own.args, placeholders),
        progress_log=None if recipe.progress is None else recipe.progress.log,
    )


def check_placeholders(recipe: Recipe, remarks: Remarks) -> None:
    """`{newest}` is only what a resume has found, so only `resume.args` can say it; it has to."""
    for key, text in _texts("args", recipe.args):
        if "newest" in names_in(text):
            hint = "resume: {newest: PATTERN, args: {...}}; or write {{newest}} for the text itself"
            remarks.problems.append(Finding(key, f"{key}: {{newest}} is there only in resume.args", hint))
    for name, value in recipe.env.items():
        if late := names_in(value) & set(LATE_NAMES):
            key, word = f"env.{name}", min(late)
            message = f"{key}: {{{word}}} differs between attempts, and only arguments can have it"
            instead = "LAUNCH_ATTEMPT" if word == "attempt" else "LAUNCH_RESUME_FROM"
            remarks.problems.append(Finding(key, message, f"{instead} is in the environment of each worker"))
    if isinstance(recipe.resume, ResumeSection):
        _check_resume(recipe.resume, remarks)


def _check_resume(resume: ResumeSection, remarks: Remarks) -> None:
    if late := names_in(resume.newest) & set(LATE_NAMES):
        message = f"resume.newest: {{{min(late)}}} is not known where the newest is looked for"
        remarks.problems.append(Finding("resume.newest", message, "write * in its place"))
    if not any("newest" in names_in(word) for word in words_of(resume.args)):
        message = "resume.args: no argument has {newest}, so the script is not told what to go on from"
        hint = 'as in {resume_from_checkpoint: "{newest}"}; or `resume: self` for a script that finds it by itself'
        remarks.problems.append(Finding("resume.args", message, hint))


def _texts(prefix: str, args: Args) -> Iterator[tuple[str, str]]:
    """Every text of the arguments, with its key."""
    if isinstance(args, tuple):
        yield from ((f"{prefix}.{index}", text) for index, text in enumerate(args))
        return
    for key, value in args.items():
        yield from ((f"{prefix}.{key}", str(item)) for item in (value if isinstance(value, tuple) else (value,)))


def _filled(args: Args, placeholders: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(fill_plan(word, placeholders) for word in words_of(args))


def _pattern(text: str, cwd: str, placeholders: Mapping[str, str]) -> str:
    """Absolute, from where the script runs. A folder of ours with a `[` in its name is that folder."""
    literal = {name: glob.escape(value) for name, value in placeholders.items()}
    filled = fill(text, literal)
    return posixpath.normpath(filled if filled.startswith("/") else posixpath.join(glob.escape(cwd), filled))


def _preload(preload: bool | tuple[str, ...]) -> tuple[str, ...] | None:
    if isinstance(preload, bool):
        return () if preload else None
    return preload
