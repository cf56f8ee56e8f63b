"""The road of a sweep, beside that of a run: one load, one look at the machine, one copy of the code, many points.

Nothing is printed here and no signal is handled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from launcher import redact
from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.base import EXECUTORS, Executor, get_executor
from launcher.planning.points import (
    Line,
    only_values_differ,
    point_id,
    section_values,
    whole_line,
)
from launcher.recipe.whereto import find_place
from launcher.road import (
    Request,
    facts_of,
    facts_with_code,
    load_target,
    refuse,
    refuse_idle_flags,
    runs_root,
    source_of,
)
from launcher.runs.again import load_again
from launcher.runs.code import choose_code
from launcher.runs.create import new_run_id, record_event, resolved_recipe, update_plan
from launcher.runs.create_sweep import create_sweep
from launcher.runs.events import read_events
from launcher.runs.load import read_plan
from launcher.runs.rundir import RunDir
from launcher.runs.sweep import SweepDir, SweepRecord, format_tasks, make_point, point_plan, submissions

if TYPE_CHECKING:
    from launcher.executors.slurm import SlurmExecutor
    from launcher.planning.facts import Facts
    from launcher.planning.plan import Plan, SbatchFlag
    from launcher.planning.slots import Slot
    from launcher.recipe.loader import LoadedRecipe
    from launcher.recipe.sweep import Point
    from launcher.runs.code import CodeChoice

MAX_ARRAY_SIZE = 1001
"""SLURM's own default: the largest index is one less."""


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep that its place accepts. Nothing exists yet."""

    record: SweepRecord
    plan: Plan
    """Of point 0."""
    loaded: LoadedRecipe
    facts: Facts
    executor: Executor
    folder: Path
    notes: tuple[str, ...] = ()
    """What a user should know before it starts."""
    arrays: tuple[Array, ...] = ()
    """On SLURM."""
    lines: tuple[Line, ...] = ()
    """Of all points, as points.jsonl has them but for the code of whole plans."""

    @property
    def how_many_at_a_time(self) -> str:
        """In words."""
        if self.executor.name == "local":
            return f"{len(self.record.slots)} at a time"
        most = self.record.max_parallel
        together = "as many at a time as SLURM starts" if most is None else f"at most {most} at a time"
        follow = ", one array after the other" if most is not None and len(self.arrays) > 1 else ""
        return together + follow


@dataclass(frozen=True, kw_only=True)
class Array:
    """One job array: some points of a sweep."""

    offset: int
    tasks: tuple[int, ...]
    script: str
    flags: tuple[str, ...]
    """Of the submission: `--array=0-99%4`. The others stand in the script."""
    job_flags: tuple[SbatchFlag, ...]
    """Those in the script."""
    waits: bool
    """Whether it begins when the array before it has ended."""


def prepare_sweep(request: Request, *, command: Sequence[str], dry_run: bool = False) -> PreparedSweep:
    """All points of a request, checked. Raises RecipeError and Refused, with all problems at once."""
    from launcher.planning.make import make_plan

    place = find_place(request.where, EXECUTORS)
    executor = get_executor(place.executor)
    loaded = load_target(request, place)
    refuse_idle_flags(request, executor.name)
    _refuse_what_is_for_one_run(loaded, executor, place.name)
    points, section = loaded.points, loaded.recipe.sweep
    if section is None:
        message = "sweep: null, where the text of the recipe has a sweep"
        raise RecipeError([Problem(where=loaded.where("sweep"), message=message, hint="leave the key out")])
    root = str(runs_root(request.runs_dir, loaded.recipe.runs_dir, os.environ))
    facts = facts_with_code(loaded, place, executor.name, root)
    sweep_id = new_run_id(loaded.recipe.name, now=datetime.now(), random=SystemRandom())
    slots = _slots(loaded, facts, section.max_parallel) if executor.name == "local" else ()
    here = _facts_of(facts, slots)

    def plan_of(point: Point) -> Plan:
        name = point_id(sweep_id, point.index)
        return make_plan(at_point(loaded, point), here, run_id=name, runs_dir=root, executor=executor.name)

    plan = plan_of(points[0])
    notes = (*refuse(executor, plan, dry_run=dry_run), *_notes(plan, section.max_parallel))
    lines = tuple(_lines(points, plan, plan_of, executor))
    record = _record(loaded, facts, plan, sweep_id=sweep_id, executor=executor.name, slots=slots, command=command)
    folder = Path(plan.run_dir).with_name(sweep_id)
    arrays = tuple(arrays_of(folder, record, plan, facts, range(len(points)))) if executor.name == "slurm" else ()
    return PreparedSweep(
        record=record,
        plan=plan,
        loaded=loaded,
        facts=facts,
        executor=executor,
        folder=folder,
        notes=notes,
        arrays=arrays,
        lines=lines,
    )


def _refuse_what_is_for_one_run(loaded: LoadedRecipe, executor: Executor, place: str) -> None:
    """Raise Refused, or RecipeError, for a place or a key that makes no sense for many runs."""
    if executor.name not in ("local", "slurm"):
        message = f"a sweep runs on one machine or as job arrays of SLURM, not with --on {place}"
        raise Refused([Problem(where="--on", message=message, hint="--on slurm, or --on local")])
    if loaded.recipe.slurm.continue_.startswith("chain"):
        message = f"slurm.continue: {loaded.recipe.slurm.continue_} is for one run; the tasks of an array have no chain"
        hint = "continue: requeue, or resubmit"
        raise RecipeError([Problem(where=loaded.where("slurm.continue"), message=message, hint=hint)])


def _record(
    loaded: LoadedRecipe,
    facts: Facts,
    plan: Plan,
    *,
    sweep_id: str,
    executor: str,
    slots: Sequence[Slot],
    command: Sequence[str],
) -> SweepRecord:
    section = loaded.recipe.sweep
    assert section is not None
    return SweepRecord(
        sweep_id=sweep_id,
        name=loaded.recipe.name,
        executor=executor,
        created_s=round(time.time(), 3),
        points=len(loaded.points),
        keys=tuple(dict.fromkeys(key for point in loaded.points for key in point.settings)),
        metric=section.metric or loaded.recipe.checkpoint.best,
        max_parallel=section.max_parallel,
        command=tuple(command),
        user=facts.user,
        host=facts.hostname,
        slots=tuple(vars(slot) for slot in slots),
        secrets=plan.secrets,
    )


def make_sweep(ready: PreparedSweep) -> SweepDir:
    """The directory of a sweep. Raises Refused where it cannot be written."""

    def with_kept_code(plan: Plan) -> Iterator[Line]:
        for line in ready.lines:
            yield {**line, "plan": {**line["plan"], "code": plan.code}} if "plan" in line else line

    return create_sweep(
        ready.folder,
        ready.record,
        ready.plan,
        with_kept_code,
        recipe_text=ready.loaded.text,
        command=ready.record.command,
        facts=ready.facts,
    )


def _notes(plan: Plan, max_parallel: int | None) -> Iterator[str]:
    slurm = plan.slurm
    if slurm is not None and slurm.continue_how == "resubmit" and max_parallel is not None:
        yield "a point that goes on in a new job (slurm.continue: resubmit) does not count for sweep.max_parallel"


def at_point(loaded: LoadedRecipe, point: Point) -> LoadedRecipe:
    """The recipe of one point, as if it had been loaded for it alone."""
    origins = {key: origin for key, origin in loaded.origins.items() if key != "sweep" and not key.startswith("sweep.")}
    places = {key: origin.removeprefix("sweep ") for key, origin in point.origins.items()}
    return dataclasses.replace(
        loaded,
        recipe=point.recipe,
        overrides=(*loaded.overrides, *point.overrides),
        origins={**origins, **point.origins},
        places={**loaded.places, **places},
        points=(),
    )


def _slots(loaded: LoadedRecipe, facts: Facts, max_parallel: int | None) -> tuple[Slot, ...]:
    """What each point that may run at a time has for itself. Raises RecipeError for a port that several would share."""
    from launcher.planning.slots import divide
    from launcher.planning.topology import Remarks, choose_device

    recipes = [point.recipe for point in loaded.points]
    on_gpus = choose_device(recipes[0], facts, Remarks()).name == "cuda"
    slots = divide(facts, recipes, on_gpus=on_gpus, at_most=max_parallel)
    port = next((port for recipe in recipes if (port := recipe.network.master_port) != "auto"), None)
    if port is not None and len(slots) > 1:
        message = f"network.master_port: {port} for {len(slots)} runs at a time on one machine"
        hint = "leave it out (auto), or sweep.max_parallel: 1"
        raise RecipeError([Problem(where=loaded.where("network.master_port"), message=message, hint=hint)])
    return slots


def _facts_of(facts: Facts, slots: Sequence[Slot]) -> Facts:
    from launcher.planning.slots import facts_of_slot

    return facts_of_slot(facts, slots[0]) if slots else facts


# ---------------------------------------------------------------- points


def _lines(
    points: Sequence[Point], first: Plan, plan_of: Callable[[Point], Plan], executor: Executor
) -> Iterator[Line]:
    """What points.jsonl says of each point: what its recipe sets, or its whole plan where more comes of it."""
    problems: dict[tuple[str, str], Problem] = {}
    checked = {_checked(first)}
    keys, dumped = points[0].settings.keys(), {}
    redactor = redact.own()
    for point in points:
        settings = point.settings
        for key, text in settings.items() if redactor else ():
            if (name := redactor.found_in(text)) is not None:
                where = redactor.text(f"{point.origins[key]}: {key}")
                problems[(key, name)] = Problem(where=where, message=f"this holds the value of {name}")
        sharing = point.recipe.parallelism
        differ = partial(only_values_differ, divided=sharing.tp * sharing.pp > 1)
        if settings.keys() == keys and differ(settings) and differ(points[0].settings):
            sections = dict.fromkeys(key.partition(".")[0] for key in settings)
            recipe, values = {}, {}
            for name in sections:
                content = getattr(point.recipe, name)
                if id(content) not in dumped:
                    dumped[id(content)] = _dumped(name, content, first, point.origins)
                recipe[name], values[name] = dumped[id(content)]
            yield {"index": point.index, "set": dict(settings), "recipe": recipe, "values": values}
            continue
        try:
            plan = first if point.index == 0 else plan_of(point)
            if _checked(plan) not in checked:
                checked.add(_checked(plan))
                refuse(executor, plan)
            _refuse_other_job(first, plan, point)
            yield whole_line(point.index, settings, {**vars(plan)})
        except (RecipeError, Refused) as error:
            problems |= {(each.where, each.message): each for each in error.problems}
    if problems:
        raise RecipeError(list(problems.values()))


def _dumped(name: str, content: Any, first: Plan, own: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    """A section of a point, and its part of the values."""
    section = content.model_dump(mode="json", by_alias=True)
    origins = {value.key: value.origin for value in first.values if value.key.startswith(f"{name}.")}
    return section, section_values(name, section, {**origins, **own})


def _checked(plan: Plan) -> tuple[object, ...]:
    """What of a plan a place looks at."""
    worker = plan.worker
    return worker.script, worker.module, worker.python, worker.cwd, plan.master_port, plan.nproc_per_node


def _refuse_other_job(first: Plan, plan: Plan, point: Point) -> None:
    """Raise RecipeError for a point that asks SLURM for something else than the others: an array is all alike."""
    if first.slurm is None or plan.slurm is None:
        return
    before = {_alike(flag, first): flag for flag in first.slurm.flags}
    other = next((flag for flag in plan.slurm.flags if _alike(flag, plan) not in before), None)
    if other is not None:
        key = next((key for key in point.settings if other.key.startswith(key.rpartition(".")[0])), other.key)
        place = point.origins.get(key, "sweep").removeprefix("sweep ")
        message = f"point {point.index} asks for {other.flag}={other.value}, which point 0 does not"
        raise RecipeError([Problem(where=place, message=message, hint="one sweep for each: an array is all alike")])


def _alike(flag: SbatchFlag, plan: Plan) -> tuple[str, str]:
    return flag.flag, flag.value.replace(plan.run_id, "")


# ---------------------------------------------------------------- job arrays


def arrays_of(folder: Path, record: SweepRecord, plan: Plan, facts: Facts, indices: Sequence[int]) -> Iterator[Array]:
    """The job arrays of these points: as few as MaxArraySize allows.

    `max_parallel` counts for all of them together, so there they follow each other.
    """
    from launcher.planning.batch_script import ArrayScript, batch_script
    from launcher.planning.slurm import FIRST_ONLY, escaped

    assert plan.slurm is not None
    size = (facts.slurm.max_array_size if facts.slurm is not None else None) or MAX_ARRAY_SIZE
    groups: dict[int, list[int]] = {}
    for index in sorted(indices):
        groups.setdefault(index // size * size, []).append(index % size)
    replaced = {"--job-name": record.sweep_id, "--output": f"{escaped(str(folder))}/slurm/%A_%a.log"}
    flags = tuple(
        dataclasses.replace(flag, value=replaced.get(flag.flag, flag.value))
        for flag in plan.slurm.flags
        if flag.flag not in FIRST_ONLY
    )
    first_only = tuple(f"{flag.flag}={flag.value}" for flag in plan.slurm.flags if flag.flag in FIRST_ONLY)
    together = record.max_parallel is None
    limit = "" if record.max_parallel is None else f"%{record.max_parallel}"
    for number, (offset, tasks) in enumerate(groups.items()):
        yield Array(
            offset=offset,
            tasks=tuple(tasks),
            script=batch_script(
                facts.template,
                run_id=record.sweep_id,
                run_dir=str(folder),
                python=plan.agent_argv[0],
                flags=flags,
                array=ArrayScript(prefix=str(folder), offset=offset),
            ),
            flags=(f"--array={format_tasks(tasks)}{limit}", *(first_only if number == 0 or together else ())),
            job_flags=flags,
            waits=number > 0 and not together,
        )


def submit_arrays(
    sweep: SweepDir, executor: SlurmExecutor, arrays: Sequence[Array], known: Sequence[SbatchFlag]
) -> dict[int, str]:
    """Queue them; the job of each point. Raises Refused, with those that are queued already, where one is refused."""
    jobs: list[str] = []
    refs: dict[int, str] = {}
    for array in arrays:
        after = (f"--dependency=afterany:{jobs[-1]}",) if array.waits and jobs else ()
        try:
            job = executor.submit_script(array.script, sweep.run.slurm, flags=(*array.flags, *after), known=known)
        except Refused as error:
            if not jobs:
                raise
            every = sum(len(each.tasks) for each in arrays)
            done = f"queued before: {', '.join(jobs)} ({len(refs):,} of {every:,} points)"
            again = f"the others: launch resume {sweep.sweep_id}"
            raise Refused([*error.problems, Problem(where=sweep.sweep_id, message=done, hint=again)]) from error
        jobs.append(job)
        refs |= {array.offset + task: f"{executor.name}:{job}_{task}" for task in array.tasks}
        tasks = format_tasks(array.tasks)
        record_event(sweep.run, "array_submitted", ref=f"{executor.name}:{job}", offset=array.offset, tasks=tasks)
    return refs


def submitted_jobs(sweep: SweepDir) -> list[str]:
    """The jobs of all arrays of a sweep, oldest first."""
    return [each.ref.partition(":")[2] for each in submissions(read_events(sweep.path)) if each.is_array]


def resume_points(
    sweep: SweepDir, record: SweepRecord, points: Sequence[tuple[int, bool]], choice: str | None = None
) -> CodeChoice:
    """Make points ready to run again, and queue them on SLURM. With each index: whether it has run before.

    choice: of the code, as `launch resume --code` has it. Returns what they go on with: the new code, where it is for
    some. Raises Refused where the code has changed since and nobody said which, or SLURM does not take them.
    """
    from launcher.executors.slurm import SlurmExecutor
    from launcher.planning.facts import gather_facts

    codes = _choose_codes(sweep, points, choice)
    begun = [(sweep.point(index), codes[index]) for index, started in points if started or codes[index].is_new]
    told = next((code for code in codes.values() if code.is_new), codes[points[0][0]])
    executor = get_executor(record.executor)
    plan = base_plan(sweep)
    if not isinstance(executor, SlurmExecutor):
        for run, code in begun:
            _go_on(run, code)
        return told
    template = plan.recipe["slurm"]["template"]
    facts = gather_facts(slurm=True, template=None if template is None else Path(template))
    arrays = list(arrays_of(sweep.path, record, plan, facts, [index for index, _ in points]))
    assert plan.slurm is not None
    refuse(executor, plan)
    for run, code in begun:
        _go_on(run, code)
    refs = submit_arrays(sweep, executor, arrays, plan.slurm.flags)
    for index, ref in refs.items():
        if (run := sweep.point(index)).plan.exists():
            record_event(run, "submitted", ref=ref)
    return told


def _go_on(run: RunDir, code: CodeChoice) -> None:
    """What `launch resume` does to one run, with the plan that it has."""
    make_point(run)  # with new code, before it begins
    plan = read_plan(run)
    kept = update_plan(run, plan, resolved=resolved_recipe(plan), code=code.code if code.is_new else None)
    nodes = [len(plan.nodes), len(plan.nodes)]
    changed = {"code": code.word, "code_sha256": code.code.sha256, "code_kept": kept}
    record_event(run, "resumed", overrides=[], nodes=nodes, **changed)


def _choose_codes(sweep: SweepDir, points: Sequence[tuple[int, bool]], choice: str | None) -> dict[int, CodeChoice]:
    """The code that each point goes on with: most have that of the sweep, some one of their own from a resume."""
    chosen: dict[Path, CodeChoice] = {}
    codes = {}
    for index, started in points:
        record = (sweep.point(index) if started else sweep.run).code_record.resolve()
        if record not in chosen:
            chosen[record] = _choose_code(sweep, index, choice)
        codes[index] = chosen[record]
    return codes


def _choose_code(sweep: SweepDir, index: int, choice: str | None) -> CodeChoice:
    """The code that one point goes on with. Raises Refused as `choose_code` does."""
    run = sweep.point(index)
    make_point(run)
    plan = read_plan(run)
    loaded = load_again(run, plan, (), {})
    facts = facts_of(loaded, plan.executor, str(run.path.parent))
    source = source_of(loaded, facts, str(run.path.parent))
    code = choose_code(run, source, choice)
    if code.is_new and plan.code is not None and code.code.snapshot != plan.code.snapshot:
        message = "the files as they are now are kept in another way, so plans have to be made anew"
        raise Refused(
            [
                Problem(
                    where="--code current",
                    message=message,
                    hint=f"each alone: launch resume {run.run_id} --code current",
                )
            ]
        )
    return code


def base_plan(sweep: SweepDir) -> Plan:
    """The plan of point 0."""
    from launcher.planning.plan import Plan

    document = point_plan(sweep, 0)
    return Plan.from_json(json.dumps(document))
