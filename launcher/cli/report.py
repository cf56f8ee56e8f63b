"""`launch report RUN`: why a run ended, its attempts, where the time went. From its record alone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.attempts import AttemptRow
    from launcher.runs.events import Event
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def report(run: str, as_json: bool) -> None:
    """Why RUN ended, what each of its attempts came to, and where the time went."""
    from launcher.cli.summary import here
    from launcher.executors.base import observe_job
    from launcher.runs.attempts import attempt_rows
    from launcher.runs.events import read_events
    from launcher.runs.find import find_run, find_sweep
    from launcher.runs.ledger import devices_of, ledger, ledger_fields, total_parts
    from launcher.runs.load import read_plan, read_record, read_result

    if (sweep := find_sweep(run)) is not None:
        from launcher.cli.sweep import report_sweep

        report_sweep(sweep, as_json=as_json)
        return
    found = find_run(run)
    record, result, plan = read_record(found, observe_job), read_result(found), read_plan(found)
    events = read_events(found.path)
    if as_json:
        entries = ledger(events, now_s=_until(record, time.time()))
        spent = {"time": total_parts(entries), "ledger": ledger_fields(entries, devices_of(plan))}
        fields = report_fields(record, result or {}, attempt_rows(events), spent, found.path)
        print(json.dumps(fields, ensure_ascii=False))
    else:
        print(report_text(record, result, plan, events, now_s=time.time(), cwd=here(), run=found), end="")


def report_text(
    record: RunRecord,
    result: Mapping[str, Any] | None,
    plan: Plan,
    events: Sequence[Event],
    *,
    now_s: float,
    cwd: Path,
    run: RunDir | None = None,
) -> str:
    """What `launch report` says. run: where the run is now, if not where it was made."""
    from launcher.cli.summary import final_block
    from launcher.runs.attempts import allocations_table, attempt_rows, attempts_table, ledger_table, time_table
    from launcher.runs.devices import read_use
    from launcher.runs.devices_text import uses_text
    from launcher.runs.ledger import devices_of, ledger, total_parts
    from launcher.runs.profile import newest_profile, profile_text
    from launcher.runs.report import short_id
    from launcher.runs.rundir import RunDir
    from launcher.runs.saves import saves_text
    from launcher.runs.stalls import stalls_text
    from launcher.runs.times import newest_submission, spans

    run = RunDir(Path(plan.run_dir)) if run is None else run
    attempts = spans(newest_submission(events))
    clocked = plan.worker.kind == "job" or not attempts or any(span.has_clock for span in attempts)
    entries = ledger(events, now_s=_until(record, now_s))
    times = time_table(total_parts(entries), has_clock=clocked)
    if times and any(event["event"] == "resumed" for event in events):
        times += "\nsince the newest `launch resume`; the attempts are those of the whole run"
    sections = [
        final_block(record, result, plan, cwd=cwd, name=short_id(record.run_id)),
        allocations_table(record),
        attempts_table(attempt_rows(events)),
        stalls_text(events),
        times,
        ledger_table(entries, devices_of(plan)),
        saves_text(events, total_parts(entries)),
        uses_text(read_use(run)),
        profile_text(newest_profile(run)),
    ]
    return "\n".join(f"{section}\n" for section in sections if section)


def _until(record: RunRecord, now_s: float) -> float | None:
    """The present, for a run that goes on."""
    from launcher.runs.states import RunState

    return now_s if record.state is not RunState.UNKNOWN and not record.state.is_final else None


def report_fields(
    record: RunRecord, result: Mapping[str, Any], rows: Sequence[AttemptRow], spent: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """What `launch report --json` says. spent: `time`, seconds by part, and `ledger`, the same for each attempt."""
    from launcher.runs.attempts import allocation_end
    from launcher.runs.devices import read_use, use_fields
    from launcher.runs.ledger import goodput
    from launcher.runs.profile import newest_profile
    from launcher.runs.report import first_failure
    from launcher.runs.rundir import RunDir

    first = first_failure(record, result)
    return {
        "run_id": record.run_id,
        "run_dir": str(path),
        "state": record.state.value,
        "cause": record.cause.value if record.cause else None,
        "sentence": record.sentence,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "step": record.step,
        "first_failure": None if first is None else dict(first),
        "failures": [dict(failure) for failure in record.failures],
        "policy": result.get("policy"),
        "restarts": record.restarts,
        "checkpoint": result.get("checkpoint"),
        "allocations": [{**each, "ended_by": allocation_end(record, each)} for each in record.allocations],
        "attempts": [asdict(row) for row in rows],
        "time": {f"{name}_s": time_s for name, time_s in spent["time"].items()},
        "goodput": goodput(spent["time"]),
        "ledger": spent["ledger"],
        "metrics": dict(record.metrics or {}),
        "devices": [use_fields(use) for use in read_use(RunDir(path))],
        "profile": newest_profile(RunDir(path)),
    }
