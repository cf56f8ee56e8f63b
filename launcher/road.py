"""The road from what is asked for to a started run: load, probe, plan, check, create, submit.

The same for the command line and for Python. It prints nothing and handles no signals.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING

from launcher import redact
from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.base import EXECUTORS, Executor, JobRef, get_executor
from launcher.recipe.paths import expanded, is_file
from launcher.recipe.scalars import is_null
from launcher.recipe.whereto import Whereto, find_place, said_where
from launcher.runs.create import create, discard, new_run_id, record_event, resolved_recipe

if TYPE_CHECKING:
    from launcher.planning.code import CodeSource
    from launcher.planning.facts import Facts
    from launcher.planning.host_facts import HostFacts
    from launcher.planning.plan import Plan
    from launcher.recipe.loader import Flags, LoadedRecipe
    from launcher.runs.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    target: str
    """A recipe, or a script."""
    overrides: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()
    nodes: int | str | None = None
    """`2`, or `1:4`."""
    nproc_per_node: int | None = None
    where: str | None = None
    name: str | None = None
    runs_dir: str | None = None
    after: str | None = None
    """On SLURM: not before this run, or job, has ended well."""
    begin: str | None = None
    """On SLURM: not before this moment."""
    sweep: tuple[str, ...] = ()
    """Texts of `--sweep`."""

    @property
    def is_script(self) -> bool:
        """Whether the target is a script, and not a recipe."""
        return Path(self.target).suffix == ".py"

    @property
    def flags(self) -> Flags:
        """The options that are keys of the recipe too."""
        own = recipe_flags(name=self.name, nodes=self.nodes, nproc_per_node=self.nproc_per_node)
        swept: Flags = {"sweep": ("--sweep", self.sweep)} if self.sweep else {}
        return {**own, "slurm.after": ("--after", self.after), "slurm.begin": ("--begin", self.begin), **swept}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan that its place accepts. Nothing exists yet."""

    plan: Plan
    facts: Facts
    executor: Executor
    recipe_text: str
    rerun_of: str | None = None
    code_origin: Path | None = None
    """Where the code is copied from; None = the live tree."""
    notes: tuple[str, ...] = ()
    """What a user should know before it starts."""


@contextmanager
def prepared(request: Request, *, warm: bool) -> Iterator[Prepared]:
    """The plan of a request. Raises RecipeError and Refused, with all problems at once.

    `warm`: the first process of the run, which only imports torch, is started before the recipe is read; where nothing
    is submitted inside, it is gone afterwards. Without it nothing will be: what a cluster would refuse is a note then.
    """
    place = find_place(request.where, EXECUTORS)
    if place.profile is not None and place.profile.findings:
        load_target(request, place)  # raises, with the mistakes of the recipe
    executor = get_executor(place.executor)
    run_id = _new_id(likely_name(request))
    if warm and (not place.is_default or not shutil.which("sbatch")):
        executor.warm(runs_root(request.runs_dir, None, os.environ) / run_id)
    try:
        yield _prepare(request, place, executor, run_id, dry_run=not warm)
    finally:
        executor.drop()


def _prepare(request: Request, place: Whereto, executor: Executor, run_id: str, *, dry_run: bool) -> Prepared:
    from launcher.planning.make import make_plan

    loaded = load_target(request, place)
    refuse_idle_flags(request, executor.name)
    if executor.name == "here" and "resources.nodes" not in loaded.origins:
        loaded = load_target(_whole_allocation(request), place)
    if loaded.points:
        message = "this is a sweep, and one run was asked for"
        hint = "the `launch` command starts sweeps; `sweep:` begins a line of its own in the recipe"
        raise RecipeError([Problem(where=loaded.where("sweep"), message=message, hint=hint)])
    root = str(runs_root(request.runs_dir, loaded.recipe.runs_dir, os.environ))
    facts = facts_with_code(loaded, place, executor.name, root)
    name = loaded.recipe.name
    run_id = run_id if name == likely_name(request) else _new_id(name)
    plan = make_plan(loaded, facts, run_id=run_id, runs_dir=root, executor=executor.name)
    notes = refuse(executor, plan, dry_run=dry_run)
    return Prepared(plan=plan, facts=facts, executor=executor, recipe_text=loaded.text, notes=notes)


def refuse_idle_flags(request: Request, executor: str) -> None:
    """Raise RecipeError for what only a queue can do."""
    given = [(flag, value) for flag, value in (("--after", request.after), ("--begin", request.begin)) if value]
    if executor != "slurm" and given:
        hint = "it goes with --on slurm, or a profile of SLURM"
        raise RecipeError([Problem(where=flag, message=f"{executor} has no queue", hint=hint) for flag, _ in given])


