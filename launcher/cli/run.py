"""The road of `launch RECIPE`: load, probe, plan, check, create, submit, follow."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from launcher import redact
from launcher.cli.signals import SignalInbox
from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.base import Executor, get_executor
from launcher.recipe.paths import expanded, is_file
from launcher.runs.create import create, new_run_id, record_event, resolved_recipe
from launcher.runs.follow import Tail, size_bytes

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.plan import Plan
    from launcher.recipe.loader import LoadedRecipe
    from launcher.runs.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The command line of a launch, as typed."""

    target: str
    overrides: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()
    nodes: int | None = None
    nproc_per_node: int | None = None
    where: str | None = None
    name: str | None = None
    dry_run: bool = False
    detach: bool | None = None
    runs_dir: str | None = None
    as_json: bool = False
    verbose: bool = False


def launch_target(options: LaunchOptions) -> int:
    """Start a recipe or a script, or show its plan. Returns the exit code."""
    executor = get_executor(options.where or "local")
    run_id = _new_id(likely_name(options))
    if not options.dry_run and (options.where or not shutil.which("sbatch")):
        executor.warm(runs_root(options.runs_dir, None, os.environ) / run_id)
    try:
        return _launch(options, executor, run_id)
    finally:
        executor.drop()


def _launch(options: LaunchOptions, executor: Executor, run_id: str) -> int:
    from launcher.planning.facts import gather_facts
    from launcher.planning.make import make_plan

    loaded = load_target(options)
    facts = gather_facts(python=loaded.recipe.python, secrets=loaded.recipe.secrets)
    refuse_unclear_place(options.where, facts)
    name = loaded.recipe.name
    plan = make_plan(
        loaded,
        facts,
        run_id=run_id if name == likely_name(options) else _new_id(name),
        runs_dir=str(runs_root(options.runs_dir, loaded.recipe.runs_dir, os.environ)),
        executor=executor.name,
    )
    refuse(executor, plan)
    if options.dry_run:
        return show_plan(plan, facts, as_json=options.as_json, verbose=options.verbose)
    with SignalInbox() as inbox:
        run = create(plan, recipe_text=loaded.text, resolved=resolved_recipe(plan), command=sys.argv, facts=facts)
        return submit(plan, run, executor, inbox, detach=bool(options.detach), as_json=options.as_json)


def load_target(options: LaunchOptions) -> LoadedRecipe:
    """Read the recipe, or make the recipe of a script. Raises RecipeError."""
    from launcher.recipe.loader import load_recipe, script_recipe

    flags = {
        "name": ("--name", options.name),
        "resources.nodes": ("--nodes", options.nodes),
        "resources.nproc_per_node": ("--nproc-per-node", options.nproc_per_node),
    }
    target = Path(options.target)
    if target.suffix == ".py":
        return script_recipe(target, options.script_args, options.overrides, flags=flags)
    _check_target(options)
    return load_recipe(target, options.overrides, flags=flags)


def _check_target(options: LaunchOptions) -> None:
    """A mistyped command looks like a recipe; arguments after `--` go with a script only."""
    if options.script_args:
        message = f"arguments after `--` ({' '.join(options.script_args)}) go with SCRIPT.py, and this is a recipe"
        hint = "KEY=VALUE changes a recipe; a recipe with `script:` has its arguments in `args:`"
        raise RecipeError([Problem(where=options.target, message=message, hint=hint)])
    if options.target.isidentifier() and not os.path.lexists(options.target):
        from difflib import get_close_matches

        from launcher.cli.app import COMMANDS

        close = get_close_matches(options.target, COMMANDS, n=1)
        hint = f"did you mean `launch {close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}"
        message = "there is no such command, and no such recipe file"
        raise RecipeError([Problem(where=options.target, message=message, hint=hint)])


def likely_name(options: LaunchOptions) -> str:
    """The name of the run, as far as it can be told before the recipe is read; wrong only costs the head start."""
    if options.name:
        return options.name
    target = Path(options.target)
    if target.suffix == ".py" or not is_file(target):
        return target.stem
    named = re.search(rb"^name:[ \t]*([A-Za-z0-9._-]+)", target.read_bytes(), re.MULTILINE)
    return named.group(1).decode() if named else target.stem


def _new_id(name: str) -> str:
    return new_run_id(name, now=datetime.now(), random=SystemRandom())


def refuse_unclear_place(where: str | None, facts: Facts) -> None:
    """Raise Refused where a cluster is configured and nobody said where to run."""
    if where is None and facts.slurm_configured:
        message = "SLURM is configured on this machine, so where to run has to be said"
        raise Refused([Problem(where="--on", message=message, hint="add --on local to run on this machine")])


def runs_root(flag: str | None, recipe: str | None, environment: Mapping[str, str]) -> Path:
    """Where run directories are made, absolute: --runs-dir, else LAUNCH_RUNS, else the recipe's, else ./runs."""
    return expanded(flag or environment.get("LAUNCH_RUNS") or recipe or "runs").absolute()


def refuse(executor: Executor, plan: Plan) -> None:
    """Raise Refused with every reason why a plan cannot run in its place, RecipeError where a secret is in it."""
    from launcher.planning.leaks import secret_problems

    redact.remember(plan.secrets)
    if leaks := secret_problems(plan, redact.own()):
        raise RecipeError(leaks)
    if problems := executor.check(plan):
        raise Refused(problems)


def show_plan(plan: Plan, facts: Facts, *, as_json: bool, verbose: bool) -> int:
    """Print a plan, for people or for programs."""
    from launcher.planning.render import render_plan

    print(plan.to_json() if as_json else render_plan(plan, facts, verbose=verbose), end="")
    return 0


def submit(plan: Plan, run: RunDir, executor: Executor, inbox: SignalInbox, *, detach: bool, as_json: bool) -> int:
    """Start the agents of a plan, then stay with them or return. Returns the exit code."""
    console = Tail(run.console, begin_bytes=size_bytes(run.console))  # a resume does not show the past again
    ref = executor.submit(plan, run, attached=not detach)
    record_event(run, "submitted", ref=str(ref))
    if not detach:
        from launcher.cli.follow import Job, follow  # imported while the agents start

        job = Job(executor=executor, ref=ref, plan=plan, run=run, console=console)
        return follow(job, inbox, as_json=as_json)
    if as_json:
        show_json({"run_id": run.run_id, "run_dir": str(run.path), "ref": str(ref)})
    else:
        print(submitted_text(run.run_id))
    return 0


def submitted_text(run_id: str) -> str:
    """What a user may want to do after a launch that returned at once."""
    return f"{run_id}\nNext   launch status last      launch logs last -f      launch cancel last"


def show_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(fields, ensure_ascii=False), flush=True)
