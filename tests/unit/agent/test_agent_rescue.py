"""A rescue, without a process: who is asked, who is waited for, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent.effects import Record, Send
from launcher.agent.members import RETURN_S
from launcher.agent.rescue import HOLDS_S, KEEP_S, Rescue


def begun(nodes: int = 2, **fields: Any) -> Rescue:
    """All nodes are there and were asked."""
    rescue = Rescue(**{"attempt": 4, "began_s": 100.0, **fields})
    asked = rescue.begin(range(nodes), {})
    assert asked == [Send({"type": "report", "attempt": 4}, node) for node in range(nodes)]
    assert rescue.advance(100.0) == []
    return rescue


def kept_by(effects: list[Send | Record]) -> tuple[int, int | None]:
    """The rank that is asked to keep its state, and the node of the order."""
    (send,) = effects
    assert isinstance(send, Send)
    assert send.message["type"] == "keep"
    return send.message["rank"], send.node


def outcome(effects: list[Send | Record]) -> tuple[str, dict[str, Any]]:
    (record,) = effects
    assert isinstance(record, Record)
    return record.event, record.fields


def test_the_newest_step_is_kept_by_the_lowest_rank_that_holds_it() -> None:
    rescue = begun()
    rescue.holds(1, {2: 8, 3: 8})
    assert rescue.advance(100.1) == [], "node 0 has not answered"
    rescue.holds(0, {0: 7, 1: None})
    assert kept_by(rescue.advance(100.2)) == (2, 1)
    assert rescue.advance(100.3) == [], "it writes"
    rescue.kept(2, None)
    fields = {"attempt": 4, "step": 8, "node": 1, "rank": 2, "time_s": 0.5}
    assert outcome(rescue.advance(100.5)) == ("rescued", fields)
    assert rescue.over
    assert rescue.advance(100.6) == []


def test_an_order_to_keep_it_on_disk_says_so() -> None:
    rescue = begun(1, to_disk=True)
    rescue.holds(0, {0: 7})
    (send,) = rescue.advance(100.0)
    assert isinstance(send, Send)
    assert send.message == {"type": "keep", "attempt": 4, "rank": 0, "to_disk": True}
    rescue.kept(0, None)
    rescued, saved = rescue.advance(101.0)
    assert isinstance(rescued, Record)
    assert isinstance(saved, Record)
    assert (rescued.event, saved.event) == ("rescued", "checkpoint_saved")
    fields = {"attempt": 4, "step": 7, "path": "checkpoints/step-7", "time_s": 1.0, "best": False}
    assert saved.fields == fields


def test_what_is_in_memory_when_it_is_wanted_on_disk_is_written_once_more() -> None:
    rescue = begun(1)
    rescue.holds(0, {0: 7, 1: 7})
    assert kept_by(rescue.advance(100.0)) == (0, 0)
    rescue.to_disk = True
    assert rescue.advance(100.1) == [], "whoever writes is not disturbed"
    rescue.kept(0, None)
    (send,) = rescue.advance(100.2)
    assert send == Send({"type": "keep", "attempt": 4, "rank": 0, "to_disk": True}, 0)
    assert (rescue.over, rescue.on_disk) == (False, False)
    rescue.kept(0, "no room")
    assert kept_by(rescue.advance(100.3)) == (1, 0), "another may be able to"
    rescue.gone(1)
    event, fields = outcome(rescue.advance(100.4))
    assert (event, fields["step"], fields["rank"]) == ("rescued", 7, 0), "what is in memory is still there"
    assert (rescue.over, rescue.on_disk) == (True, False)


def test_who_cannot_write_is_followed_by_the_next_best() -> None:
    rescue = begun(1)
    rescue.holds(0, {0: 7, 1: 8, 2: 8})
    assert kept_by(rescue.advance(100.0)) == (1, 0)
    rescue.kept(1, "no room")
    assert kept_by(rescue.advance(100.0)) == (2, 0)
    rescue.gone(2)
    assert kept_by(rescue.advance(100.0)) == (0, 0)
    rescue.kept(0, "no room either")
    event, fields = outcome(rescue.advance(100.0))
    assert event == "not_rescued"
    assert fields["reason"] == "rank 1: no room; rank 2 ended while it wrote; rank 0: no room either"


def test_who_ends_before_its_turn_is_not_asked() -> None:
    rescue = begun()
    rescue.holds(0, {0: 8, 1: 7})
    rescue.gone(0)
    rescue.holds(1, {2: 7})
    assert kept_by(rescue.advance(100.0)) == (1, 0)


def test_the_word_of_somebody_else_is_not_that_of_the_one_who_writes() -> None:
    rescue = begun(1)
    rescue.holds(0, {0: 7, 1: 8})
    rescue.advance(100.0)
    rescue.kept(0, None)
    rescue.gone(0)
    assert rescue.advance(100.0) == []
    assert not rescue.over


@pytest.mark.parametrize("steps", [{}, {0: None, 1: None}])
def test_without_a_state_there_is_nothing_to_wait_for(steps: dict[int, int | None]) -> None:
    rescue = begun(1)
    rescue.holds(0, steps)
    event, fields = outcome(rescue.advance(100.0))
    assert (event, fields["reason"]) == ("not_rescued", "no worker is left that has completed a step")


def test_an_agent_that_does_not_answer_is_waited_for_so_long_and_not_longer() -> None:
    rescue = begun()
    rescue.holds(0, {0: 7})
    assert rescue.advance(100.0 + HOLDS_S - 0.1) == []
    assert kept_by(rescue.advance(100.0 + HOLDS_S)) == (0, 0)
    rescue.holds(1, {1: 9})
    rescue.kept(0, "no room")
    assert outcome(rescue.advance(104.0))[0] == "not_rescued", "an answer that comes too late counts no more"


def test_a_state_that_is_never_written_is_given_up() -> None:
    rescue = begun(1)
    rescue.holds(0, {0: 7})
    rescue.advance(100.0)
    assert rescue.advance(100.0 + KEEP_S - 1) == []
    event, fields = outcome(rescue.advance(100.0 + KEEP_S))
    assert (event, fields["reason"]) == ("not_rescued", "rank 0 did not write its state within 120 s")


class TestLostNodes:
    def test_one_that_comes_back_without_workers_is_not_waited_for(self) -> None:
        rescue = begun()
        rescue.holds(0, {0: 7})
        rescue.left(1, heard_at_s=100.0)
        assert rescue.advance(100.1) == [], "its agent may live, with its workers"
        rescue.left(1)
        assert kept_by(rescue.advance(100.2)) == (0, 0)

    def test_one_that_comes_back_with_them_is_asked(self) -> None:
        rescue = Rescue(attempt=4, began_s=100.0)
        assert rescue.begin([0], {1: 100.0}) == [Send({"type": "report", "attempt": 4}, 0)]
        rescue.holds(0, {})
        assert rescue.returned(1, 101.0) == [Send({"type": "report", "attempt": 4}, 1)]
        assert rescue.advance(101.0 + HOLDS_S - 0.1) == []
        rescue.holds(1, {1: 7})
        assert kept_by(rescue.advance(102.0)) == (1, 1)

    def test_one_that_stays_away_is_waited_for_since_it_was_heard(self) -> None:
        rescue = Rescue(attempt=4, began_s=100.0)
        rescue.begin([0], {1: 99.0, 2: 88.0})
        rescue.holds(0, {0: 7})
        assert rescue.advance(99.0 + RETURN_S - 0.1) == []
        assert kept_by(rescue.advance(99.0 + RETURN_S)) == (0, 0)

    def test_what_it_held_is_gone_with_it(self) -> None:
        rescue = begun()
        rescue.holds(0, {0: 7})
        rescue.holds(1, {1: 8})
        assert kept_by(rescue.advance(100.0)) == (1, 1)
        rescue.left(1)
        assert kept_by(rescue.advance(100.0)) == (0, 0)

    def test_what_it_held_is_not_asked_for_after_that(self) -> None:
        rescue = begun(3)
        rescue.holds(0, {0: 7})
        rescue.holds(1, {1: 8})
        rescue.left(1)
        rescue.holds(2, {2: 7})
        assert kept_by(rescue.advance(100.0)) == (0, 0)

    def test_what_it_has_kept_counts_if_that_was_said_before(self) -> None:
        rescue = begun(1)
        rescue.holds(0, {0: 7})
        rescue.advance(100.0)
        rescue.kept(0, None)
        rescue.left(0)
        assert outcome(rescue.advance(100.0))[0] == "rescued"