def _whole_allocation(request: Request) -> Request:
    """The same on all nodes of the allocation, where nobody says how many. Raises Refused outside of one."""
    from launcher.executors.here import not_inside
    from launcher.planning.slurm_facts import allocation_of

    allocation = allocation_of(os.environ)
    if allocation is None:
        raise Refused(not_inside(os.environ))
    return dataclasses.replace(request, nodes=allocation.nodes)


def prepare_again(
    run: RunDir,
    overrides: Sequence[str],
    *,
    flags: Flags,
    where: str | None = None,
    runs_dir: str | None = None,
    dry_run: bool = False,
) -> Prepared:
    """The plan of another run, under a new id and with its code. Raises RecipeError and Refused."""
    from launcher.planning.make import make_plan
    from launcher.runs.again import load_again
    from launcher.runs.code import code_of_rerun
    from launcher.runs.load import read_plan

    old = read_plan(run)
    place = other_place(where)
    loaded = load_again(run, old, overrides, flags, place)
    executor = get_executor(old.executor if place is None else place.executor)
    root = str(runs_root(runs_dir, loaded.recipe.runs_dir or str(run.path.parent), os.environ))
    facts = facts_of(loaded, executor.name, root)
    code, origin, notes = code_of_rerun(run, source_of(loaded, facts, root))
    facts = dataclasses.replace(facts, code=code)
    plan = make_plan(loaded, facts, run_id=_new_id(loaded.recipe.name), runs_dir=root, executor=executor.name)
    refused = refuse(executor, plan, dry_run=dry_run)
    text = run.recipe.read_text(encoding="utf-8") if is_file(run.recipe) else loaded.text
    return Prepared(
        plan=plan,
        facts=facts,
        executor=executor,
        recipe_text=text,
        rerun_of=run.run_id,
        code_origin=origin,
        notes=(*notes, *refused),
    )


def make_run(what: Prepared, *, command: Sequence[str]) -> RunDir:
    """The run directory of a plan. Raises Refused where it cannot be written."""
    return create(
        what.plan,
        recipe_text=what.recipe_text,
        resolved=resolved_recipe(what.plan),
        command=command,
        facts=what.facts,
        rerun_of=what.rerun_of,
        code_origin=what.code_origin,
    )


def start(plan: Plan, run: RunDir, executor: Executor, *, attached: bool, is_new: bool = True) -> JobRef:
    """Start the agents of a plan and return at once. Attached: the run ends with this process.

    Raises Refused where the place does not take it. A run directory that was made for it (`is_new`) is gone then; one
    that there was says so.
    """
    try:
        ref = executor.submit(plan, run, attached=attached)
    except Refused as error:
        if is_new:
            discard(run)
        else:
            record_refused(run, error)
        raise
    following = [str(JobRef(ref.executor, ident)) for ident in ref.following]
    record_event(run, "submitted", ref=str(ref), **({"chain": [str(ref), *following]} if following else {}))
    return ref


def record_refused(run: RunDir, error: Refused) -> None:
    """Say that a run which was resumed has ended at once."""
    reason = error.problems[0].message
    record_event(run, "finished", state="FAILED", cause="refused", exit_code=int(error.exit_code), reason=reason)


def returns_at_once(executor: Executor) -> bool:
    """Whether a launch in this place does not stay with the run, unless it is told to: a queue may take days."""
    return executor.name in ("slurm", "sky")


def other_place(where: str | None) -> Whereto | None:
    """What `--on` of a resume or a rerun means; None = where it ran. Raises RecipeError."""
    return None if where is None else find_place(where, EXECUTORS)


def load_target(request: Request, place: Whereto) -> LoadedRecipe:
    """Read the recipe on top of the profile of its place, or make the recipe of a script. Raises RecipeError."""
    from launcher.recipe.loader import load_recipe, script_recipe

    target, profile = Path(request.target), place.profile
    if request.is_script:
        loaded = script_recipe(target, request.script_args, request.overrides, flags=request.flags, profile=profile)
        return said_where(loaded, place)
    if request.script_args:
        message = f"arguments after `--` ({' '.join(request.script_args)}) go with SCRIPT.py, and this is a recipe"
        hint = "KEY=VALUE changes a recipe; a recipe with `script:` has its arguments in `args:`"
        raise RecipeError([Problem(where=request.target, message=message, hint=hint)])
    return said_where(load_recipe(target, request.overrides, flags=request.flags, profile=profile), place)


