"""What a head agent takes over from those before it."""

from __future__ import annotations

from typing import Any

from launcher.agent.past import past_of
from launcher.runs.events import Event
from launcher.runs.states import Cause

FAILURE = {
    "attempt": 1, "node": 0, "rank": 0, "pid": 7, "exit_code": 3, "cause": "worker_error", "message": "boom",
    "place": "", "log": "logs/x", "step": 4,
}  # fmt: skip


def event(name: str, **fields: Any) -> Event:
    return {"time": 1.0, "writer": "head", "event": name, **fields}


def started(attempt: int, **fields: Any) -> Event:
    return event("attempt_started", attempt=attempt, **fields)


def test_nothing_has_been() -> None:
    past = past_of([event("created")], allocation=None)
    assert (past.attempt, past.restarts, past.failure, past.is_interrupted, past.members) == (0, 0, None, False, ())


def test_one_that_was_lost_in_the_middle_is_taken_over_with_its_restarts_and_its_failure() -> None:
    ended = event("attempt_ended", attempt=1, node=0, rank=0, cause="worker_error")
    events = [
        event("created"), started(1), event("failure", **FAILURE), ended, event("restarting", attempt=2, restarts=1),
        started(2, members=[0, 2]),
    ]  # fmt: skip
    past = past_of(events, allocation=None)
    assert (past.attempt, past.restarts, past.is_interrupted, past.members) == (2, 1, True, (0, 2))
    assert past.failure is not None
    assert (past.failure.cause, past.failure.message, past.failure.step) == (Cause.WORKER_ERROR, "boom", 4)


def test_after_a_resume_attempts_count_on_and_restarts_begin_anew() -> None:
    events = [event("created"), started(1), event("restarting", attempt=2, restarts=1), started(2), event("resumed")]
    past = past_of(events, allocation=None)
    assert (past.attempt, past.restarts, past.is_interrupted) == (2, 0, False)


def test_a_head_agent_of_another_allocation_is_not_succeeded() -> None:
    """Its workers are gone with it. What it had used up counts."""
    events = [event("created"), started(1, allocation=1, members=[1]), event("restarting", attempt=2, restarts=1)]
    past = past_of(events, allocation=2)
    assert (past.attempt, past.restarts, past.is_interrupted, past.members) == (1, 1, False, ())
    assert past_of(events, allocation=1).is_interrupted
