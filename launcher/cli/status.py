"""`launch status RUN...`: where one run stands, in full, or many, as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from launcher.wording import first_line, short_duration, short_hosts, shortened, step_text

if TYPE_CHECKING:
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir

_MESSAGE_WIDTH = 120
_NODES_SHOWN = 8
_ALLOCATIONS_SHOWN = 6
_RANKS_SHOWN = 16
_FAILURES_SHOWN = 8
_EXPECTED_S = 100 * 86400


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Every node and every rank.")
def status(runs: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """State, nodes, workers, attempts and cause of RUN.

    Of several, or of a pattern such as 'mnist-*', a table: all are asked for in one question to their place.
    """
    from launcher.cli.runs import row_of, table
    from launcher.executors.base import observe_jobs
    from launcher.runs.find import find_runs, find_sweep
    from launcher.runs.load import read_records

    if len(runs) == 1 and (sweep := find_sweep(runs[0])) is not None:
        from launcher.cli.sweep import list_points

        list_points(sweep, as_json=as_json, show_all=verbose)
        return
    found = find_runs(runs)
    records = read_records(found, observe_jobs)
    alone = len(found) == 1
    if as_json:
        fields = [status_fields(record, run) for record, run in zip(records, found, strict=True)]
        print(json.dumps(fields[0] if alone else {"runs": fields}, ensure_ascii=False))
    elif alone:
        print(status_text(records[0], found[0], now_s=time.time(), verbose=verbose))
    else:
        print(table([row_of(record, run) for record, run in zip(records, found, strict=True)], now_s=time.time()))


def status_fields(record: RunRecord, run: RunDir) -> dict[str, Any]:
    """What `launch status --json` says."""
    from dataclasses import asdict

    fields = asdict(record)
    return {
        "run_id": fields.pop("run_id"),
        "run_dir": str(run.path),
        "is_final": record.state.is_final,
        **fields,
        "queue": queue_fields(record),
        "ends_s": limit_s(record),
        "devices": device_fields(record, run),
    }


def device_fields(record: RunRecord, run: RunDir) -> dict[str, Any]:
    """The newest measurement of each node, by its index; of a run that goes on."""
    if record.state.is_final:
        return {}
    from launcher.runs.devices import measured_nodes, newest_of

    return {str(node): newest_of(path) for node, path in measured_nodes(run).items()}


def queue_fields(record: RunRecord) -> dict[str, Any] | None:
    """What the scheduler says, with its reason in words; None where there is no scheduler, or it was not asked."""
    from launcher.runs.queue import waiting_for

    seen = record.queue
    if seen is None:
        return None
    waiting = waiting_for(seen.reason)
    return {
        "state": seen.state,
        "reason": seen.reason,
        "meaning": waiting.meaning if waiting else "",
        "hint": waiting.todo if waiting else "",
        "starts_s": seen.starts_s,
        "ends_s": seen.ends_s,
        "nodes": seen.nodes,
        "detail": seen.detail,
    }


def limit_s(record: RunRecord) -> float | None:
    """When the time limit ends the present allocation, in seconds since the epoch."""
    if record.state.is_final or record.queue is None or record.queue.state != "RUNNING":
        return None
    if record.queue.ends_s is not None:
        return record.queue.ends_s
    return record.allocations[-1]["limit_s"] if record.allocations else None


def status_text(record: RunRecord, run: RunDir, *, now_s: float, verbose: bool = False) -> str:
    """What `launch status` says."""
    from launcher.runs.states import RunState

    lines = [
        f"{record.run_id}  {record.state}" + (f": {record.sentence}" if record.sentence else ""),
        *_scheduled(record, now_s),
        *_reached(record),
        f"  attempts  {record.attempts}   restarts {record.restarts}"
        + ("" if record.exit_code is None else f"   exit {record.exit_code}"),
        *_newest(allocation_lines(record, now_s), None if verbose else _ALLOCATIONS_SHOWN),
        *_cut(
            [f"  node {node['node']}    {node['state']}   {node['host']}{_agent(node)}" for node in record.nodes],
            None if verbose else _NODES_SHOWN,
            "nodes",
        ),
        *_cut(
            [
                f"  rank {worker['rank']}    node {worker['node']}   pid {worker['pid']}   attempt {worker['attempt']}"
                for worker in record.workers
            ],
            None if verbose else _RANKS_SHOWN,
            "ranks",
        ),
        *_measured(record, run, now_s, None if verbose else _NODES_SHOWN),
        *_standing(record),
        *_cut(
            [f"  failure   {_failure(event)}" for event in record.failures if not _asked_to_end(event, record)],
            None if verbose else _FAILURES_SHOWN,
            "failures",
        ),
        *([f"  why       {record.reason}"] if record.state is RunState.FAILED and record.reason else []),
        f"  run       {run.path}",
        *_uploaded(record.tracking or {}),
    ]
    return "\n".join(lines)


def _scheduled(record: RunRecord, now_s: float) -> list[str]:
    """The job, why it waits and until when, or how long it may go on."""
    from launcher.runs.queue import reason_text, waiting_for

    if record.queue is None or record.state.is_final:
        return []
    seen, job = record.queue, (record.ref or "").partition(":")[2]
    lines = [f"  job       {job}   {seen.state}   {seen.nodes}".rstrip()]
    if seen.waits:
        waiting = waiting_for(seen.reason)
        lines += [f"  waits     {reason_text(seen.reason)}"] if seen.reason else []
        lines += [f"            hint: {waiting.todo}"] if waiting and waiting.todo else []
        lines += [f"  starts    {starts}"] if (starts := expected_start(seen.starts_s, now_s)) else []
    ends_s = limit_s(record)
    return [*lines, *([f"  time left {short_duration(max(0.0, ends_s - now_s))}"] if ends_s is not None else [])]


def expected_start(starts_s: float | None, now_s: float) -> str:
    """`expected 14:05`, with the day where it is another one; empty where nobody knows, or it has passed."""
    from datetime import datetime

    # Behind a job without a limit SLURM expects it in a year.
    if starts_s is None or not 0 <= starts_s - now_s < _EXPECTED_S:
        return ""
    starts, now = (datetime.fromtimestamp(moment).astimezone() for moment in (starts_s, now_s))
    return f"expected {starts:%H:%M}" + ("" if starts.date() == now.date() else f" on {starts:%Y-%m-%d}")


def allocation_lines(record: RunRecord, now_s: float) -> list[str]:
    """One line per allocation: its job, its nodes, how long, and what ended it."""
    lines = []
    for each in record.allocations:
        goes_on = each is record.allocations[-1] and each["ended_s"] is None and not record.state.is_final
        ended_s = now_s if goes_on else each["ended_s"]
        length = "" if ended_s is None else short_duration(max(0.0, ended_s - each["started_s"]))
        last = each is record.allocations[-1] and record.state.is_final
        why = each["sentence"] or (record.sentence if last else "" if goes_on else "its end is not known")
        step = "" if each["step"] is None else f"step {each['step']:,}" + (" saved" if each["saved"] else "")
        parts = [f"job {each['job']}", short_hosts(each["nodes"]), length, why, step]
        lines.append(f"  alloc {each['allocation']:<4}" + "   ".join(filter(None, parts)))
    return lines


def _agent(node: Mapping[str, Any]) -> str:
    return "" if node["pid"] is None else f"   agent {node['pid']}"


def _cut(lines: list[str], shown: int | None, what: str) -> list[str]:
    """The first lines, and how many more there are."""
    if shown is None or len(lines) <= shown:
        return lines
    return [*lines[:shown], f"  ... and {len(lines) - shown} more {what}: launch status -v"]


def _newest(lines: list[str], shown: int | None) -> list[str]:
    """The last lines, and how many are before them."""
    if shown is None or len(lines) <= shown:
        return lines
    return [f"  ... {len(lines) - shown} earlier allocations: launch status -v", *lines[-shown:]]


def _reached(record: RunRecord) -> list[str]:
    """How far the training is; nothing for a script, which does not say it."""
    evaluation = {name: value for name, value in (record.metrics or {}).items() if name.startswith("eval/")}
    saved = [event.get("step") for event in record.checkpoints]
    lines = {
        "step": step_text(record.step, record.total_steps),
        "metrics": "   ".join(f"{name} {value:.3g}" for name, value in sorted(evaluation.items())),
        "saved": f"step-{saved[-1]}" if saved else "",
    }
    return [f"  {name:<8}  {text}" for name, text in lines.items() if text]


def _measured(record: RunRecord, run: RunDir, now_s: float, shown: int | None) -> list[str]:
    """What the devices of each node do, of a run that goes on."""
    if record.state.is_final:
        return []
    from launcher.runs.devices import measured_nodes, newest_of
    from launcher.runs.devices_text import now_text

    newest = [(node, newest_of(path)) for node, path in list(measured_nodes(run).items())[:shown]]
    return [f"  use {node}     {now_text(found, now_s=now_s)}" for node, found in newest if found is not None]


def _standing(record: RunRecord) -> list[str]:
    """That it does not get on, and for whom it waits at every step."""
    from launcher.runs.stalls import straggler_text

    hangs = [] if record.hang is None else [f"  hangs     {record.hang.get('message')}"]
    return hangs + [f"  straggler {straggler_text(event)}" for event in record.stragglers]


def _uploaded(tracking: Mapping[str, Any]) -> list[str]:
    wandb = tracking.get("wandb") or {}
    where = wandb.get("url") or wandb.get("sync")
    return [f"  W&B       {wandb.get('mode')}: {where}"] if where else []


def _failure(event: Mapping[str, Any]) -> str:
    node = f"node {event.get('node')}" + (f" ({event['host']})" if event.get("host") else "")
    rank = event.get("rank")
    who = f"rank {rank} on {node}" if isinstance(rank, int) and rank >= 0 else node
    message = shortened(first_line(event.get("message")), _MESSAGE_WIDTH)
    return f"attempt {event.get('attempt')}   {who}   {event.get('cause')}   {message}".rstrip()


def _asked_to_end(event: Mapping[str, Any], record: RunRecord) -> bool:
    """A worker that knows nothing of stops: TERM ends it, as it was meant to."""
    by_term = event.get("message") == "killed by SIGTERM" and event.get("attempt") == record.attempts
    return by_term and record.stop_reason is not None