def recipe_flags(
    *, nodes: int | str | None = None, name: str | None = None, nproc_per_node: int | None = None
) -> dict[str, tuple[str, object]]:
    """Options as the loader takes them."""
    return {
        "name": ("--name", name),
        "resources.nodes": ("--nodes", nodes),
        "resources.nproc_per_node": ("--nproc-per-node", nproc_per_node),
    }


def facts_of(loaded: LoadedRecipe, executor: str, root: str) -> Facts:
    """What is true on this machine, as far as the recipe needs it in that place; all but its code.

    root: where run directories are made. Raises Refused where hosts that are needed will not do.
    """
    from launcher.planning.decisions import ON_SLURM
    from launcher.planning.facts import gather_facts

    recipe, on_slurm = loaded.recipe, executor in ON_SLURM
    is_elsewhere = executor in ("ssh", "docker", "sky") or (on_slurm and recipe.slurm.container is not None)
    folder = Path.cwd() if loaded.source is None else loaded.source.parent
    after = recipe.slurm.after if executor == "slurm" else None
    job = None if after is None else _job_of(after, loaded.where("slurm.after"))  # first: it may not be there
    facts = gather_facts(
        python=None if is_elsewhere else recipe.python,
        secrets=recipe.secrets,
        slurm=on_slurm,
        template=folder / expanded(recipe.slurm.template) if on_slurm and recipe.slurm.template else None,
        until=recipe.limits.until,
        store="" if is_elsewhere else recipe.checkpoint.store,
    )
    if executor == "here" and facts.allocation is None:
        from launcher.executors.here import not_inside

        raise Refused(not_inside({}))
    if executor == "docker":
        from launcher.executors.docker_probe import probe_docker

        if recipe.docker.hosts:
            return dataclasses.replace(_docker_hosts(loaded, facts, root=Path(root), folder=str(folder)), after_job=job)
        there = probe_docker(recipe, gpus=bool(facts.gpus), folder=str(folder))
        facts = dataclasses.replace(facts, docker=(there,), hosts=_this_host())
    if executor == "ssh":
        from launcher.executors.ssh_probe import ask_hosts

        python = recipe.ssh.python or (recipe.python if recipe.is_script else None) or facts.python
        hosts = ask_hosts(recipe, python=python, workdir=recipe.workdir or facts.cwd, root=Path(root))
        facts = dataclasses.replace(facts, ssh=hosts)
    return dataclasses.replace(facts, after_job=job)


def _docker_hosts(loaded: LoadedRecipe, facts: Facts, *, root: Path, folder: str) -> Facts:
    """With what is true on the hosts that containers go to. Raises Refused."""
    from launcher.executors.docker_probe import probe_docker_hosts
    from launcher.executors.ssh_probe import ask_hosts

    recipe = loaded.recipe
    workdir, hosts = recipe.workdir or facts.cwd, recipe.docker.hosts
    asked = ask_hosts(recipe, python="python3", workdir=workdir, root=root, destinations=hosts)
    return dataclasses.replace(facts, ssh=asked, docker=probe_docker_hosts(recipe, asked, folder=folder))


def _this_host() -> tuple[HostFacts, ...]:
    """What this machine brings for the containers on it. Raises Refused."""
    from launcher.executors.host_probe import ask_host
    from launcher.executors.machines import Unreachable

    try:
        return (ask_host(),)
    except Unreachable as error:
        raise Refused([Problem(where="docker", message=error.sentence, hint=error.hint)]) from None


def facts_with_code(loaded: LoadedRecipe, place: Whereto, executor: str, root: str) -> Facts:
    """What is true on this machine, and the code that is launched. root: where run directories are made.

    Raises Refused where it is not clear that this machine is meant.
    """
    from launcher.planning.codefacts import gather_code, package_code

    facts = facts_of(loaded, executor, root)
    refuse_unclear_place(None if place.is_default else place.name, facts)
    source = source_of(loaded, facts, root)
    return dataclasses.replace(facts, code=package_code() if source is None else gather_code(source))


