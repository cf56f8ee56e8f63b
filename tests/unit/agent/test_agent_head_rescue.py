"""The head agent between a failure and the restart: survivors keep the newest step. And on a stop: they save it."""

from __future__ import annotations

from typing import Any

import pytest
from test_agent_head import GRACE_S, all_ready, failure, finish_of, make_head, recorded, running, said, sent

from launcher.agent.effects import Effect, Send
from launcher.agent.head import Head, Phase
from launcher.agent.members import RETURN_S, SILENCE_S
from launcher.agent.rescue import HOLDS_S
from launcher.agent.weighing import SETTLE_S
from launcher.runs.states import Cause, RunState


def rescuing_run(nodes: int = 2, **fields: Any) -> Head:
    return running(nodes, **{"rescues": True, **fields})


def killed(head: Head, node: int = 0) -> list[Effect]:
    """A worker of a node is dead."""
    return head.failed(failure(head, node=node, rank=node, cause=Cause.SIGNAL, exit_code=137))


def at(head: Head, now_s: float, *heard: int) -> list[Effect]:
    head.now_s = now_s
    for node in heard:
        head.heard(node)
    return head.tick()


def test_after_a_failure_all_are_asked_and_the_newest_step_is_kept_before_anybody_is_killed() -> None:
    head = rescuing_run()
    effects = killed(head)
    assert head.phase is Phase.RESCUING
    assert sent(effects) == [("report", 0), ("report", 1)]
    assert recorded(effects) == ["failure", "attempt_ended", "restarting"]
    assert head.holds(0, 1, {}) == []
    effects = head.holds(1, 1, {1: 7})
    assert effects == [Send({"type": "keep", "attempt": 1, "rank": 1}, 1)]
    effects = head.kept(1, 1, None)
    assert (recorded(effects), sent(effects)) == (["rescued"], [("kill", None)])
    assert head.phase is Phase.JOINING
    assert ("start", None) in sent(all_ready(head))
    assert (head.attempt, head.restarts) == (2, 1)


def test_without_a_state_the_restart_follows_at_once_and_it_is_said() -> None:
    head = rescuing_run()
    killed(head)
    head.holds(0, 1, {})
    effects = head.holds(1, 1, {1: None})
    assert (recorded(effects), sent(effects)) == (["not_rescued"], [("kill", None)])


def test_without_rescue_nobody_is_asked() -> None:
    head = running()
    assert sent(killed(head)) == [("kill", None)]


def test_of_ranks_that_were_out_of_step_nothing_is_kept() -> None:
    head = rescuing_run()
    head.watch.mismatched = True
    assert sent(killed(head)) == [("kill", None)]
    assert head.phase is Phase.JOINING

    head = rescuing_run()
    head.watch.mismatched = True
    assert sent(head.stop(0, "TERM", 15)) == [("stop", None)]
    assert sent(at(head, GRACE_S - 0.1, 0, 1)) == []
    effects = at(head, GRACE_S, 0, 1)
    assert sent(effects) == [("kill", None)], "a step that only one of them has is no checkpoint"
    assert "without a new checkpoint" in said(effects)
    assert finish_of(all_ready(head)).exit_code == 143


def test_a_failure_that_is_not_retried_is_followed_by_no_rescue() -> None:
    head = rescuing_run(max_restarts=0)
    assert sent(killed(head)) == [("kill", None)]
    assert head.phase is Phase.ENDING


def test_a_suspicion_waits_for_the_failure_behind_it_and_is_one_if_none_comes() -> None:
    head = rescuing_run()
    suspicion = failure(head, node=1, rank=1, cause=Cause.PEER_LOST, message="connection closed by peer")
    assert sent(head.suspected(suspicion)) == []
    effects = killed(head)
    assert head.first_failure is not None
    assert head.first_failure.cause is Cause.SIGNAL
    assert sent(effects) == [("report", 0), ("report", 1)]

    head = rescuing_run()
    head.suspected(failure(head, node=1, rank=1, cause=Cause.PEER_LOST))
    effects = at(head, SETTLE_S, 0, 1)
    assert sent(effects) == [("report", 0), ("report", 1)]
    assert head.first_failure is not None
    assert head.first_failure.cause is Cause.PEER_LOST


def test_who_suspects_still_lives_and_is_no_failure_of_the_rescue() -> None:
    head = rescuing_run()
    killed(head)
    head.holds(0, 1, {})
    head.holds(1, 1, {1: 7})
    assert head.suspected(failure(head, node=1, rank=1, cause=Cause.PEER_LOST)) == []
    assert recorded(head.kept(1, 1, None)) == ["rescued"]


