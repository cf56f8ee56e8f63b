"""result.json: how a run ended, gathered from the events once it has."""

from __future__ import annotations

import json
import os
from typing import Any

from launcher import redact
from launcher.agent.causes import Failure
from launcher.agent.effects import Finish
from launcher.planning.plan import Plan
from launcher.runs.events import Event, read_events
from launcher.runs.rundir import RunDir


def write_result(
    run: RunDir, plan: Plan, finish: Finish, *, attempt: int, restarts: int, first: Failure | None
) -> None:
    """Write result.json, complete or not at all."""
    events = read_events(run.path)
    result = make_result(plan, finish, events, attempt=attempt, restarts=restarts, first=first)
    unfinished = run.result.with_suffix(".tmp")
    with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(redact.own().text(json.dumps(result, indent=1, ensure_ascii=False)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(run.result)


def make_result(
    plan: Plan, finish: Finish, events: list[Event], *, attempt: int, restarts: int, first: Failure | None
) -> dict[str, Any]:
    """The content of result.json. Pure."""
    summary = _last(events, "summary")
    if summary.get("attempt") != attempt:
        summary = {"metrics": summary.get("metrics", {})}
    saved = [event for event in events if event["event"] == "checkpoint_saved"]
    return {
        "state": finish.state.value,
        "cause": finish.cause.value,
        "exit_code": finish.exit_code,
        "reason": finish.reason,
        "first_failure": _failure(first, events) if finish.exit_code and first is not None else None,
        "step": summary.get("step", saved[-1]["step"] if saved else None),
        "samples_seen": summary.get("samples_seen"),
        "world_size": plan.world_size,
        "metrics": summary.get("metrics", {}),
        "weights_sha256": summary.get("weights_sha256"),
        "attempts": attempt,
        "restarts": restarts,
        "samples_per_s": summary.get("samples_per_s"),
        "time": _times(events, summary),
        "checkpoint": {
            "latest": saved[-1]["step"] if saved else None,
            "best": next((event["step"] for event in reversed(saved) if event.get("best")), None),
            "verified": summary.get("checkpoint_verified"),
        },
        "stop_reason": _last(events, "stop_requested").get("reason"),
    }


def _failure(first: Failure, events: list[Event]) -> dict[str, Any]:
    recorded = next((e for e in events if e["event"] == "failure" and e["pid"] == first.pid), {})
    return {
        "node": first.node,
        "rank": first.rank,
        "cause": first.cause.value,
        "exit_code": first.exit_code,
        "message": first.message,
        "place": first.place,
        "log": first.log,
        "time": recorded.get("time"),
    }


def _times(events: list[Event], summary: dict[str, Any]) -> dict[str, float]:
    """Seconds; `start_s` from the command to the first step of the newest launch or resume."""
    begin = max((e["time"] for e in events if e["event"] in ("created", "resumed")), default=None)
    end = _last(events, "finished").get("time")
    training = next((e["time"] for e in events if e["event"] == "training_started" and e["time"] >= (begin or 0)), None)
    times = dict(summary.get("times", {}))
    if begin is not None and end is not None:
        times["total_s"] = round(end - begin, 3)
    if begin is not None and training is not None:
        times["start_s"] = round(training - begin, 3)
    return times


def _last(events: list[Event], name: str) -> Event:
    return next((event for event in reversed(events) if event["event"] == name), {})
