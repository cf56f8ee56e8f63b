"""The head agent of a run with `--nodes MIN:MAX`: fewer nodes go on, who comes (back) is taken in."""

from __future__ import annotations

from typing import Any

from test_agent_head import all_ready, failure, finish_of, make_head, recorded, said, sent

from launcher.agent.effects import Effect, Record, Send
from launcher.agent.head import Head, Phase
from launcher.agent.members import FIRST_S, RETURN_S, SILENCE_S
from launcher.runs.states import Cause, RunState


def elastic(nodes: int = 3, *, there: tuple[int, ...] = (0, 1, 2), **fields: Any) -> Head:
    """Running with these nodes."""
    head = make_head(nodes, **{"min_nodes": 1, "workers_per_node": 2, **fields})
    for node in there:
        head.joined(node, f"n{node}")
        head.ready(node)
    if head.phase is Phase.JOINING:
        at(head, FIRST_S, *there)
    assert head.phase is Phase.RUNNING
    return head


def at(head: Head, now_s: float, *heard: int) -> list[Effect]:
    head.now_s = now_s
    for node in heard:
        head.heard(node)
    return head.tick()


def started(effects: list[Effect]) -> dict[int | None, dict[str, Any]]:
    """Orders to start, by node."""
    orders = [effect for effect in effects if isinstance(effect, Send) and effect.message["type"] == "start"]
    return {effect.node: effect.message for effect in orders}


def event(effects: list[Effect], name: str) -> dict[str, Any]:
    (fields,) = [effect.fields for effect in effects if isinstance(effect, Record) and effect.event == name]
    return fields


def back(head: Head, node: int) -> list[Effect]:
    return head.joined(node, f"n{node}") + head.ready(node)


def ready(head: Head, *nodes: int) -> list[Effect]:
    return [effect for node in nodes for effect in head.ready(node)]


def test_all_that_are_there_begin_without_a_wait() -> None:
    head = make_head(2, min_nodes=1)
    effects = all_ready(head, join=True)
    assert set(started(effects)) == {0, 1}
    assert started(effects)[0]["members"] == [0, 1]
    assert event(effects, "attempt_started")["members"] == [0, 1]
    assert "scaled" not in recorded(effects)


def test_at_the_beginning_fewer_wait_for_the_others_and_then_go_on() -> None:
    head = make_head(3, min_nodes=2)
    back(head, 0)
    back(head, 1)
    assert started(at(head, FIRST_S - 1, 0, 1)) == {}
    effects = at(head, FIRST_S, 0, 1)
    assert set(started(effects)) == {0, 1}
    fields = event(effects, "scaled")
    assert fields == {"attempt": 1, "nodes": [0, 1], "missing": [2], "reason": "without node 2 (n2)"}


def test_fewer_than_the_least_do_not_begin() -> None:
    head = make_head(3, min_nodes=2, join_timeout_s=60.0)
    back(head, 0)
    assert started(at(head, 59.0, 0)) == {}
    effects = at(head, 61.0, 0) + head.ready(0)
    assert finish_of(effects).cause is Cause.RENDEZVOUS


def test_after_a_loss_the_others_go_on_within_seconds() -> None:
    head = elastic()
    head.now_s = 100.0
    head.heard(1)
    effects = head.lost(1, "closed by the other side")
    assert sent(effects) == [("kill", None)]
    assert ready(head, 0, 2) == []
    assert started(at(head, 100.0 + RETURN_S - 0.1, 0, 2)) == {}
    effects = at(head, 100.0 + RETURN_S, 0, 2)
    orders = started(effects)
    assert set(orders) == {0, 2}
    assert orders[2]["members"] == [0, 2]
    assert event(effects, "scaled")["missing"] == [1]
    assert "2 of 3 nodes from here on" in said(effects)
    assert [head.members.node_of(rank) for rank in range(4)] == [0, 0, 2, 2]


def test_a_killed_agent_is_replaced_and_nothing_is_scaled() -> None:
    head = elastic()
    head.now_s = 100.0
    head.heard(1)
    head.lost(1, "closed by the other side")
    ready(head, 0, 2)
    effects = back(head, 1)
    assert set(started(effects)) == {0, 1, 2}
    assert "scaled" not in recorded(effects)


def test_a_silent_node_has_had_its_time() -> None:
    head = elastic()
    effects = at(head, SILENCE_S + FIRST_S + 100.0, 0, 2)
    assert "node_lost" in recorded(effects)
    assert set(started(ready(head, 0, 2))) == {0, 2}


def test_a_lost_node_costs_no_restart_and_a_crash_does() -> None:
    head = elastic(max_restarts=1)
    head.now_s = 100.0
    head.lost(1, "closed")
    assert head.restarts == 0
    ready(head, 0, 2)
    at(head, 200.0, 0, 2)
    head.failed(failure(head, node=2, rank=3, cause=Cause.SIGNAL, exit_code=137))
    assert head.restarts == 1


