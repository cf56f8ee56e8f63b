"""Sweeps on the command line: launch one, list its points, stop it, go on with it, say how it went."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launcher.cli.signals import SignalInbox
from launcher.errors import ExitCode, Problem, Refused
from launcher.wording import aligned, count, ranges

if TYPE_CHECKING:
    from launcher.cli.run import LaunchOptions
    from launcher.planning.plan import Plan
    from launcher.road import Request
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir
    from launcher.runs.sweep import SweepDir, SweepRecord
    from launcher.runs.sweep_table import PointRow, SweepTable
    from launcher.sweeps import PreparedSweep

_SHOWN = 40
"""Points in a table on the terminal; `--json` has them all."""
_LOOK_S = 3.0
_LEAVE_S = 15.0


# ---------------------------------------------------------------- launch


def launch_sweep(request: Request, options: LaunchOptions) -> int:
    """Start all points of a sweep, or show them. Returns the exit code."""
    from launcher.cli.run import show_preparation
    from launcher.preparation import prepare_new
    from launcher.sweeps import make_sweep, prepare_sweep

    ready = prepare_sweep(request, command=sys.argv, dry_run=options.dry_run)
    if options.dry_run:
        return _show(ready, options)
    for note in ready.notes:
        print(note, file=sys.stderr)
    with SignalInbox() as inbox:
        sweep = make_sweep(ready)
        prepare_new(ready.plan, sweep.run, show=show_preparation)
        if ready.executor.name == "slurm":
            return _submit(ready, sweep, inbox, options)
        return _run_here(sweep, ready.record, range(ready.record.points), inbox, options)


def _show(ready: PreparedSweep, options: LaunchOptions) -> int:
    """The points as a table, the plan of the first, the array scripts."""
    from launcher.planning.render import render_plan

    if options.as_json:
        arrays = [{"flags": list(array.flags), "script": array.script} for array in ready.arrays]
        points = [{"index": point.index, "set": dict(point.settings)} for point in ready.loaded.points]
        shown = {"sweep_id": ready.record.sweep_id, "points": points, "arrays": arrays}
        print(json.dumps({**shown, "plan": json.loads(ready.plan.to_json())}, ensure_ascii=False))
        return 0
    print(f"{ready.record.sweep_id}   dry run: nothing was started\n\n{points_text(ready)}\n")
    for number, array in enumerate(ready.arrays):
        after = "   when the array before it has ended" if array.waits else ""
        offset = f", indices + {array.offset}" if array.offset else ""
        print(f"Job array {number}: sbatch {' '.join(array.flags)}{offset}{after}")
    print("\nPlan of point 0\n" if ready.arrays else "Plan of point 0\n")
    print(render_plan(_as_sent(ready), ready.facts, verbose=options.verbose), end="")
    for note in ready.notes:
        print(f"- {note}")
    return 0


def _as_sent(ready: PreparedSweep) -> Plan:
    """The plan of point 0 with the job that is really submitted: on SLURM the first array, for all points in it."""
    from launcher.planning.plan import SbatchFlag

    if ready.plan.slurm is None or not ready.arrays:
        return ready.plan
    first = ready.arrays[0]
    keys = {flag.flag: flag.key for flag in ready.plan.slurm.flags}
    sent = [
        SbatchFlag(flag=name, value=value, key=keys.get(name, "sweep"))
        for name, _, value in (word.partition("=") for word in first.flags)
    ]
    slurm = dataclasses.replace(ready.plan.slurm, script=first.script, flags=(*sent, *first.job_flags))
    return dataclasses.replace(ready.plan, slurm=slurm)


def points_text(ready: PreparedSweep) -> str:
    """The points as aligned columns, in order."""
    points = ready.loaded.points
    shown = points if len(points) <= _SHOWN else (*points[: _SHOWN - 1], points[-1])
    rows = [("POINT", *ready.record.keys)]
    rows += [(str(point.index), *(point.settings.get(key, "") for key in ready.record.keys)) for point in shown]
    lines = aligned(rows)
    if len(shown) < len(points):
        lines.insert(-1, f"... {len(points) - len(shown)} more")
    return "\n".join([f"{count(len(points), 'point')}, {ready.how_many_at_a_time}", *lines])


def _submit(ready: PreparedSweep, sweep: SweepDir, inbox: SignalInbox, options: LaunchOptions) -> int:
    from launcher.executors.slurm import SlurmExecutor
    from launcher.runs.create import discard
    from launcher.sweeps import submit_arrays, submitted_jobs

    assert isinstance(ready.executor, SlurmExecutor)
    assert ready.plan.slurm is not None
    try:
        submit_arrays(sweep, ready.executor, ready.arrays, ready.plan.slurm.flags)
    except Refused:
        if not submitted_jobs(sweep):
            discard(sweep.run)
        raise
    return _submitted(sweep, ready.record, inbox, options, where=ready.how_many_at_a_time)


def _submitted(sweep: SweepDir, record: SweepRecord, inbox: SignalInbox, options: LaunchOptions, *, where: str) -> int:
    from launcher.cli.submitted import free_bytes, job_rows
    from launcher.cli.summary import here
    from launcher.sweeps import base_plan, submitted_jobs

    jobs = submitted_jobs(sweep)
    if options.as_json and not options.follows:
        _json(sweep, record, jobs=jobs)
        return 0
    shown = sys.stderr if options.as_json else sys.stdout
    arrays = f"{'array' if len(jobs) == 1 else 'arrays'} {', '.join(jobs)}"
    print(f"{sweep.sweep_id}   {count(record.points, 'point')}, {arrays}, {where}", file=shown)
    for name, text in job_rows(base_plan(sweep), sweep.path, cwd=here(), free_bytes=free_bytes(sweep.path)):
        print(f"  {'each' if name == 'where' else name:<8}{text}", file=shown)
    print(_next_text(), file=shown, flush=True)
    return _follow(sweep, record, inbox, options) if options.follows else 0


def _next_text() -> str:
    return "Next   launch ls last      launch status last      launch cancel last"


def _json(sweep: SweepDir, record: SweepRecord, **more: Any) -> None:
    fields = {"sweep_id": sweep.sweep_id, "run_dir": str(sweep.path), "points": record.points, **more}
    print(json.dumps(fields, ensure_ascii=False), flush=True)


def _run_here(
    sweep: SweepDir, record: SweepRecord, indices: Sequence[int], inbox: SignalInbox, options: LaunchOptions
) -> int:
    """A queue on this machine: this process itself, or one that outlives it."""
    from launcher.executors.queue import Queue, queue_ref
    from launcher.runs.create import record_event
    from launcher.runs.sweep import format_tasks

    tasks = format_tasks(indices)
    if options.detach:
        ref = queue_ref(start_queue(sweep, tasks))
        record_event(sweep.run, "array_submitted", ref=ref, offset=0, tasks=tasks)
        if options.as_json:
            _json(sweep, record, ref=ref)
        else:
            print(f"{sweep.sweep_id}   {count(len(indices), 'point')}, {at_a_time(record)}\n{_next_text()}")
        return 0
    record_event(sweep.run, "array_submitted", ref=queue_ref(os.getpid()), offset=0, tasks=tasks)
    shown = sys.stderr if options.as_json else sys.stdout
    print(f"{sweep.sweep_id}   {count(len(indices), 'point')}, {at_a_time(record)}", file=shown, flush=True)

    def ended(index: int, point: RunRecord) -> None:
        print(ended_text(index, point), file=shown, flush=True)

    def wait(timeout_s: float) -> Sequence[int]:
        stops = inbox.wait(timeout_s)
        if stops:
            again = "" if queue.stopped else " (again to end them at once)"
            print(f"stopping: what runs saves a checkpoint, nothing more begins{again}", file=sys.stderr, flush=True)
        return stops

    queue = Queue(sweep, record, indices, ended=ended)
    queue.run(wait)
    return _final(sweep, record, options, stopped=queue.stopped)


def start_queue(sweep: SweepDir, tasks: str) -> int:
    """Start a queue that goes on without this process; its pid."""
    sweep.queue_log.parent.mkdir(exist_ok=True)
    with sweep.queue_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.cli.queue", str(sweep.path), tasks],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process.pid


def at_a_time(record: SweepRecord) -> str:
    """How many points of a sweep on one machine run at a time, and with what."""
    slots = record.slots
    if not slots:
        return ""
    first = slots[0]
    gpus = f" and {count(len(first['gpus']), 'GPU')}" if first["gpus"] else ""
    each = f"{count(len(first['cpus']), 'CPU')}{gpus}" if first["cpus"] or gpus else "a share of the CPUs"
    return f"{len(slots)} at a time on this machine, each with {each}"


def ended_text(index: int, point: RunRecord) -> str:
    """One line for a point that has ended."""
    metrics = {name: value for name, value in (point.metrics or {}).items() if name.startswith("eval/")}
    told = [f"{name} {value:.4g}" for name, value in sorted(metrics.items())]
    why = point.why if point.exit_code else ""
    return "   ".join(filter(None, [f"point {index}", str(point.state), *told, why]))


def _final(sweep: SweepDir, record: SweepRecord, options: LaunchOptions, *, stopped: bool = False) -> int:
    """The table at the end, and the exit code: of the first point that failed, 75 after a stop."""
    from launcher.runs.sweep_table import DONE, table_text

    table = look(sweep, record)
    bad = [row.exit_code for row in table.rows if row.state == "FAILED"]
    code = int(ExitCode.STOPPED) if stopped else int((bad[0] or ExitCode.INTERNAL) if bad else 0)
    if not stopped and not bad and any(row.state != DONE for row in table.rows):
        code = int(ExitCode.STOPPED)
    if options.as_json:
        _json(sweep, record, states=table.counts, exit_code=code)
    else:
        print(f"\n{table_text(table, limit=_SHOWN)}")
        if any(row.state != DONE for row in table.rows):
            print(f"Next   launch resume {sweep.sweep_id}      launch report {sweep.sweep_id}")
    return code


def _follow(sweep: SweepDir, record: SweepRecord, inbox: SignalInbox, options: LaunchOptions) -> int:
    """One line for each point of an array that ends, until all have. A stop only ends the looking."""
    told: set[int] = set()
    shown = sys.stderr if options.as_json else sys.stdout
    while True:
        table = look(sweep, record)
        for row in table.rows:
            if not row.goes_on and row.index not in told:
                told.add(row.index)
                print(_row_text(row, table), file=shown, flush=True)
        if not any(row.goes_on for row in table.rows):
            return _final(sweep, record, options)
        if inbox.wait(_LOOK_S):
            print(f"the sweep goes on: launch ls {sweep.sweep_id}, launch cancel {sweep.sweep_id}", file=sys.stderr)
            return 0


def _row_text(row: PointRow, table: SweepTable) -> str:
    metric = "" if row.metric is None else f"{(table.metric or '').partition(' ')[0]} {row.metric:.4g}"
    return "   ".join(filter(None, [f"point {row.index}", row.state, metric, row.why]))


# ---------------------------------------------------------------- look


def look(sweep: SweepDir, record: SweepRecord) -> SweepTable:
    """Where all points stand now."""
    from launcher.executors.base import observe_jobs
    from launcher.runs.sweep_table import sweep_table

    return sweep_table(sweep, record, observe_jobs, now_s=time.time())


def record_of(sweep: SweepDir) -> SweepRecord:
    """What is known of a sweep. Raises Refused for one that is spoiled."""
    from launcher.runs.sweep import read_sweep

    record = read_sweep(sweep)
    if record is None:
        raise Refused([Problem(where=str(sweep.record), message="it is damaged, or of another version")])
    return record


def list_points(sweep: SweepDir, *, as_json: bool, show_all: bool = False) -> None:
    """`launch ls SWEEP`, `launch status SWEEP`."""
    from launcher.runs.sweep_table import table_text

    table = look(sweep, record_of(sweep))
    if as_json:
        print(json.dumps(table_fields(table, sweep), ensure_ascii=False))
    else:
        print(table_text(table, limit=None if show_all else _SHOWN))


def table_fields(table: SweepTable, sweep: SweepDir) -> dict[str, Any]:
    """What `launch ls SWEEP --json` says: the points, the best first."""
    return {
        "sweep_id": table.sweep_id,
        "run_dir": str(sweep.path),
        "states": table.counts,
        "keys": list(table.keys),
        "metric": table.metric,
        "points": [asdict(row) for row in table.best_first()],
    }


def report_sweep(sweep: SweepDir, *, as_json: bool) -> None:
    """`launch report SWEEP`."""
    from launcher.runs.load import read_result
    from launcher.runs.sweep_table import failures, report_text

    table = look(sweep, record_of(sweep))
    if as_json:
        groups = {why: [row.index for row in rows] for why, rows in failures(table).items()}
        print(json.dumps({**table_fields(table, sweep), "failures": groups}, ensure_ascii=False))
        return

    def message(row: PointRow) -> str:
        first = ((read_result(sweep.point(row.index)) or {}).get("first_failure")) or {}
        return " ".join(str(first.get("message") or "").split())[:200]

    print(report_text(table, message))


def sweep_row(run: RunDir) -> dict[str, Any]:
    """What `launch ls` says of a sweep, in one line."""
    from launcher.runs.sweep import SweepDir, read_sweep
    from launcher.runs.sweep_table import counts_text, quick_counts

    sweep = SweepDir(run.path)
    record = read_sweep(sweep)
    if record is None:
        return {"state": "GONE", "why": f"damaged: {sweep.record}"}
    counts = quick_counts(sweep, record)
    why = f"{count(record.points, 'point')}: {counts_text(counts)}"
    return {"state": "SWEEP", "points": record.points, "states": counts, "why": why}


# ---------------------------------------------------------------- stop


def cancel_sweep(sweep: SweepDir) -> int:
    """`launch cancel SWEEP`: what waits leaves the queue, what runs saves and ends. A second time: at once."""
    from launcher.cli.runs import who
    from launcher.executors.base import JobRef, get_executor
    from launcher.runs.create import record_event
    from launcher.runs.events import read_events
    from launcher.runs.sweep import submissions

    record = record_of(sweep)
    events = read_events(sweep.path)
    made = submissions(events)
    before = look(sweep, record)
    alive = [row for row in before.rows if row.goes_on]
    newest_s = max((row.submitted_s for row in alive), default=0.0)
    again = any(event["event"] == "cancel_requested" and event["time"] > newest_s for event in events)
    if not alive:
        print(f"{sweep.sweep_id} has ended already: {_counts(before)}")
        return 0
    record_event(sweep.run, "cancel_requested", **who())
    arrays = [each.ref.partition(":")[2] for each in made if each.is_array]
    if arrays:
        from launcher.executors.slurm_jobs import cancel_waiting

        cancel_waiting(arrays)
    queues = [JobRef.parse(each.ref) for each in made if not each.is_array]
    for queue in queues:
        get_executor(queue.executor).cancel(queue, signum=signal.SIGTERM, again=again)
    for row in alive:
        if row.started and row.ref is not None:
            record_event(sweep.point(row.index), "cancel_requested", **who())
            job = JobRef.parse(row.ref)
            if not queues:  # a queue passes it on
                get_executor(job.executor).cancel(job, signum=signal.SIGTERM, again=again)
    what = "ending it at once" if again else "stopping (launch cancel again to end it at once)"
    print(f"{sweep.sweep_id}: {what}", flush=True)
    return _wait_for_end(sweep, record)


def _wait_for_end(sweep: SweepDir, record: SweepRecord) -> int:
    from launcher.sweeps import base_plan

    deadline_s = time.monotonic() + base_plan(sweep).limits.grace_s + _LEAVE_S
    pause_s = 0.2 if record.executor == "local" else _LOOK_S / 2
    while True:
        table = look(sweep, record)
        if not any(row.goes_on for row in table.rows):
            print(f"{sweep.sweep_id}: {_counts(table)}")
            return 0
        if time.monotonic() > deadline_s:
            indices = ranges(row.index for row in table.rows if row.goes_on)
            print(f"{sweep.sweep_id}: still there: points {indices}; `launch cancel` again ends them at once")
            return 1
        time.sleep(pause_s)


def _counts(table: SweepTable) -> str:
    from launcher.runs.sweep_table import counts_text

    return counts_text(table.counts)


# ---------------------------------------------------------------- go on


def resume_sweep(sweep: SweepDir, options: LaunchOptions, choice: str | None = None) -> int:
    """`launch resume SWEEP`: the points that have failed, were stopped or have not begun run; the others stay."""
    from launcher.cli.resume import code_text
    from launcher.runs.create import claimed
    from launcher.runs.sweep_table import DONE
    from launcher.sweeps import resume_points

    record = record_of(sweep)
    with claimed(sweep.run, by=sweep.record):
        table = look(sweep, record)
        unknown = [row for row in table.rows if row.state == "UNKNOWN"]
        if unknown:
            message = f"points {ranges(row.index for row in unknown)} may still be alive: {unknown[0].why}"
            raise Refused([Problem(where=sweep.sweep_id, message=message)])
        todo = [row for row in table.rows if not row.goes_on and row.state != DONE]
        if not todo:
            print(f"{sweep.sweep_id}: nothing to resume: {_counts(table)}")
            return 0
        with SignalInbox() as inbox:
            code = resume_points(sweep, record, [(row.index, row.started) for row in todo], choice)
            if choice is not None:
                print(code_text(sweep.run, code), file=sys.stderr, flush=True)
            if record.executor == "slurm":
                return _submitted(sweep, record, inbox, options, where=f"{count(len(todo), 'point')} again")
            return _run_here(sweep, record, [row.index for row in todo], inbox, options)
