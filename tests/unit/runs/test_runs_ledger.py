"""The ledger: the parts of all attempts are the whole time, and what each of them cost. Beside `test_runs_times.py`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_values import plan as make_plan
from test_runs_times import EVENTS, KILLED_ONCE, PREEMPTED, Story, attempt, story, time_parts

from launcher.runs.attempts import ledger_table
from launcher.runs.events import time_of
from launcher.runs.ledger import PARTS, Devices, Entry, devices_of, goodput, ledger, ledger_fields

GPUS = Devices(unit="gpu_hours", per_node=4, nodes=2)


def seconds(entry: Entry) -> dict[str, float]:
    return {name: entry.times[name] / 1000 for name in PARTS if entry.times[name]}


def test_each_attempt_has_what_was_waited_for_it() -> None:
    first, second = ledger(KILLED_ONCE)
    assert (first.attempt, seconds(first)) == (
        1,
        {"start": 4.0, "train": 5.0, "eval": 2.0, "save": 1.0, "lost": 8.0},
    )
    assert (second.attempt, seconds(second)) == (
        2,
        {"train": 11.5, "eval": 1.0, "save": 0.5, "down": 3.0, "end": 1.0},
    )


def test_the_queue_before_each_allocation_is_of_the_attempt_that_waited() -> None:
    first, second = ledger(PREEMPTED)
    assert (seconds(first)["queue"], seconds(first)["start"]) == (10.0, 5.0)
    assert (seconds(second)["queue"], seconds(second)["down"]) == (30.0, 5.0)


def test_device_hours_leave_out_the_queue_and_count_who_took_part() -> None:
    told = [
        {**event, "nodes": 1} if event["event"] == "attempt_started" and event["attempt"] == 2 else event
        for event in PREEMPTED
    ]
    first, second = ledger_fields(ledger(told), GPUS)
    assert (first["devices"], second["devices"]) == (8, 4)
    assert first["gpu_hours"]["total"] == pytest.approx((25 - 10) * 8 / 3600, abs=1e-6)
    assert second["gpu_hours"]["total"] == pytest.approx((46 - 30) * 4 / 3600, abs=1e-6)
    assert first["gpu_hours"]["queue"] == second["gpu_hours"]["queue"] == 0
    assert second["gpu_hours"]["train"] == pytest.approx(10 * 4 / 3600, abs=1e-6)
    lines = ledger_table(ledger(told), GPUS).splitlines()
    assert lines[0].split() == ["seconds", "queue", "start", "train", "save", "down", "end", "total", "GPU", "hours"]
    assert lines[2].split() == ["attempt", "2", "30.0", "0.0", "10.0", "0.0", "5.0", "1.0", "46.0", "0.018"]
    assert lines[3] == "0.051 GPU hours in all, 0.031 of them in steps that counted"


def test_a_run_on_cpu_counts_its_workers(tmp_path: Any) -> None:
    plan = make_plan(tmp_path)
    assert devices_of(plan) == Devices(unit="worker_hours", per_node=plan.nproc_per_node, nodes=len(plan.nodes))


RESCUED = story(
    (0, "created", {}),
    (1, "attempt_started", attempt(1)),
    (2, "training_started", attempt(1, step=0)),
    (5, "checkpoint_saved", attempt(1, step=30, time_s=0.5)),
    (9, "failure", attempt(1, rank=1, step=70)),
    (9.25, "rescued", attempt(1, step=71, node=0, rank=0, time_s=0.2)),
    (9.5, "attempt_ended", attempt(1, rank=1, cause="signal", step=70)),
    (9.5, "attempt_started", attempt(2)),
    (10, "training_started", attempt(2, step=71, resumed_from="step-71")),
    (20, "summary", attempt(2, step=170)),
    (20, "finished", {"state": "SUCCEEDED"}),
)


def test_what_survivors_have_kept_is_not_lost() -> None:
    parts = time_parts(RESCUED)
    assert (parts["lost"], parts["train"], parts["down"]) == (0.0, 6.5 + 10.0, 1.0)
    assert goodput(parts) == round(16.5 / 20, 4)


def test_what_was_rescued_and_could_not_be_used_is_lost() -> None:
    told = [
        {**event, "step": 30} if event["event"] == "training_started" and event["attempt"] == 2 else event
        for event in RESCUED
    ]
    assert time_parts(told)["lost"] == 4.0  # from the saved state of 4.5 to 9, without the save


def test_the_time_before_a_failure_is_noticed_is_down() -> None:
    """A frozen rank: nothing was done from the last step on, which is seen 30 s later."""
    told = story(
        (0, "created", {}),
        (0, "attempt_started", attempt(1)),
        (2, "training_started", attempt(1, step=0)),
        (10, "checkpoint_saved", attempt(1, step=80, time_s=0.0)),
        (45, "hang", attempt(1, step=100, waited_s=30.0, action="restart")),
        (45, "failure", attempt(1, rank=1)),
        (46, "attempt_ended", attempt(1, rank=1, cause="hang")),
        (46, "attempt_started", attempt(2)),
        (47, "training_started", attempt(2, step=80)),
        (50, "summary", attempt(2, step=110)),
        (50, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert (parts["train"], parts["lost"], parts["down"]) == (8.0 + 3.0, 5.0, 32.0)
    reported = [{**event, "action": "report"} if event["event"] == "hang" else event for event in told]
    assert time_parts(reported)["lost"] == 35.0


def test_what_is_written_in_the_background_costs_only_what_was_waited_for_it() -> None:
    told = story(
        (0, "created", {}),
        (0, "attempt_started", attempt(1)),
        (0, "training_started", attempt(1, step=0)),
        (20, "checkpoint_saved", attempt(1, step=100, time_s=8.0, blocked_s=0.5)),
        (21, "memory_saved", attempt(1, step=110, time_s=0.25, size_bytes=1)),
        (30, "failure", attempt(1, rank=0)),
        (30, "attempt_ended", attempt(1, rank=0, cause="signal")),
        (30, "attempt_started", attempt(2)),
        (31, "training_started", attempt(2, step=100)),
        (40, "summary", attempt(2, step=200)),
        (40, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert parts["save"] == 0.75
    assert parts["lost"] == 18.0 - 0.75  # its state is that of second 12
    told[8]["step"] = 110  # from memory
    assert time_parts(told)["lost"] == 9.25 - 0.25


def test_a_rollback_has_lost_what_it_went_back_over() -> None:
    told = story(
        (0, "created", {}),
        (0, "attempt_started", attempt(1)),
        (1, "training_started", attempt(1, step=0)),
        (11, "checkpoint_saved", attempt(1, step=100, time_s=1.0)),
        (14, "evaluated", attempt(1, step=120, time_s=1.0)),
        (17, "rolled_back", attempt(1, step=150, to_step=100)),
        (30, "summary", attempt(1, step=280)),
        (30, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert (parts["lost"], parts["train"]) == (5.0, 22.0)  # 10 to 17, without the save and the evaluation
    killed = [*told[:6], {"time": 1020.0, "event": "attempt_ended", "attempt": 1, "cause": "signal"}]
    assert time_parts(killed)["lost"] == 8.0  # 10 to 20: the rollback in it counts once


MORE = st.tuples(
    st.floats(0, 100),
    st.sampled_from(
        ["failure", "hang", "rescued", "rolled_back", "memory_saved", "checkpoint_saved", "attempt_started"]
    ),
    st.fixed_dictionaries(
        {"attempt": st.integers(1, 3)},
        optional={
            "step": st.integers(0, 50) | st.none(),
            "to_step": st.integers(0, 50) | st.none(),
            "time_s": st.floats(0, 200),
            "blocked_s": st.floats(0, 20) | st.none(),
            "waited_s": st.floats(0, 200),
            "action": st.sampled_from(["restart", "report"]),
            "nodes": st.integers(1, 4) | st.none() | st.text(max_size=1),
        },
    ),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(EVENTS | MORE, max_size=40), st.none() | st.floats(0, 200))
def test_the_parts_of_all_attempts_are_the_whole_time_to_the_millisecond(
    told: list[tuple[float, str, dict[str, Any]]], now_s: float | None
) -> None:
    events: Story = story((0, "created", {}), *sorted(told, key=lambda each: each[0]))
    begun = [event for event in events if event["event"] in ("created", "resumed")][-1]
    story_s = events[events.index(begun) :]
    ends = [event for event in story_s if event["event"] == "finished"] or story_s[-1:]
    end_s = time_of(ends[-1]) if now_s is None else 1000.0 + now_s
    entries = ledger(events, now_s=None if now_s is None else end_s)
    whole = max(0, round(end_s * 1000) - round(time_of(begun) * 1000))
    assert sum(entry.times[name] for entry in entries for name in PARTS) == whole
    assert all(time >= 0 for entry in entries for time in entry.times.values())
    parts = time_parts(events, now_s=None if now_s is None else end_s)
    assert parts["total"] == whole / 1000
    rows = ledger_fields(entries, GPUS)
    for name in PARTS:
        assert round(sum(row[f"{name}_s"] for row in rows), 3) == parts[name]
    assert all(
        row["gpu_hours"]["total"] == pytest.approx(sum(row["gpu_hours"][name] for name in PARTS), abs=1e-5)
        for row in rows
    )