def test_too_few_nodes_are_waited_for_and_end_the_run_if_they_stay_away() -> None:
    head = elastic(min_nodes=3, join_timeout_s=60.0)
    head.now_s = 100.0
    head.lost(1, "closed")
    ready(head, 0, 2)
    assert started(at(head, 159.0, 0, 2)) == {}
    effects = at(head, 160.1, 0, 2) + ready(head, 0, 2)
    assert (finish_of(effects).state, finish_of(effects).cause) == (RunState.FAILED, Cause.NODE_LOST)


class TestTakenIn:
    def test_who_comes_waits_for_the_next_checkpoint(self) -> None:
        head = elastic(there=(0, 2))
        assert sent(back(head, 1)) == [("welcome", 1)]
        assert head.phase is Phase.RUNNING
        assert head.saved(0) == [], "of another attempt"
        effects = head.saved(1)
        assert sent(effects) == [("kill", None)]
        assert "node 1 (n1) has come: starting again with it" in said(effects)
        effects = ready(head, 0, 1, 2)
        assert set(started(effects)) == {0, 1, 2}
        fields = {"attempt": 2, "nodes": [0, 1, 2], "missing": [], "reason": "node 1 (n1) has come"}
        assert event(effects, "scaled") == fields
        assert head.restarts == 0

    def test_the_state_is_rescued_first(self) -> None:
        head = elastic(there=(0, 2), rescues=True)
        back(head, 1)
        assert sent(head.saved(1)) == [("report", 0), ("report", 2)]

    def test_a_checkpoint_without_a_newcomer_is_no_news(self) -> None:
        assert elastic(there=(0, 2)).saved(1) == []

    def test_what_is_about_to_fail_is_not_called_something_else(self) -> None:
        head = elastic(there=(0, 2))
        back(head, 1)
        head.suspected(failure(head, node=2, rank=3, cause=Cause.PEER_LOST))
        assert head.saved(1) == []
        effects = head.failed(failure(head, node=0, rank=0, cause=Cause.SIGNAL, exit_code=137))
        assert event(effects, "attempt_ended")["cause"] == "signal"

    def test_one_that_has_joined_and_still_ends_its_workers_is_none(self) -> None:
        head = elastic(there=(0, 2))
        head.joined(1, "n1")
        assert head.saved(1) == []

    def test_one_that_goes_again_is_no_loss(self) -> None:
        head = elastic(there=(0, 2))
        back(head, 1)
        effects = head.lost(1, "closed")
        assert recorded(effects) == ["node_lost"]
        assert head.phase is Phase.RUNNING
        assert head.saved(1) == []

    def test_a_script_without_resume_is_not_started_again_for_it(self) -> None:
        head = elastic(there=(0, 2), resumable=False)
        back(head, 1)
        assert head.saved(1) == []

    def test_at_a_restart_for_another_reason_it_is_taken_in_too(self) -> None:
        head = elastic(there=(0, 2))
        back(head, 1)
        head.failed(failure(head, node=2, rank=3, cause=Cause.SIGNAL, exit_code=137))
        assert set(started(ready(head, 0, 1, 2))) == {0, 1, 2}

    def test_one_that_was_silent_is_first_told_to_end_its_workers(self) -> None:
        head = elastic()
        effects = at(head, 100.0, 0, 2)
        assert ("kill", 1) in sent(effects)
        ready(head, 0, 2)
        assert head.members.attempt == (0, 2)
        head.heard(1)
        assert head.saved(2) == [], "it has not said that they have ended"
        head.ready(1)
        assert sent(head.saved(2)) == [("kill", None)]


def test_the_run_is_over_when_those_that_take_part_are_done() -> None:
    head = elastic(there=(0, 2))
    back(head, 1)
    head.done(0, 1, {0: 0, 1: 0})
    effects = head.done(2, 1, {2: 0, 3: 0})
    assert finish_of(effects).state is RunState.SUCCEEDED


def test_who_was_waited_for_in_vain_is_named_by_where_its_rank_runs() -> None:
    head = elastic(there=(0, 2), max_restarts=0)
    head.failed(failure(head, node=0, rank=0, cause=Cause.HANG))
    head.now_s += 100.0
    for node in (0, 2):
        head.heard(node)
    head.tick()
    assert head.first_failure is not None
    text = "still running then: rank 1 on node 0 (n0), rank 2 on node 2 (n2), rank 3 on node 2 (n2)"
    assert text in head.first_failure.message


def test_a_head_that_takes_over_knows_who_took_part() -> None:
    head = make_head(3, min_nodes=1, members_before=(0, 2), attempt=4, rescues=True, now_s=50.0)
    head.succeed()
    assert sent(head.joined(2, "n2", holds=4)) == [("report", 2)]
    assert sent(head.joined(1, "n1", holds=4)) == [("welcome", 1)], "it had no part in that attempt"
