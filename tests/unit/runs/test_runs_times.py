"""Where the time of a run went. The parts add up to the whole, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.runs.attempts import allocations_table, attempt_rows, attempts_table, time_table
from launcher.runs.fold import fold
from launcher.runs.ledger import PARTS, ledger, total_parts
from launcher.runs.observed import ALIVE

Story = list[dict[str, Any]]


def story(*told: tuple[float, str, dict[str, Any]]) -> Story:
    return [{"time": 1000.0 + time_s, "event": name, **fields} for time_s, name, fields in told]


def time_parts(events: Story, *, now_s: float | None = None) -> dict[str, float]:
    return total_parts(ledger(events, now_s=now_s))


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    return {"attempt": number, **fields}


KILLED_ONCE = story(
    (0, "created", {}),
    (1, "attempt_started", attempt(1)),
    (4, "training_started", attempt(1, step=0)),
    (10, "checkpoint_saved", attempt(1, step=100, time_s=1.0)),
    (13, "evaluated", attempt(1, step=150, time_s=2.0)),
    (20, "failure", attempt(1, step=200)),
    (20, "attempt_ended", attempt(1, step=200, node=1, rank=1, cause="signal", message="killed by SIGKILL")),
    (21, "attempt_started", attempt(2)),
    (23, "training_started", attempt(2, step=100, resumed_from="step-100")),
    (30, "evaluated", attempt(2, step=250, time_s=1.0)),
    (35, "checkpoint_saved", attempt(2, step=300, time_s=0.5)),
    (36, "summary", attempt(2, step=300)),
    (37, "finished", {"state": "SUCCEEDED", "cause": "done"}),
)


def test_of_a_run_whose_worker_was_killed_once() -> None:
    assert time_parts(KILLED_ONCE) == {
        "queue": 0.0,
        "start": 4.0,
        "train": 5.0 + 11.5,  # 4 to 10 but the save; 23 to 36 but the evaluation and the save
        "eval": 3.0,
        "save": 1.5,
        "lost": 8.0,  # 10 to 20, but the evaluation
        "down": 3.0,
        "end": 1.0,
        "total": 37.0,
    }


def test_its_attempts_and_what_ended_each() -> None:
    rows = attempt_rows(KILLED_ONCE)
    assert [(row.attempt, row.start_step, row.end_step, row.ended_by, row.time_s) for row in rows] == [
        (1, 0, 200, "rank 1: killed by SIGKILL", 19.0),
        (2, 100, 300, "finished", 16.0),
    ]
    assert attempts_table(rows).splitlines() == [
        "attempt  from   to  time  ended by",
        "      1     0  200   19s  rank 1: killed by SIGKILL",
        "      2   100  300   16s  finished",
    ]


def test_the_table_of_the_time_has_seconds_and_shares() -> None:
    lines = time_table(time_parts(KILLED_ONCE), has_clock=True).splitlines()
    assert lines[1].split()[:5] == ["start", "4.0", "s", "10.8", "%"]
    assert lines[-1].split() == ["total", "37.0", "s", "100", "%"]
    shares = [float(line.split()[3]) for line in lines[1:-1]]
    assert sum(shares) == pytest.approx(100.0, abs=0.5)


PREEMPTED = story(
    (0, "created", {}),
    (1, "submitted", {"ref": "slurm:7"}),
    (11, "allocation_started", {"allocation": 1, "job": "7", "nodes": ["n1", "n2"]}),
    (13, "attempt_started", attempt(1)),
    (15, "training_started", attempt(1, step=0)),
    (24, "checkpoint_saved", attempt(1, step=100, time_s=1.0)),
    (25, "stopped", {"reason": "TERM", "saved": True, "exit_code": 75}),
    (26, "allocation_ended", {"allocation": 1, "cause": "preempted", "saved": True, "step": 100}),
    (27, "requeued", {"allocation": 1, "how": "requeue", "ref": "slurm:7"}),
    (57, "allocation_started", {"allocation": 2, "job": "7", "nodes": ["n3", "n4"]}),
    (58, "attempt_started", attempt(2)),
    (60, "training_started", attempt(2, step=100)),
    (70, "summary", attempt(2, step=200)),
    (71, "finished", {"state": "SUCCEEDED", "cause": "done"}),
)


def test_the_time_in_the_queue_is_a_part_of_its_own() -> None:
    assert time_parts(PREEMPTED) == {
        "queue": 10.0 + 30.0,
        "start": 1.0 + 4.0,
        "train": 9.0 + 10.0,
        "eval": 0.0,
        "save": 1.0,
        "lost": 0.0,
        "down": 2.0 + 3.0,
        "end": 1.0,
        "total": 71.0,
    }
    waiting = time_parts(PREEMPTED[:2], now_s=1031.0)
    assert (waiting["queue"], waiting["start"]) == (30.0, 1.0)
    again = time_parts(PREEMPTED[:9], now_s=1037.0)
    assert (again["queue"], again["down"] + again["end"]) == (10.0 + 10.0, 2.0)


def test_an_attempt_ends_with_its_allocation() -> None:
    rows = attempt_rows(PREEMPTED)
    assert [(row.allocation, row.ended_by, row.time_s) for row in rows] == [
        (1, "preempted by another job", 13.0),
        (2, "finished", 13.0),
    ]


def test_an_allocation_that_ended_without_a_word_ends_where_it_was_last_heard() -> None:
    silent = [event for event in PREEMPTED if event["event"] not in ("stopped", "allocation_ended", "requeued")]
    parts = time_parts(silent)
    assert (parts["queue"], parts["train"], parts["total"]) == (10.0 + 33.0, 8.0 + 10.0, 71.0)
    assert attempt_rows(silent)[0].ended_by == "its allocation ended"


def test_the_allocations_and_what_ended_each() -> None:
    record = fold(PREEMPTED, ALIVE, None)
    assert allocations_table(record).splitlines() == [
        "allocation  job  queue  time  nodes   ended by",
        "         1    7    10s   15s  n1, n2  preempted by another job",
        "         2    7    30s     -  n3, n4  finished",
    ]
    assert allocations_table(fold(KILLED_ONCE, ALIVE, None)) == ""


def test_of_a_run_that_ended_without_a_word_what_was_not_saved_is_lost() -> None:
    silent = KILLED_ONCE[:6]
    assert time_parts(silent)["lost"] == 8.0
    assert time_parts(silent, now_s=1020.0)["lost"] == 0.0  # as long as it runs nothing is


def test_what_a_failed_run_has_done_since_its_checkpoint_is_lost() -> None:
    parts = time_parts([*KILLED_ONCE[:7], {"time": 1021.0, "event": "finished", "state": "FAILED", "cause": "signal"}])
    assert (parts["lost"], parts["end"], parts["down"]) == (8.0, 1.0, 0.0)


def test_without_a_checkpoint_all_of_an_attempt_is_lost() -> None:
    told = [event for event in KILLED_ONCE if event["event"] not in ("checkpoint_saved", "evaluated")]
    told = [{**event, "step": 0} if event["event"] == "training_started" else event for event in told]
    assert time_parts(told)["lost"] == 16.0


def test_a_stop_that_saved_has_lost_nothing() -> None:
    told = [*KILLED_ONCE[:4], *story((15, "summary", attempt(1, step=160)), (16, "finished", {"state": "CANCELLED"}))]
    parts = time_parts(told)
    assert (parts["lost"], parts["end"]) == (0.0, 1.0)
    (row,) = attempt_rows([*told[:-1], {"time": 1015.0, "event": "stop_requested", "reason": "Ctrl-C"}, told[-1]])
    assert row.ended_by == "stopped: Ctrl-C"


def test_of_a_run_that_goes_on_the_time_until_now_is_training_and_none_of_it_is_lost() -> None:
    told = story((0, "created", {}), (1, "attempt_started", attempt(1)), (3, "worker_started", attempt(1, rank=0)))
    parts = time_parts(told, now_s=1060.0)
    assert (parts["start"], parts["train"], parts["lost"], parts["total"]) == (3.0, 57.0, 0.0, 60.0)
    told += story((4, "training_started", attempt(1, step=0)), (10, "checkpoint_saved", attempt(1, step=9, time_s=1.0)))
    parts = time_parts(told, now_s=1060.0)
    assert (parts["start"], parts["train"], parts["save"], parts["lost"]) == (4.0, 55.0, 1.0, 0.0)


def test_of_a_script_that_says_nothing_the_workers_are_the_training() -> None:
    told = story(
        (0, "created", {}),
        (1, "attempt_started", attempt(1)),
        (2, "worker_started", attempt(1, rank=0)),
        (2.5, "worker_started", attempt(1, rank=1)),
        (9, "attempt_ended", attempt(1, rank=1, cause="signal", message="killed by SIGKILL")),
        (10, "attempt_started", attempt(2)),
        (11, "worker_started", attempt(2, rank=0)),
        (20, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert (parts["start"], parts["train"], parts["down"], parts["lost"]) == (2.5, 6.5 + 9.0, 2.0, 0.0)


def test_of_a_script_that_tells_its_steps_what_was_done_again_is_lost() -> None:
    told = story(
        (0, "created", {}),
        (1, "attempt_started", attempt(1)),
        (2, "worker_started", attempt(1, rank=0)),
        *((3 + step, "progress", attempt(1, step=step)) for step in range(10)),
        (14, "attempt_ended", attempt(1, rank=0, cause="worker_error", message="ValueError: boom")),
        (15, "attempt_started", attempt(2)),
        (16, "progress", attempt(2, step=5)),
        (20, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert (parts["start"], parts["lost"], parts["down"]) == (3.0, 7.0, 2.0)  # step 4 was said at 7


def test_an_attempt_that_never_got_to_a_step_is_part_of_the_start_and_the_next_is_waited_for() -> None:
    told = story(
        (0, "created", {}),
        (1, "attempt_started", attempt(1)),
        (3, "attempt_ended", attempt(1, rank=0, cause="peer_lost")),
        (4, "attempt_started", attempt(2)),
        (6, "training_started", attempt(2, step=0)),
        (9, "summary", attempt(2, step=3)),
        (9, "finished", {"state": "SUCCEEDED"}),
    )
    parts = time_parts(told)
    assert (parts["start"], parts["down"], parts["train"]) == (3.0, 3.0, 3.0)


def test_only_the_newest_resume_is_counted() -> None:
    later = [{**event, "time": event["time"] + 500} for event in KILLED_ONCE]
    later[0] = {**later[0], "event": "resumed"}
    assert time_parts([*KILLED_ONCE, *later]) == time_parts(KILLED_ONCE)


def test_of_a_run_that_never_began_nothing_is_known() -> None:
    assert time_parts([]) == {}
    assert time_parts(story((0, "created", {}), (2, "finished", {"state": "FAILED"})))["start"] == 2.0
    assert time_table({}, has_clock=False) == attempts_table([]) == ""


EVENTS = st.tuples(
    st.floats(0, 100),
    st.sampled_from(
        [
            "attempt_started",
            "worker_started",
            "training_started",
            "progress",
            "checkpoint_saved",
            "evaluated",
            "summary",
            "attempt_ended",
            "finished",
            "resumed",
            "submitted",
            "requeued",
            "stopped",
            "allocation_started",
            "allocation_ended",
            "unheard of",
        ]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "attempt": st.integers(1, 3) | st.none() | st.text(max_size=1),
            "step": st.integers(0, 50) | st.none(),
            "time_s": st.floats(0, 200) | st.none(),
            "state": st.sampled_from(["SUCCEEDED", "FAILED", "CANCELLED", "?"]),
            "cause": st.sampled_from(["done", "signal", "?"]),
            "rank": st.integers(-1, 2),
            "ref": st.sampled_from(["slurm:1", "local:here:1:2"]),
            "allocation": st.integers(1, 3),
            "saved": st.booleans(),
        },
    ),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_whatever_is_told_in_whatever_order_the_parts_add_up(told: list[tuple[float, str, dict[str, Any]]]) -> None:
    events = story((0, "created", {}), *sorted(told, key=lambda each: each[0]))
    parts = time_parts(events)
    assert all(parts[name] >= 0 for name in PARTS)
    assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"], abs=0.01)
    rows = attempt_rows(events)
    assert attempts_table(rows).count("\n") == len(rows)