def _job_of(after: str, where: str) -> str | None:
    """The job that is waited for: that of an id, or the newest of a run; None for a run that has ended well.

    Raises RecipeError for a run that there is not, Refused for one that will not end well as a job of SLURM.
    """
    from launcher.executors.base import observe_job
    from launcher.runs.find import find_run
    from launcher.runs.load import read_record
    from launcher.runs.states import RunState

    if re.fullmatch(r"\d+(_\d+)?", after):
        return after
    record = read_record(find_run(after), observe_job)
    if record.state is RunState.SUCCEEDED:
        return None
    if record.state.is_final:
        message = f"slurm.after: {record.run_id} has ended already, {record.state}, so it will not end well"
        raise Refused([Problem(where=where, message=message, hint=f"launch resume {record.run_id} first")])
    ref = JobRef.parse((record.chain or (record.ref or ":",))[-1]) if record.ref else None
    if ref is None or ref.executor != "slurm":
        message = f"slurm.after: {record.run_id} is no job of SLURM ({record.ref or 'it was never submitted'})"
        raise Refused([Problem(where=where, message=message, hint="a run of --on slurm, or the id of a job")])
    return ref.ident


def source_of(loaded: LoadedRecipe, facts: Facts, root: str) -> CodeSource | None:
    """Where the code of a recipe is looked for; None for the built-in job."""
    from launcher.planning.codeplan import code_source

    redact.remember(loaded.recipe.secrets)
    redactor = redact.own()
    return code_source(
        loaded, cwd=facts.cwd, runs_dir=root, holds_secret=lambda content: redactor.data(content) is not content
    )


def likely_name(request: Request) -> str:
    """The name of the run, as far as it can be told before the recipe is read; wrong only costs the head start."""
    if request.name:
        return request.name
    target = Path(request.target)
    if request.is_script or not is_file(target):
        return target.stem
    named = re.search(rb"^name:[ \t]*([A-Za-z0-9._-]+)", target.read_bytes(), re.MULTILINE)
    return named.group(1).decode() if named else target.stem


def is_sweep(request: Request) -> bool:
    """Whether a launch is one of many points, told by the text of the recipe alone: what is wrong in it is found later.

    A run starts to import torch before its recipe is read, which a sweep has no use for.
    """
    said = [override.partition("=") for override in request.overrides if override.startswith(("sweep.", "sweep="))]
    if said and said[-1][0] == "sweep" and is_null(said[-1][2].strip()) and not request.sweep:
        return False  # `sweep=null`: the recipe alone
    if request.sweep or said:
        return True
    path = Path(request.target)
    for _ in range(2):  # a recipe, and the one that it extends
        if request.is_script or not is_file(path):
            return False
        lines = path.read_bytes().splitlines()
        if any(line.startswith(b"sweep:") for line in lines):
            return True
        extended = next((line for line in lines if line.startswith(b"extends:")), None)
        if extended is None:
            return False
        path = path.parent / extended.split(b":", 1)[1].split(b"#")[0].strip().strip(b"\"'").decode(errors="replace")
    return False


def _new_id(name: str) -> str:
    return new_run_id(name, now=datetime.now(), random=SystemRandom())


def refuse_unclear_place(where: str | None, facts: Facts) -> None:
    """Raise Refused where a cluster is configured, or in an allocation, and nobody said where to run."""
    if where is not None or not (facts.slurm_configured or facts.allocation):
        return
    message = "SLURM is configured on this machine, so where to run has to be said"
    here = "the allocation that you are in"
    if facts.allocation is not None:
        message = f"this is inside job {facts.allocation.job} of SLURM, so where to run has to be said"
        here = f"job {facts.allocation.job}"
    hint = f"add --on slurm (a new job, also by a profile), --on here ({here}) or --on local (this machine)"
    raise Refused([Problem(where="--on", message=message, hint=hint)])


def runs_root(flag: str | None, recipe: str | None, environment: Mapping[str, str]) -> Path:
    """Where run directories are made, absolute: --runs-dir, else LAUNCH_RUNS, else the recipe's, else ./runs."""
    return expanded(flag or environment.get("LAUNCH_RUNS") or recipe or "runs").absolute()


def refuse(executor: Executor, plan: Plan, *, dry_run: bool = False) -> tuple[str, ...]:
    """Raise Refused with every reason why a plan cannot run in its place, RecipeError where a secret is in it.

    dry_run: the plan of a job is shown anywhere, so what this machine or its cluster would refuse is returned as notes.
    """
    from launcher.planning.plan_secrets import secret_problems

    redact.remember(plan.secrets)
    if leaks := secret_problems(plan, redact.own()):
        raise RecipeError(leaks)
    if not (problems := executor.check(plan)):
        return ()
    if dry_run and executor.name in ("slurm", "sky"):
        return tuple(f"would be refused: {problem}" for problem in problems)
    raise Refused(problems)
