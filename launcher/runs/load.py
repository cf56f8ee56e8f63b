"""Reading a run directory: the record, the result, the plan, the newest metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, Refused
from launcher.planning.plan import Plan
from launcher.runs.events import parse_object, read_events
from launcher.runs.fold import RunRecord, fold
from launcher.runs.observed import ALIVE, GONE, UNKNOWN, Observation
from launcher.runs.rundir import RunDir
from launcher.runs.states import RunState
from launcher.runs.steps import tail

_LAST_LINES = 3

Observe = Callable[[str], Observation]
"""Asks the place of a job about it, given its printed reference."""
ObserveAll = Callable[[Sequence[str]], Mapping[str, Observation]]
"""The same of many jobs, at the price of one question per place."""


def read_record(run: RunDir, observe: Observe) -> RunRecord:
    """Where a run stands now. A job is asked for only when the events leave it open how the run ended."""
    return read_records([run], lambda refs: {ref: observe(ref) for ref in refs})[0]


def read_records(runs: Sequence[RunDir], observe_all: ObserveAll) -> list[RunRecord]:
    """Where each of these runs stands now. All jobs that have to be asked for are asked for at once."""
    records = [_fold(run, ALIVE) for run in runs]
    open_ones = [index for index, record in enumerate(records) if not record.state.is_final]
    refs = list(dict.fromkeys(ref for index in open_ones for ref in records[index].jobs))
    # Asked first, read again after: what the job wrote before it ended is then seen.
    seen = observe_all(refs) if refs else {}
    now_s = time.time()
    for index in open_ones:
        record = _fold(runs[index], _carrier(records[index].jobs, seen), now_s)
        records[index] = _stepped(_with_last_words(record, runs[index]), runs[index])
    return records


def _with_last_words(record: RunRecord, run: RunDir) -> RunRecord:
    """Of a job that ended before anything of ours could speak: what its own output says, or that there is none."""
    if not record.on_slurm or record.allocations or record.state is not RunState.FAILED:
        return record
    logs = run.job_logs()
    said = logs[0].read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:] if logs else []
    words = " | ".join(line.strip() for line in said if line.strip())
    return replace(
        record, reason=words or f"it left no output in {run.slurm}: SLURM could not write there, or never ran it"
    )


def read_ended(run: RunDir) -> RunRecord | None:
    """What a list shows of a run that has ended, from its result alone. None: its events have to be read.

    `launch resume` takes the result away, so one that is there is that of the newest launch.
    """
    result = read_result(run)
    if result is None or not isinstance(total_steps := result.get("total_steps", ""), int | None):
        return None
    record = replace(fold((), GONE, result, run_id=run.run_id), total_steps=total_steps)
    return record if record.state.is_final else None


def _fold(run: RunDir, seen: Observation, now_s: float | None = None) -> RunRecord:
    return fold(read_events(run.path), seen, read_result(run), run_id=run.run_id, now_s=now_s)


def _carrier(jobs: Sequence[str], seen: Mapping[str, Observation]) -> Observation:
    """What is said of the job that carries a run: of a chain the first that is not over."""
    told = [seen[job] for job in jobs if job in seen]
    return next((each for each in told if each.alive is not False), told[0] if told else UNKNOWN)


def _stepped(record: RunRecord, run: RunDir) -> RunRecord:
    """A run that goes on is as far as its metrics."""
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
