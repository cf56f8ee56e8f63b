"""Commands about runs: ls, cancel, path."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from launcher.executors.base import observe_job
from launcher.runs.observed import GONE
from launcher.wording import aligned, step_text

if TYPE_CHECKING:
    from launcher.executors.base import JobRef
    from launcher.runs.find import Pointer
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir

_LS_SHOWN = 20
_POLL_S = 0.05
_POLL_FAR_S = 0.5
"""For the files of a run on a cluster; its scheduler is asked less often."""
_LEAVE_S = 15.0
"""How long after its grace a run may take to be gone before `cancel` says so."""


@click.command()
@click.argument("sweep", metavar="[SWEEP]", required=False)
@click.option("--all", "show_all", is_flag=True, help=f"Every run, not only the newest {_LS_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with all that is shown.")
def ls(sweep: str | None, show_all: bool, as_json: bool) -> None:
    """Runs, newest first; or the points of SWEEP, the best first."""
    from launcher.runs.find import all_runs, find_sweep

    if sweep is not None:
        from launcher.cli.sweep import list_points

        found = find_sweep(sweep)
        if found is None:
            raise click.UsageError(f"{sweep} is no sweep of yours; `launch ls` lists what there is")
        list_points(found, as_json=as_json, show_all=show_all)
        return
    pointers = [pointer for pointer in all_runs() if not pointer.is_point]
    shown = pointers if show_all else pointers[:_LS_SHOWN]
    rows = rows_of(shown)
    if as_json:
        print(json.dumps({"runs": rows, "total": len(pointers)}, ensure_ascii=False))
        return
    print(table(rows, now_s=time.time()))
    if len(shown) < len(pointers):
        print(f"... and {len(pointers) - len(shown)} older: launch ls --all")


@click.command()
@click.argument("run", metavar="RUN")
def cancel(run: str) -> int:
    """Stop RUN: it saves a checkpoint and ends. Twice: it ends at once."""
    import signal

    from launcher.executors.base import JobRef, get_executor
    from launcher.runs.create import record_event
    from launcher.runs.find import find_run, find_sweep
    from launcher.runs.load import read_plan, read_record

    if (sweep := find_sweep(run)) is not None:
        from launcher.cli.sweep import cancel_sweep

        return cancel_sweep(sweep)
    found = find_run(run)
    record = read_record(found, observe_job)
    if record.state.is_final:
        print(f"{found.run_id} has ended already: {record.state}")
        return 0
    jobs = [JobRef.parse(ref) for ref in reachable(record)]
    record_event(found, "cancel_requested", **who())
    # Of a chain the newest first: none that waits may begin because the one before it has ended.
    for job in reversed(jobs):
        get_executor(job.executor).cancel(job, signum=signal.SIGTERM, again=record.is_cancelled)
    print(f"{found.run_id}: {_how_stopped(record)}")
    sys.stdout.flush()
    limit_s = read_plan(found).limits.grace_s + _LEAVE_S
    gone = wait_until_over(found, limit_s) if record.is_far else wait_until_gone(jobs[0], limit_s=limit_s)
    if not gone:
        print(f"{found.run_id} is still there; `launch cancel {run}` ends it at once")
        return 1
    record = read_record(found, observe_job if record.is_far else lambda _: GONE)
    print(f"{found.run_id} {record.state}" + (f": {record.sentence}" if record.sentence else ""))
    return 0


def _how_stopped(record: RunRecord) -> str:
    if record.on_slurm and record.queue is not None and record.queue.waits:
        return "its job leaves the queue"
    if record.on_slurm and record.is_cancelled:
        return "ending it at once"
    return "stopping (launch cancel again to end it at once)"


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--checkpoint", metavar="N|best|latest", help="A checkpoint: its step, `best` or `latest`.")
def path(run: str, checkpoint: str | None) -> None:
    """Directory of RUN, or of one of its checkpoints."""
    from launcher.runs.checkpoints import find_checkpoint
    from launcher.runs.find import find_run

    found = find_run(run)
    print(found.path if checkpoint is None else find_checkpoint(found, checkpoint))


def reachable(record: RunRecord) -> tuple[str, ...]:
    """The jobs of a run that is not over, as printed references. Raises Refused where they are out of reach."""
    import socket

    from launcher.errors import Problem, Refused
    from launcher.runs.states import RunState

    if record.ref is None:
        raise Refused([Problem(where=record.run_id, message="it was never submitted; there is nothing to stop")])
    if record.state is RunState.UNKNOWN and record.is_far:
        raise Refused([Problem(where=record.run_id, message=f"its job cannot be reached: {record.sentence}")])
    if record.state is RunState.UNKNOWN:
        message = f"it runs on {record.host}, and this is {socket.gethostname()}"
        hint = f"on {record.host}: launch cancel {record.run_id}"
        raise Refused([Problem(where=record.run_id, message=message, hint=hint)])
    return record.jobs


def wait_until_gone(job: JobRef, *, limit_s: float) -> bool:
    """Wait for the end of a job, at most this long. False: it is still there."""
    from launcher.executors.base import get_executor

    executor, deadline_s = get_executor(job.executor), time.monotonic() + limit_s
    while executor.observe(job).alive is not False:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def wait_until_over(run: RunDir, limit_s: float) -> bool:
    """Wait until a run on a cluster is over, by its files or by its scheduler, at most this long."""
    from launcher.executors.base import Watcher
    from launcher.runs.load import read_record

    watcher, deadline_s = Watcher(), time.monotonic() + limit_s
    while not read_record(run, watcher).state.is_final:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_FAR_S)
    return True


def table(rows: Sequence[Mapping[str, Any]], *, now_s: float) -> str:
    """The runs as aligned columns."""
    if not rows:
        return "no runs yet"
    head = ("RUN", "STATE", "AGE", "STEP", "WHY")
    lines = [head, *(_cells(row, now_s) for row in rows)]
    return "\n".join(aligned(lines))


def rows_of(pointers: Sequence[Pointer]) -> list[dict[str, Any]]:
    """What `launch ls` shows of these runs. The jobs of all are asked for at once."""
    from launcher.executors.base import observe_jobs
    from launcher.recipe.paths import is_file
    from launcher.runs.load import read_ended, read_records

    rows: list[dict[str, Any]] = []
    open_ones: list[tuple[dict[str, Any], RunDir]] = []
    for pointer in pointers:
        run = pointer.run
        row: dict[str, Any] = {"run_id": pointer.run_id, "created_s": pointer.created_s, "run_dir": str(run.path)}
        rows.append(row)
        if is_file(run.path / "sweep.json"):
            from launcher.cli.sweep import sweep_row

            row |= sweep_row(run)
        elif not is_file(run.plan):
            row |= {"state": "GONE", "why": f"moved or deleted: {run.path}"}
        elif (ended := read_ended(run)) is not None:
            row |= _told(ended)
        else:
            open_ones.append((row, run))
    records = read_records([run for _, run in open_ones], observe_jobs)
    for (row, _), record in zip(open_ones, records, strict=True):
        row.update(_told(record))
    return rows


def row_of(record: RunRecord, run: RunDir) -> dict[str, Any]:
    """The same of one run, where its record is known."""
    return {
        "run_id": record.run_id,
        "created_s": record.created_s or 0.0,
        "run_dir": str(run.path),
        **_told(record),
    }


def _told(record: RunRecord) -> dict[str, Any]:
    from launcher.cli.status import expected_start

    seen, why = record.queue, record.why
    if seen is not None and seen.waits and not why:
        why = ", ".join(filter(None, [seen.reason, expected_start(seen.starts_s, time.time())]))
    kept = {"state": record.state.value, "step": record.step, "total_steps": record.total_steps}
    return {**kept, "exit_code": record.exit_code, "why": why}


def _cells(row: Mapping[str, Any], now_s: float) -> tuple[str, ...]:
    step = step_text(row.get("step"), row.get("total_steps"))
    return (row["run_id"], row["state"], _age(now_s - row["created_s"]), step, row["why"])


def _age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s // length_s:.0f}{unit}"
    return f"{max(0.0, age_s):.0f}s"


def who() -> dict[str, str]:
    """Who asks, and where."""
    import pwd
    import socket

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number that has no name
        user = str(os.getuid())
    return {"host": socket.gethostname(), "user": user}
