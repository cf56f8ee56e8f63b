"""Commands about runs: ls, status, cancel, path."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from launcher.executors.base import observe_job
from launcher.runs.observed import GONE
from launcher.wording import first_line, shortened

if TYPE_CHECKING:
    from launcher.executors.base import Executor, JobRef
    from launcher.runs.find import Pointer
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir

_LS_SHOWN = 20
_MESSAGE_WIDTH = 120
_POLL_S = 0.05
_LEAVE_S = 15.0
"""How long after its grace a run may take to be gone before `cancel` says so."""


@click.command()
@click.option("--all", "show_all", is_flag=True, help=f"Every run, not only the newest {_LS_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with all that is shown.")
def ls(show_all: bool, as_json: bool) -> None:
    """Runs, newest first."""
    from launcher.runs.find import all_runs

    pointers = all_runs()
    shown = pointers if show_all else pointers[:_LS_SHOWN]
    rows = [_row(pointer) for pointer in shown]
    if as_json:
        print(json.dumps({"runs": rows, "total": len(pointers)}, ensure_ascii=False))
        return
    print(table(rows, now_s=time.time()))
    if len(shown) < len(pointers):
        print(f"... and {len(pointers) - len(shown)} older: launch ls --all")


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(run: str, as_json: bool) -> None:
    """State, nodes, workers, attempts and cause of RUN."""
    from launcher.runs.find import find_run
    from launcher.runs.load import read_record

    found = find_run(run)
    record = read_record(found, observe_job)
    print(json.dumps(status_fields(record, found), ensure_ascii=False) if as_json else status_text(record, found))


@click.command()
@click.argument("run", metavar="RUN")
def cancel(run: str) -> int:
    """Stop RUN: it saves a checkpoint and ends. Twice: it ends at once."""
    import signal

    from launcher.executors.base import JobRef, get_executor
    from launcher.runs.create import record_event
    from launcher.runs.find import find_run
    from launcher.runs.load import read_plan, read_record

    found = find_run(run)
    record = read_record(found, observe_job)
    if record.state.is_final:
        print(f"{found.run_id} has ended already: {record.state}")
        return 0
    ref = JobRef.parse(reachable(record))
    executor = get_executor(ref.executor)
    record_event(found, "cancel_requested", **_who())
    executor.cancel(ref, signum=signal.SIGTERM)
    print(f"{found.run_id}: stopping (launch cancel again to end it at once)", flush=True)
    if not wait_until_gone(executor, ref, limit_s=read_plan(found).limits.grace_s + _LEAVE_S):
        print(f"{found.run_id} is still there; `launch cancel {run}` ends it at once")
        return 1
    record = read_record(found, lambda _: GONE)
    print(f"{found.run_id} {record.state}" + (f": {record.sentence}" if record.sentence else ""))
    return 0


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--checkpoint", metavar="N|best|latest", help="A checkpoint: its step, `best` or `latest`.")
def path(run: str, checkpoint: str | None) -> None:
    """Directory of RUN, or of one of its checkpoints."""
    from launcher.runs.checkpoints import find_checkpoint
    from launcher.runs.find import find_run

    found = find_run(run)
    print(found.path if checkpoint is None else find_checkpoint(found, checkpoint))


def reachable(record: RunRecord) -> str:
    """The job of a run that is not over, as a printed reference. Raises Refused where it is out of reach."""
    import socket

    from launcher.errors import Problem, Refused

    if record.ref is None:
        raise Refused([Problem(where=record.run_id, message="it was never submitted; there is nothing to stop")])
    if observe_job(record.ref).alive is None:
        message = f"it runs on {record.host}, and this is {socket.gethostname()}"
        hint = f"on {record.host}: launch cancel {record.run_id}"
        raise Refused([Problem(where=record.run_id, message=message, hint=hint)])
    return record.ref


def wait_until_gone(executor: Executor, ref: JobRef, *, limit_s: float) -> bool:
    """Wait for the end of a job, at most this long. False: it is still there."""
    deadline_s = time.monotonic() + limit_s
    while executor.observe(ref).alive is not False:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def table(rows: Sequence[Mapping[str, Any]], *, now_s: float) -> str:
    """The runs as aligned columns."""
    if not rows:
        return "no runs yet"
    head = ("RUN", "STATE", "AGE", "STEP", "WHY")
    lines = [head, *(_cells(row, now_s) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def status_fields(record: RunRecord, run: RunDir) -> dict[str, Any]:
    """What `launch status --json` says."""
    from dataclasses import asdict

    fields = asdict(record)
    return {"run_id": fields.pop("run_id"), "run_dir": str(run.path), "is_final": record.state.is_final, **fields}


def status_text(record: RunRecord, run: RunDir) -> str:
    """What `launch status` says."""
    from launcher.runs.states import RunState

    lines = [
        f"{record.run_id}  {record.state}" + (f": {record.sentence}" if record.sentence else ""),
        *_reached(record),
        f"  attempts  {record.attempts}   restarts {record.restarts}"
        + ("" if record.exit_code is None else f"   exit {record.exit_code}"),
        *(f"  node {node['node']}    {node['state']}   {node['host']}   agent {node['pid']}" for node in record.nodes),
        *(
            f"  rank {worker['rank']}    node {worker['node']}   pid {worker['pid']}   attempt {worker['attempt']}"
            for worker in record.workers
        ),
        *(f"  failure   {_failure(event)}" for event in record.failures if not _asked_to_end(event, record)),
        *([f"  why       {record.reason}"] if record.state is RunState.FAILED and record.reason else []),
        f"  run       {run.path}",
        *_uploaded(record.tracking or {}),
    ]
    return "\n".join(lines)


def _reached(record: RunRecord) -> list[str]:
    """How far the training is; nothing for a script, which does not say it."""
    evaluation = {name: value for name, value in (record.metrics or {}).items() if name.startswith("eval/")}
    saved = [event.get("step") for event in record.checkpoints]
    lines = {
        "step": _step(record.step, record.total_steps),
        "metrics": "   ".join(f"{name} {value:.3g}" for name, value in sorted(evaluation.items())),
        "saved": f"step-{saved[-1]}" if saved else "",
    }
    return [f"  {name:<8}  {text}" for name, text in lines.items() if text]


def _uploaded(tracking: Mapping[str, Any]) -> list[str]:
    wandb = tracking.get("wandb") or {}
    where = wandb.get("url") or wandb.get("sync")
    return [f"  W&B       {wandb.get('mode')}: {where}"] if where else []


def _failure(event: Mapping[str, Any]) -> str:
    return (
        f"attempt {event.get('attempt')}   rank {event.get('rank')} on node {event.get('node')}   "
        f"{event.get('cause')}   {shortened(first_line(event.get('message')), _MESSAGE_WIDTH)}"
    ).rstrip()


def _asked_to_end(event: Mapping[str, Any], record: RunRecord) -> bool:
    """A worker that knows nothing of stops: TERM ends it, as it was meant to."""
    by_term = event.get("message") == "killed by SIGTERM" and event.get("attempt") == record.attempts
    return by_term and record.stop_reason is not None


def _row(pointer: Pointer) -> dict[str, Any]:
    from launcher.runs.load import read_record

    row: dict[str, Any] = {"run_id": pointer.run_id, "created_s": pointer.created_s, "run_dir": str(pointer.run.path)}
    if pointer.gone:
        return {**row, "state": "GONE", "why": f"moved or deleted: {pointer.run.path}"}
    record = read_record(pointer.run, observe_job)
    kept = {"state": record.state.value, "step": record.step, "total_steps": record.total_steps}
    return {**row, **kept, "exit_code": record.exit_code, "why": record.sentence}


def _cells(row: Mapping[str, Any], now_s: float) -> tuple[str, ...]:
    step = _step(row.get("step"), row.get("total_steps"))
    return (row["run_id"], row["state"], _age(now_s - row["created_s"]), step, row["why"])


def _step(step: int | None, total: int | None) -> str:
    if step is None:
        return ""
    return f"{step}/{total}" if total else str(step)


def _age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s // length_s:.0f}{unit}"
    return f"{max(0.0, age_s):.0f}s"


def _who() -> dict[str, str]:
    import pwd
    import socket

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number that has no name
        user = str(os.getuid())
    return {"host": socket.gethostname(), "user": user}