def test_a_second_failure_falls_out_and_is_recorded() -> None:
    head = rescuing_run(3)
    killed(head)
    head.holds(0, 1, {})
    head.holds(1, 1, {1: 8})
    assert sent(head.holds(2, 1, {2: 7})) == [("keep", 1)]
    effects = killed(head, node=1)
    assert (recorded(effects), sent(effects)) == (["failure"], [("keep", 2)])
    assert head.restarts == 1, "it costs nothing more"


def test_what_was_said_of_another_attempt_counts_no_more() -> None:
    head = rescuing_run()
    killed(head)
    assert head.holds(1, 0, {1: 7}) == []
    assert head.kept(0, 1, None) == []
    assert head.phase is Phase.RESCUING


def test_a_silent_agent_holds_a_rescue_up_for_so_long_and_not_longer() -> None:
    head = rescuing_run()
    killed(head)
    head.holds(0, 1, {0: 7})
    assert at(head, HOLDS_S - 0.1, 0, 1) == []
    assert sent(at(head, HOLDS_S, 0, 1)) == [("keep", 0)]


class TestNodes:
    def test_a_killed_agent_is_out_as_soon_as_its_successor_has_come(self) -> None:
        head = rescuing_run(3)
        for node in range(3):
            head.heard(node)
        assert sent(head.lost(1, "closed")) == [("report", 0), ("report", 2)]
        head.holds(0, 1, {0: 7})
        assert head.holds(2, 1, {2: 7}) == [], "its workers may live"
        assert sent(head.joined(1, "n1")) == [("keep", 0), ("welcome", 1)]

    def test_a_cut_that_is_mended_at_once_brings_the_workers_back(self) -> None:
        head = rescuing_run()
        head.heard(1)
        head.lost(1, "closed")
        head.holds(0, 1, {0: 7})
        assert sent(head.joined(1, "n1", holds=1)) == [("report", 1)]
        assert sent(head.holds(1, 1, {1: 8})) == [("keep", 1)]

    def test_while_a_node_is_missing_it_is_kept_where_it_outlives_the_run(self) -> None:
        """The node may not come back, and what is in memory ends with the allocation."""
        head = rescuing_run()
        head.lost(1, "closed")
        head.holds(0, 1, {0: 7})
        (keep,) = at(head, RETURN_S, 0)
        assert keep == Send({"type": "keep", "attempt": 1, "rank": 0, "to_disk": True}, 0)
        effects = head.kept(1, 0, None)
        assert recorded(effects) == ["rescued", "checkpoint_saved"]
        assert head.phase is Phase.JOINING

    def test_where_fewer_nodes_are_enough_memory_is(self) -> None:
        head = rescuing_run(min_nodes=1)
        head.lost(1, "closed")
        head.holds(0, 1, {0: 7})
        (keep,) = at(head, RETURN_S, 0)
        assert keep == Send({"type": "keep", "attempt": 1, "rank": 0}, 0)

    def test_workers_of_an_attempt_that_is_over_are_ended(self) -> None:
        head = rescuing_run()
        killed(head)
        assert sent(head.joined(1, "n1", holds=0)) == [("welcome", 1)]

    def test_a_node_that_was_silent_is_not_waited_for_again(self) -> None:
        head = rescuing_run()
        effects = at(head, SILENCE_S + 0.1, 0)
        assert sent(effects) == [("kill", 1), ("report", 0)]
        assert sent(head.holds(0, 1, {0: 7})) == [("keep", 0)]

    def test_all_nodes_lost_is_no_endless_wait(self) -> None:
        head = rescuing_run()
        head.lost(1, "closed")
        head.lost(0, "closed")
        at(head, RETURN_S)
        assert head.phase is Phase.JOINING


def test_who_is_awaited_is_not_late_after_a_pause_of_all_processes() -> None:
    head = rescuing_run(join_timeout_s=300.0)
    killed(head)
    head.holds(0, 1, {})
    head.holds(1, 1, {})
    head.ready(0)
    head.now_s = 1000.0  # a suspended job
    head.frozen(995.0)
    for node in (0, 1):
        head.heard(node)
    assert head.tick() == []
    assert ("start", None) in sent(head.ready(1))


