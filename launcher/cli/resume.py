"""`launch resume RUN`: a person goes on with a run that has ended, under the same id."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.types import NODES
from launcher.errors import Problem, Refused

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.recipe.loader import LoadedRecipe
    from launcher.runs.code import CodeChoice
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--nodes", type=NODES, metavar="N|MIN:MAX", help="Number of nodes; 1:4 goes on with fewer.")
@click.option("--on", "where", metavar="WHERE", help="Where to go on, as of `launch`. Default: where it ran.")
@click.option(
    "--code",
    "choice",
    type=click.Choice(["same", "current"]),
    help="Where the code has changed since: go on with that of the run, or with the files as they are now.",
)
@click.option("--detach/--follow", default=None, help="Return at once (default on SLURM), or stay and show the output.")
@click.option("--yes", is_flag=True, help="Rent machines (--on sky) without asking.")
@click.option("--json", "as_json", is_flag=True, help="The last line of the output is one JSON object.")
def resume(run: str, detach: bool | None, as_json: bool, yes: bool, **options: Any) -> int:
    """Go on with RUN from its newest checkpoint; `train.until` is the total length."""
    from launcher.runs.create import claimed
    from launcher.runs.find import find_run, find_sweep

    if (sweep := find_sweep(run)) is not None:
        from launcher.cli.run import LaunchOptions
        from launcher.cli.sweep import resume_sweep

        said = {"overrides": "KEY=VALUE", "nodes": "--nodes", "where": "--on"}
        if given := [word for name, word in said.items() if options[name]]:
            hint = f"one point alone: launch resume {sweep.point(0).run_id} ..."
            message = f"the points of a sweep go on as they are, all of them; {', '.join(given)} is for one alone"
            raise Refused([Problem(where=sweep.sweep_id, message=message, hint=hint)])
        return resume_sweep(sweep, LaunchOptions(detach=detach, as_json=as_json), options["choice"])
    found = find_run(run)
    with claimed(found):
        return _resume(found, Wishes(**options), detach=detach, as_json=as_json, yes=yes)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is to be different from now on."""

    overrides: tuple[str, ...] = ()
    nodes: int | str | None = None
    where: str | None = None
    choice: str | None = None
    """same, current, or None: the code has to be as it was."""


def _resume(run: RunDir, wishes: Wishes, *, detach: bool | None, as_json: bool, yes: bool) -> int:
    from launcher.cli.prices import confirm_price
    from launcher.cli.run import prepare_resumed, show_json, submit
    from launcher.cli.signals import SignalInbox
    from launcher.executors.base import get_executor, observe_job
    from launcher.road import other_place, recipe_flags, refuse, returns_at_once
    from launcher.runs.again import load_again
    from launcher.runs.create import record_event, resolved_recipe, update_plan
    from launcher.runs.load import read_plan, read_record, read_result
    from launcher.runs.report import newest_saved

    record = read_record(run, observe_job)
    check_ended(record)
    old = read_plan(run)
    place = other_place(wishes.where)
    loaded = load_again(run, old, wishes.overrides, recipe_flags(nodes=wishes.nodes), place)
    recipe = loaded.recipe.model_dump(mode="json", by_alias=True)
    if already_complete(record, recipe, changed=bool(wishes.overrides) or wishes.choice == "current"):
        if as_json:
            show_json({"run_id": run.run_id, "run_dir": str(run.path), "state": record.state, "exit_code": 0})
        else:
            print(complete_text(record, recipe))
        return 0
    executor = get_executor(old.executor if place is None else place.executor)
    plan, code = _new_plan(run, loaded, executor.name, wishes.choice)
    refuse(executor, plan)
    confirm_price(plan, yes=yes)
    with SignalInbox() as inbox:
        kept = update_plan(run, plan, resolved=resolved_recipe(plan), code=code.code if code.is_new else None)
        if wishes.choice is not None:
            print(code_text(run, code, kept), file=sys.stderr, flush=True)
        changed = {"code": code.word, "code_sha256": code.code.sha256, "code_kept": kept}
        nodes = [len(old.nodes), len(plan.nodes)]
        record_event(run, "resumed", overrides=list(wishes.overrides), nodes=nodes, **changed)
        if plan.prepare != old.prepare:  # another place has lines of its own; what was done once is not done again
            prepare_resumed(plan, run)
        detach = returns_at_once(executor) if detach is None else detach
        saved = newest_saved(record, read_result(run) or {})
        return submit(plan, run, executor, inbox, detach=detach, as_json=as_json, is_new=False, saved=saved)


def code_text(run: RunDir, code: CodeChoice, kept: str | None = None) -> str:
    """Which code a resume goes on with."""
    if not code.is_new:
        where = run.code if code.code.snapshot else code.code.root
        return f"code: that of the run, {where}" + ("; nothing has changed" if code.word == "unchanged" else "")
    return f"code: {code.code.root} as it is now" + (f"; that of before is kept in {kept}" if kept else "")


def check_ended(record: RunRecord) -> None:
    """Raise Refused for a run that is alive, or may be: two of the same id would write to one directory."""
    from launcher.errors import Problem, Refused
    from launcher.runs.states import RunState

    if record.state.is_final or record.ref is None:
        return
    if record.state is RunState.UNKNOWN:
        raise Refused([Problem(where=record.run_id, message=f"it may still be alive: {record.sentence}")])
    hint = f"launch cancel {record.run_id}, then resume it"
    raise Refused([Problem(where=record.run_id, message=f"it is alive ({record.state})", hint=hint)])


def already_complete(record: RunRecord, recipe: Mapping[str, Any], *, changed: bool = False) -> bool:
    """Whether a run that succeeded has nothing left to do: `train.until` is a total, not an addition.

    How long a script trains is known to itself alone: with other arguments or other code it is run again.
    """
    from launcher.recipe.units import Length
    from launcher.runs.states import RunState

    if record.state is not RunState.SUCCEEDED:
        return False
    until = (recipe.get("train") or {}).get("until")
    if until is None:
        return not changed
    if record.step is None:
        return True
    length = Length.parse(until)
    if length.unit == "epochs" and record.steps_per_epoch is None:
        return True
    return length.steps(record.steps_per_epoch or 1) <= record.step


def complete_text(record: RunRecord, recipe: Mapping[str, Any]) -> str:
    """What `resume` says where nothing is left to do, and how to go on all the same."""
    done = f"{record.run_id} is already complete" + (f" at step {record.step}" if record.step else "")
    until = (recipe.get("train") or {}).get("until")
    if until:
        return f"{done}; to go on, give a larger total: train.until=... (now {until})"
    named = isinstance(recipe.get("args"), Mapping)
    return f"{done}; to go on, change what it is told: {'args.NAME=VALUE' if named else 'args=[...]'}"


def _new_plan(run: RunDir, loaded: LoadedRecipe, executor: str, choice: str | None) -> tuple[Plan, CodeChoice]:
    from launcher.planning.make import make_plan
    from launcher.road import facts_of, source_of
    from launcher.runs.code import choose_code

    root = str(run.path.parent)  # the place is where the run is now: a folder that was moved goes on there
    facts = facts_of(loaded, executor, root)
    code = choose_code(run, source_of(loaded, facts, root), choice)
    facts = dataclasses.replace(facts, code=code.code)
    return make_plan(loaded, facts, run_id=run.run_id, runs_dir=root, executor=executor), code
