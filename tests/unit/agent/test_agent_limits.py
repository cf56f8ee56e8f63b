"""What is left of `limits:`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import runs_values
from agent_values import slurm_plan

from launcher.agent.limits import limit_of, worked_s
from launcher.planning.plan import Plan
from launcher.runs.events import Event


def limited(plan: Plan, **limits: Any) -> Plan:
    return dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, **limits))


def attempt(number: int, begin_s: float, end_s: float) -> list[Event]:
    return [
        {"event": "attempt_started", "attempt": number, "time": begin_s},
        {"event": "worker_ended", "attempt": number, "time": end_s},
    ]


TWO = [*attempt(1, 100.0, 130.0), *attempt(2, 500.0, 570.0)]


def test_time_with_workers_counts_and_nothing_else() -> None:
    assert worked_s(TWO) == 100.0
    assert worked_s([]) == 0.0


def test_a_run_without_limits_has_none(tmp_path: Path) -> None:
    assert limit_of(runs_values.plan(tmp_path), TWO, now_s=5.0, time_s=0.0) is None


@pytest.mark.parametrize(
    ("limits", "at_s", "reason"),
    [
        ({"wall_s": 7200.0}, 7105.0, "limits.wall: 2 h of 2 h are used"),
        ({"wall_s": 90.0}, -5.0, "limits.wall: 90 s of 90 s are used"),
        ({"wall_s": 600.0}, 505.0, "limits.wall: 10 min of 10 min are used"),
        ({"until_s": 1000.0}, 105.0, "limits.until: the moment has come"),
        ({"wall_s": 7200.0, "until_s": 1000.0}, 105.0, "limits.until: the moment has come"),
        ({"gpu_hours": 0.5}, None, ""),
    ],
)
def test_the_first_limit_ends_it(tmp_path: Path, limits: dict[str, float], at_s: float | None, reason: str) -> None:
    plan = limited(runs_values.plan(tmp_path), **limits)
    limit = limit_of(plan, TWO, now_s=5.0, time_s=900.0)
    assert (None if limit is None else limit.at_s, "" if limit is None else limit.reason) == (at_s, reason)


def test_gpu_hours_count_every_gpu_of_the_job(tmp_path: Path) -> None:
    plan = limited(slurm_plan(tmp_path, device="cuda", gpus_per_node=4), gpu_hours=1.0)
    limit = limit_of(plan, TWO, now_s=0.0, time_s=0.0)
    assert limit is not None
    assert limit.at_s == 3600 / 8 - 100
    assert limit.reason == "limits.gpu_hours: 1 of 1 are used"


def test_gpu_hours_are_those_of_the_nodes_that_took_part(tmp_path: Path) -> None:
    """One of two nodes was there in the first attempt, and is from now on."""
    plan = limited(slurm_plan(tmp_path, device="cuda", gpus_per_node=4), gpu_hours=1.0)
    events = [{**event, "nodes": event["attempt"]} if "started" in event["event"] else event for event in TWO]
    limit = limit_of(plan, events, now_s=0.0, time_s=0.0, nodes=1)
    assert limit is not None
    assert limit.at_s == (3600 - 4 * 30 - 8 * 70) / 4