class TestTheNextHead:
    def successor(self, nodes: int = 3) -> Head:
        head = rescuing_run(nodes)
        return Head(
            node_count=nodes,
            max_restarts=3,
            resumable=True,
            grace_s=GRACE_S,
            join_timeout_s=300.0,
            pick_port=lambda: 6000,
            hosts={},
            master_addr="127.0.0.1",
            now_s=50.0,
            attempt=head.attempt,
            rescues=True,
        )

    def test_it_waits_for_the_others_and_rescues_what_they_hold(self) -> None:
        head = self.successor()
        assert sent(head.succeed()) == []
        assert head.phase is Phase.RESCUING
        assert sent(head.joined(0, "n0")) == [("welcome", 0)]
        assert sent(head.joined(1, "n1", holds=1)) == [("report", 1)]
        assert head.holds(1, 1, {1: 7}) == []
        assert sent(head.joined(2, "n2", holds=1)) == [("report", 2)]
        assert sent(head.holds(2, 1, {2: 8})) == [("keep", 2)]
        effects = head.kept(1, 2, None)
        assert sent(effects) == [("kill", None)]

    def test_it_does_not_wait_for_ever(self) -> None:
        head = self.successor()
        head.succeed()
        head.joined(0, "n0")
        head.joined(1, "n1", holds=1)
        head.holds(1, 1, {1: 7})
        assert sent(at(head, 50.0 + RETURN_S, 0, 1)) == [("keep", 1)]


class TestStop:
    def test_a_stop_during_a_rescue_has_the_state_saved_for_good(self) -> None:
        head = rescuing_run()
        killed(head)
        head.holds(0, 1, {})
        head.holds(1, 1, {1: 7})
        assert sent(head.stop(0, "TERM", 15)) == [], "whoever writes cannot be asked"
        at(head, HOLDS_S + 1.0, 0, 1)
        (keep,) = head.kept(1, 1, None)  # in memory
        assert keep == Send({"type": "keep", "attempt": 1, "rank": 1, "to_disk": True}, 1)
        effects = head.kept(1, 1, None) + all_ready(head)
        assert ("start", None) not in sent(effects)
        end = finish_of(effects)
        assert (end.state, end.exit_code) == (RunState.CANCELLED, 75)

    @pytest.mark.parametrize("how", ["failure", "suspicion", "lost"])
    def test_who_has_lost_a_peer_during_a_stop_saves_alone(self, how: str) -> None:
        head = rescuing_run()
        head.stop(0, "TERM", 15)
        if how == "lost":
            head.lost(0, "closed")
            head.joined(0, "n0")
        else:
            lost = failure(head, cause=Cause.SIGNAL, exit_code=137)
            peer_lost = failure(head, cause=Cause.PEER_LOST)
            head.failed(lost) if how == "failure" else head.suspected(peer_lost)
            head.holds(0, 1, {})
        assert sent(head.holds(1, 1, {1: 7})) == [("keep", 1)]
        assert finish_of(head.kept(1, 1, None) + all_ready(head)).exit_code == 75

    def test_without_a_state_it_ends_as_before(self) -> None:
        head = rescuing_run()
        head.stop(0, "TERM", 15)
        killed(head)
        head.holds(0, 1, {})
        end = finish_of(head.holds(1, 1, {}) + all_ready(head))
        assert end.exit_code == 143

    def test_shortly_before_the_grace_time_is_over_one_saves_for_all(self) -> None:
        head = rescuing_run()
        head.stop(0, "TERM", 15)
        for now_s in (10.0, 20.0):
            assert at(head, now_s, 0, 1) == []
        effects = at(head, GRACE_S - 3.0, 0, 1)
        assert "one worker saves for all" in said(effects)
        assert sent(effects) == [("report", 0), ("report", 1)]
        head.holds(0, 1, {0: 7})
        head.holds(1, 1, {})
        assert at(head, GRACE_S - 0.1, 0, 1) == []
        effects = at(head, GRACE_S, 0, 1)
        assert sent(effects) == [("kill", None)], "it did not come to it"
        assert finish_of(all_ready(head)).exit_code == 143

    def test_a_second_stop_ends_that_too(self) -> None:
        head = rescuing_run()
        head.stop(0, "TERM", 15)
        killed(head)
        assert head.phase is Phase.RESCUING
        assert sent(head.stop(0, "TERM", 15)) == [("kill", None)]

    def test_what_is_in_memory_alone_is_saved_by_the_next_attempt_and_that_is_the_end(self) -> None:
        head = rescuing_run()
        killed(head)
        head.holds(0, 1, {})
        head.holds(1, 1, {1: 7})
        assert sent(head.kept(1, 1, None)) == [("kill", None)]
        assert sent(head.stop(0, "TERM", 15)) == []
        assert sent(all_ready(head)) == [("start", None), ("stop", None)]
        head.done(0, 2, {0: 75})
        end = finish_of(head.done(1, 2, {1: 75}))
        assert (end.state, end.exit_code) == (RunState.CANCELLED, 75)

    @pytest.mark.parametrize("stopped", ["while it is asked", "afterwards"])
    def test_an_attempt_that_did_not_come_to_its_first_step_has_lost_nothing_of_that(self, stopped: str) -> None:
        head = rescuing_run()
        killed(head)
        head.holds(0, 1, {})
        head.holds(1, 1, {1: 7})
        head.kept(1, 1, None)
        all_ready(head)
        killed(head)
        head.holds(0, 2, {})
        if stopped == "afterwards":
            assert recorded(head.holds(1, 2, {1: None})) == ["not_rescued"]
            assert sent(head.stop(0, "TERM", 15)) == []
        else:
            assert sent(head.stop(0, "TERM", 15)) == []
            assert sent(head.holds(1, 2, {1: None})) == [("kill", None)]
        effects = all_ready(head)
        assert sent(effects) == [("start", None), ("stop", None)]
        assert next(e for e in effects if isinstance(e, Send)).message["memory_counts"]

        killed(head)
        head.holds(0, 3, {})
        assert sent(at(head, GRACE_S, 0, 1)) == [("kill", None)], "there is no time for another one"
        assert finish_of(all_ready(head)).exit_code == 143

    def test_the_next_attempt_is_waited_for_as_long_as_a_stop_may_take(self) -> None:
        head = rescuing_run()
        killed(head)
        head.holds(0, 1, {})
        head.holds(1, 1, {1: 7})
        head.kept(1, 1, None)
        head.ready(0)
        head.stop(0, "TERM", 15)
        for now_s in (10.0, 20.0, GRACE_S - 3.1):
            assert sent(at(head, now_s, 0, 1)) == []
        assert sent(at(head, GRACE_S - 3.0, 0, 1)) == [("kill", None)]
        assert finish_of(all_ready(head)).exit_code == 143

    @pytest.mark.parametrize("newest", ["rescued to disk", "saved"])
    def test_what_is_on_disk_needs_no_attempt_more(self, newest: str) -> None:
        head = rescuing_run()
        if newest == "saved":
            killed(head)
            head.holds(0, 1, {})
            head.holds(1, 1, {1: 7})
            head.kept(1, 1, None)
            all_ready(head)
            head.saved(2)
            killed(head)
            head.holds(0, 2, {})
            head.holds(1, 2, {})
        else:
            head.lost(0, "closed")
            head.holds(1, 1, {1: 7})
            at(head, RETURN_S, 1)
            assert "checkpoint_saved" in recorded(head.kept(1, 1, None))
        assert sent(head.stop(1, "TERM", 15))[-1] == ("kill", None)
        head.joined(0, "n0")
        assert finish_of(all_ready(head)).exit_code == (143 if newest == "saved" else 75)


