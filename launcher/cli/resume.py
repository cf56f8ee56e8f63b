"""`launch resume RUN`: a person goes on with a run that has ended, under the same id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes.")
@click.option("--detach/--follow", default=None, help="Return at once, or stay and show the output (default).")
@click.option("--json", "as_json", is_flag=True, help="The last line of the output is one JSON object.")
def resume(run: str, overrides: tuple[str, ...], nodes: int | None, detach: bool | None, as_json: bool) -> int:
    """Go on with RUN from its newest checkpoint; `train.until` is the total length."""
    from launcher.runs.create import claimed
    from launcher.runs.find import find_run

    found = find_run(run)
    with claimed(found):
        return _resume(found, overrides, nodes, detach=bool(detach), as_json=as_json)


def _resume(run: RunDir, overrides: tuple[str, ...], nodes: int | None, *, detach: bool, as_json: bool) -> int:
    from launcher.cli.run import refuse, show_json, submit
    from launcher.cli.runs import job_alive
    from launcher.cli.signals import SignalInbox
    from launcher.executors.base import get_executor
    from launcher.runs.create import record_event, resolved_recipe, update_plan
    from launcher.runs.load import read_plan, read_record

    record = read_record(run, job_alive)
    check_ended(record)
    plan = _new_plan(run, read_plan(run), overrides, nodes)
    if already_complete(record, plan.recipe):
        if as_json:
            show_json({"run_id": run.run_id, "run_dir": str(run.path), "state": record.state, "exit_code": 0})
        else:
            print(complete_text(record, plan.recipe))
        return 0
    executor = get_executor(plan.executor)
    refuse(executor, plan)
    with SignalInbox() as inbox:
        update_plan(run, plan, resolved=resolved_recipe(plan))
        record_event(run, "resumed", overrides=list(overrides))
        return submit(plan, run, executor, inbox, detach=detach, as_json=as_json)


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


def already_complete(record: RunRecord, recipe: Mapping[str, Any]) -> bool:
    """Whether a run that succeeded has nothing left to do: `train.until` is a total, not an addition."""
    from launcher.recipe.units import Length
    from launcher.runs.states import RunState

    if record.state is not RunState.SUCCEEDED:
        return False
    until = (recipe.get("train") or {}).get("until")
    if until is None or record.step is None:
        return True
    length = Length.parse(until)
    if length.unit == "epochs" and record.steps_per_epoch is None:
        return True
    return length.steps(record.steps_per_epoch or 1) <= record.step


def complete_text(record: RunRecord, recipe: Mapping[str, Any]) -> str:
    """What `resume` says where nothing is left to do, and how to go on all the same."""
    done = f"{record.run_id} is already complete" + (f" at step {record.step}" if record.step else "")
    until = (recipe.get("train") or {}).get("until")
    return f"{done}; to go on, give a larger total: train.until=... (now {until})" if until else done


def _new_plan(run: RunDir, old: Plan, overrides: tuple[str, ...], nodes: int | None) -> Plan:
    from launcher.planning.facts import gather_facts
    from launcher.planning.make import make_plan
    from launcher.recipe.loader import load_recipe

    loaded = load_recipe(run.resolved, overrides, flags={"resources.nodes": ("--nodes", nodes)})
    # The place is where the run is now: a folder that was moved goes on there.
    facts = gather_facts(python=loaded.recipe.python, secrets=loaded.recipe.secrets)
    return make_plan(loaded, facts, run_id=run.run_id, runs_dir=str(run.path.parent), executor=old.executor)
