"""Whether a failure is followed by a restart."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent.causes import Failure
from launcher.agent.restarts import decide
from launcher.runs.states import POLICIES, Cause


def failure(cause: Cause = Cause.WORKER_ERROR, **fields: Any) -> Failure:
    known: dict[str, Any] = {
        "attempt": 1,
        "node": 0,
        "rank": 0,
        "pid": 7,
        "exit_code": 1,
        "message": "ValueError: boom",
        "exception": "ValueError",
        "place": "t.py:3 in f",
        "log": "x",
        "step": 12,
    }
    return Failure(cause=cause, **{**known, **fields})


def why_not(now: Failure, before: Failure | None = None, **fields: Any) -> str:
    known: dict[str, Any] = {"resumable": True, "restarts": 0, "max_restarts": 3}
    return decide(now, before, **{**known, **fields}).why_not


@pytest.mark.parametrize("cause", list(Cause))
def test_the_table_decides(cause: Cause) -> None:
    assert (why_not(failure(cause)) == "") == POLICIES[cause].retry


@pytest.mark.parametrize(
    "cause",
    [
        Cause.USAGE,
        Cause.RECIPE,
        Cause.OOM,
        Cause.OOM_HOST,
        Cause.OOM_KILLED,
        Cause.CHECKPOINT,
        Cause.DISK,
        Cause.NAN,
        Cause.SETUP,
    ],
)
def test_what_repeats_by_itself_says_why(cause: Cause) -> None:
    assert why_not(failure(cause)) == POLICIES[cause].why_not != ""


def test_a_script_that_cannot_resume_is_not_restarted() -> None:
    assert "declares no `resume:`" in why_not(failure(), resumable=False)


@pytest.mark.parametrize(("restarts", "budget", "left"), [(0, 1, True), (1, 1, False), (0, 0, False), (2, 3, True)])
def test_the_budget(restarts: int, budget: int, left: bool) -> None:
    """F065"""
    assert (why_not(failure(), restarts=restarts, max_restarts=budget) == "") == left


class TestTheSameTwice:
    @pytest.mark.parametrize("cause", [Cause.WORKER_ERROR, Cause.HANG])
    def test_the_same_exception_at_the_same_place_and_step_is_the_end(self, cause: Cause) -> None:
        verdict = decide(failure(cause), failure(cause), resumable=True, restarts=1, max_restarts=9)
        assert verdict.cause is Cause.REPEATED
        assert verdict.why_not == POLICIES[Cause.REPEATED].why_not

    @pytest.mark.parametrize("other", [{"step": 13}, {"place": "t.py:4 in f"}, {"exception": "KeyError"}])
    def test_another_one_is_not(self, other: dict[str, Any]) -> None:
        assert why_not(failure(), failure(**other)) == ""

    def test_on_another_rank_it_is_the_same(self) -> None:
        assert why_not(failure(rank=3, node=1), failure()) != ""

    @pytest.mark.parametrize("cause", [Cause.SIGNAL, Cause.PEER_LOST, Cause.NODE_LOST])
    def test_what_comes_from_outside_may_come_twice(self, cause: Cause) -> None:
        assert why_not(failure(cause), failure(cause)) == ""

    def test_a_death_without_an_exception_is_not_compared(self) -> None:
        left = failure(exception="", place="", message="exited with code 7")
        assert why_not(left, left) == ""

    def test_without_a_step_clock_a_new_checkpoint_in_between_makes_the_difference(self) -> None:
        before = failure(step=None, kept="a:1")
        assert why_not(failure(step=None, kept="a:1"), before) != ""
        assert why_not(failure(step=None, kept="b:2"), before) == ""
        assert why_not(failure(step=12, kept="a:1"), before) == ""
