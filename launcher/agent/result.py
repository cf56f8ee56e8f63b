"""result.json: how a run ended, gathered from the events once it has."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher import redact
from launcher.agent.causes import Failure
from launcher.agent.effects import Finish
from launcher.agent.newest import find_newest
from launcher.planning.plan import Plan
from launcher.runs.events import Event, read_events
from launcher.runs.ledger import devices_of, goodput, ledger, ledger_fields, total_parts
from launcher.runs.rundir import RunDir
from launcher.runs.steps import newest_step, noted_checkpoints


def write_result(
    run: RunDir, plan: Plan, finish: Finish, *, attempt: int, restarts: int, first: Failure | None
) -> None:
    """Write result.json, complete or not at all."""
    events = read_events(run.path)
    newest = newest_checkpoint(run, plan)
    result = make_result(
        plan,
        finish,
        events,
        attempt=attempt,
        restarts=restarts,
        first=first,
        step=newest_step(run, attempt),
        newest=None if newest is None else str(newest.relative_to(run.path) if run.path in newest.parents else newest),
    )
    unfinished = run.result.with_suffix(".tmp")
    with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(redact.own().text(json.dumps(result, indent=1, ensure_ascii=False)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(run.result)


def newest_checkpoint(run: RunDir, plan: Plan) -> Path | None:
    """The newest checkpoint that is there: of a script, what its recipe's `resume:` or our folder shows."""
    if plan.worker.adapter is not None:
        return next(reversed(noted_checkpoints(run).values()), None)
    pattern = plan.worker.resume_newest or str(run.checkpoints / ("step-*" if plan.worker.kind == "job" else "*"))
    found = find_newest(pattern)
    return None if found is None else Path(found)


def _step(known: int | None, saved: list[Event], attempt: int) -> int | None:
    """The last step, without a word of the workers at the end. What a survivor saved may be ahead of what it told."""
    if known is None:
        return saved[-1]["step"] if saved else None
    return max([known, *(int(event["step"]) for event in saved if event.get("attempt") == attempt)])


def make_result(
    plan: Plan,
    finish: Finish,
    events: list[Event],
    *,
    attempt: int,
    restarts: int,
    first: Failure | None,
    step: int | None = None,
    newest: str | None = None,
) -> dict[str, Any]:
    """The content of result.json. `step`: the last that this attempt is known to have done; `newest`: a checkpoint.

    Pure.
    """
    summary = _last(events, "summary")
    if summary.get("attempt") != attempt:
        summary = {"metrics": summary.get("metrics", {})}
    saved = [event for event in events if event["event"] == "checkpoint_saved"]
    entries = ledger(events)
    parts = total_parts(entries)
    return {
        "state": finish.state.value,
        "cause": finish.cause.value,
        "exit_code": finish.exit_code,
        "reason": finish.reason,
        "first_failure": _failure(first, events) if finish.exit_code and first is not None else None,
        "policy": finish.policy,
        "step": summary.get("step", _step(step, saved, attempt)),
        "total_steps": _last(events, "training_started").get("total_steps"),
        "samples_seen": summary.get("samples_seen"),
        "steps_left_out": summary.get("steps_left_out"),
        "steps_skipped": summary.get("steps_skipped"),
        "world_size": summary.get("world_size", plan.world_size),
        "metrics": summary.get("metrics", {}),
        "weights_sha256": summary.get("weights_sha256"),
        "attempts": attempt,
        "restarts": restarts,
        "samples_per_s": summary.get("samples_per_s"),
        "input": summary.get("input"),
        "memory": summary.get("memory"),
        "compiled": summary.get("compiled"),
        "time": {f"{part}_s": time_s for part, time_s in parts.items()},
        "goodput": goodput(parts),
        "ledger": ledger_fields(entries, devices_of(plan)),
        "checkpoint": {
            "latest": saved[-1]["step"] if saved else None,
            "best": next((event["step"] for event in reversed(saved) if event.get("best")), None),
            "verified": summary.get("checkpoint_verified"),
            "path": newest,
        },
        "stop_reason": _last(events, "stop_requested").get("reason"),
    }


def _failure(first: Failure, events: list[Event]) -> dict[str, Any]:
    same = ("attempt", "node", "rank", "pid")
    seen = (event for event in events if event["event"] == "failure")
    recorded = next((event for event in seen if all(event.get(key) == getattr(first, key) for key in same)), {})
    fields = {**asdict(first), "cause": first.cause.value, "time": recorded.get("time")}
    return {name: value for name, value in fields.items() if name not in ("pid", "kept")}


def _last(events: list[Event], name: str) -> Event:
    return next((event for event in reversed(events) if event["event"] == name), {})