def test_a_head_whose_disk_is_lost_goes_on_with_what_the_others_know_and_hold() -> None:
    head = make_head(rescues=True)
    head.joined(0, "n0")
    head.ready(0)
    effects = head.recall(1, "n1", attempt=4, restarts=2, holds=4)
    assert recorded(effects) == ["record_lost", "node_lost", "failure", "attempt_ended", "restarting", "node_joined"]
    assert head.phase is Phase.RESCUING
    assert sent(head.joined(1, "n1", holds=4)) == [("report", 1)]
    head.holds(1, 4, {1: 17})
    assert recorded(head.kept(4, 1, None)) == ["rescued"]
    assert ("start", None) in sent(all_ready(head))
    assert (head.attempt, head.restarts) == (5, 3)


def test_a_head_whose_disk_is_lost_gives_no_number_of_an_attempt_twice() -> None:
    head = make_head()
    head.joined(0, "n0")
    head.ready(0)
    assert recorded(head.recall(1, "n1", attempt=4, restarts=0, holds=None)) == ["record_lost"]
    assert head.recall(1, "n1", attempt=4, restarts=0, holds=None) == [], "once"
    assert ("start", None) in sent(all_ready(head, join=True))
    assert head.attempt == 5
    assert head.recall(1, "n1", attempt=7, restarts=0, holds=7) == [], "it has started one itself"
