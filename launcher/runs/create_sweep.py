"""The directory of a sweep is made here, once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import redact
from launcher.planning.codeplan import code_plan
from launcher.planning.plan import Plan
from launcher.planning.points import Line
from launcher.runs.carry import carry_agent
from launcher.runs.code import store_code
from launcher.runs.create import holds_code, launch_record, record_event, whole_folder
from launcher.runs.find import state_folder, write_pointer
from launcher.runs.rundir import RunDir
from launcher.runs.sweep import SweepDir, SweepRecord

if TYPE_CHECKING:
    from launcher.planning.facts import Facts

Lines = Callable[[Plan], Iterable[Line]]
"""What points.jsonl holds, given the plan of point 0 as it is kept."""


def create_sweep(
    folder: Path,
    record: SweepRecord,
    plan: Plan,
    lines: Lines,
    *,
    recipe_text: str,
    command: Sequence[str],
    facts: Facts,
) -> SweepDir:
    """Make the directory of a sweep, and the pointer that finds it from anywhere. `plan` is that of point 0.

    Raises Refused where it cannot be written, UnicodeEncodeError for a path that is not UTF-8; nothing is left behind
    then.
    """
    state_folder()
    sweep = SweepDir(folder)
    with whole_folder(sweep.run, private=holds_code(facts)):
        if facts.code is not None:
            plan = dataclasses.replace(plan, code=code_plan(store_code(sweep.run, facts.code)))
        _fill(sweep, record, plan, lines, recipe_text=recipe_text, command=command, facts=facts)
    return sweep


def _fill(
    sweep: SweepDir,
    record: SweepRecord,
    plan: Plan,
    lines: Lines,
    *,
    recipe_text: str,
    command: Sequence[str],
    facts: Facts,
) -> None:
    redact.remember(plan.secrets)
    redactor = redact.own()
    run = sweep.run
    run.recipe.write_text(redactor.text(recipe_text), encoding="utf-8")
    sweep.base.write_text(compact(plan), encoding="utf-8")
    with sweep.points.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, default=vars, ensure_ascii=False) + "\n" for line in lines(plan))
    _carry(sweep, plan)
    for made in (run.console.parent, run.slurm):
        made.mkdir()
    about = redactor.document(launch_record(plan, command=command, facts=facts))
    run.launch.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record_event(run, "created", command=list(command), user=facts.user, host=facts.hostname)
    sweep.record.write_text(redactor.text(record.to_json()), encoding="utf-8")
    write_pointer(run)


def _carry(sweep: SweepDir, plan: Plan) -> None:
    """Our agent, if it travels: `carry_agent` looks where the plan starts it, which is in the point."""
    point = RunDir(Path(plan.run_dir))
    moved = dataclasses.replace(
        plan,
        agent_argv=tuple(word.replace(str(point.path), str(sweep.path)) for word in plan.agent_argv),
        slurm=None
        if plan.slurm is None
        else dataclasses.replace(
            plan.slurm, srun=tuple(word.replace(str(point.path), str(sweep.path)) for word in plan.slurm.srun)
        ),
    )
    carry_agent(sweep.run, moved)


def compact(plan: Plan) -> str:
    """A plan as JSON on one line, in a tenth of the time that indented text takes."""
    return json.dumps(vars(plan), default=vars, ensure_ascii=False)
