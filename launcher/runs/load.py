"""Reading a run directory: the record, the result, the plan, the newest metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, Refused
from launcher.planning.plan import Plan
from launcher.runs.events import parse_object, read_events
from launcher.runs.fold import RunRecord, fold
from launcher.runs.rundir import RunDir
from launcher.runs.steps import tail

Alive = Callable[[str], bool | None]
"""Asks the place of a job, given its printed reference, whether it is alive; None = it cannot be told."""


def read_record(run: RunDir, alive: Alive) -> RunRecord:
    """Where a run stands now. A job is asked for only when the events leave it open how the run ended."""
    record = fold(read_events(run.path), True, read_result(run), run_id=run.run_id)
    if not record.state.is_final:
        # Asked first, read again after: what the job wrote before it ended is then seen.
        observed = alive(record.ref) if record.ref else None
        record = fold(read_events(run.path), observed, read_result(run), run_id=run.run_id)
    if record.state.is_final or not (newest := newest_metrics(run.metrics)):
        return record
    return replace(record, step=int(newest[-1]["step"]))


def read_result(run: RunDir) -> dict[str, Any] | None:
    """The content of result.json. None while there is none, or for one that a crash of the machine has spoiled.

    The events say how it ended too, and one spoiled run must not hide the others of a list.
    """
    try:
        return parse_object(run.result.read_bytes())
    except FileNotFoundError:
        return None


def read_plan(run: RunDir) -> Plan:
    """The plan of the newest launch or resume. Raises Refused where another version of the launcher made it."""
    try:
        return Plan.from_json(run.plan.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        message = "it is damaged, or no plan of this launcher"
        raise Refused([Problem(where=str(run.plan), message=message, hint=_again(run))]) from error
    except ValueError as error:
        raise Refused([Problem(where=str(run.plan), message=str(error), hint=_again(run))]) from error


def _again(run: RunDir) -> str:
    return f"a new run of the same recipe: launch {run.resolved}"


def newest_metrics(path: Path) -> list[dict[str, Any]]:
    """The last lines of a metrics file that have a step, of the newest attempt."""
    read = tail(path)
    return [line for line in read if "step" in line and line.get("attempt") == read[-1].get("attempt")]
