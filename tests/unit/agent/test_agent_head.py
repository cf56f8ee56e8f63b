"""The head's decisions, without a process or a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launcher.agent.causes import Failure
from launcher.agent.effects import Effect, Finish, Record, Say, Send
from launcher.agent.head import WAITING_EVERY_S, Head, Phase
from launcher.agent.members import SILENCE_S
from launcher.agent.weighing import SETTLE_S, STACKS_S
from launcher.runs.states import POLICIES, Cause, RunState

GRACE_S = 30.0


def make_head(nodes: int = 2, **fields: Any) -> Head:
    ports = iter(range(5000, 6000))
    known: dict[str, Any] = {
        "node_count": nodes,
        "max_restarts": 3,
        "resumable": True,
        "grace_s": GRACE_S,
        "join_timeout_s": 300.0,
        "pick_port": lambda: next(ports),
        "hosts": {index: f"n{index}" for index in range(nodes)},
        "master_addr": "127.0.0.1",
        "now_s": 0.0,
    }
    return Head(**{**known, **fields})


def running(nodes: int = 2, **fields: Any) -> Head:
    head = make_head(nodes, **fields)
    all_ready(head, join=True)
    assert head.phase is Phase.RUNNING
    return head


def all_ready(head: Head, *, join: bool = False) -> list[Effect]:
    effects: list[Effect] = []
    for node in range(head.node_count):
        effects += head.joined(node, f"n{node}") if join else []
        effects += head.ready(node)
    return effects


def failure(head: Head, node: int = 0, rank: int = 0, cause: Cause = Cause.WORKER_ERROR, **fields: Any) -> Failure:
    known: dict[str, Any] = {
        "attempt": head.attempt,
        "pid": 1000 + rank,
        "exit_code": 1,
        "message": "ValueError: boom",
        "place": "t.py:1 in f",
        "log": "x",
    }
    return Failure(node=node, rank=rank, cause=cause, **{**known, **fields})


def sent(effects: list[Effect]) -> list[tuple[str, int | None]]:
    return [(effect.message["type"], effect.node) for effect in effects if isinstance(effect, Send)]


def recorded(effects: list[Effect]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Record)]


def said(effects: list[Effect]) -> str:
    return "\n".join(effect.text for effect in effects if isinstance(effect, Say))


def finish_of(effects: list[Effect]) -> Finish:
    (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
    return finish


class TestStart:
    def test_waits_for_the_last_node_and_starts_all_with_one_port(self) -> None:
        head = make_head(3)
        for node in range(3):
            assert sent(head.joined(node, f"n{node}")) == [("welcome", node)]
        assert head.ready(2) == []
        assert head.ready(0) == []
        effects = head.ready(1)
        assert recorded(effects) == ["attempt_started"]
        (start,) = [effect for effect in effects if isinstance(effect, Send)]
        assert start.node is None
        assert start.message == {
            "type": "start",
            "attempt": 1,
            "restarts": 0,
            "master_addr": "127.0.0.1",
            "master_port": 5000,
            "newest": None,
            "memory_counts": False,
        }

    def test_each_attempt_has_a_fresh_port(self) -> None:
        head = running()
        head.failed(failure(head))
        effects = all_ready(head)
        (start,) = [effect.message for effect in effects if isinstance(effect, Send)]
        assert (start["attempt"], start["master_port"], start["restarts"]) == (2, 5001, 1)

    def test_attempt_numbers_go_on_from_the_run_directory(self) -> None:
        head = running(attempt=4)
        assert head.attempt == 5

    def test_says_every_ten_seconds_who_is_missing(self) -> None:
        head = make_head(3)
        head.joined(0, "n0")
        head.ready(0)
        head.now_s = WAITING_EVERY_S - 0.1
        assert head.tick() == []
        for times in (1, 2):
            for node in range(1):
                head.heard(node)
            head.now_s = times * WAITING_EVERY_S
            head.heard(0)
            effects = head.tick()
            assert recorded(effects) == ["waiting"]
            assert said(effects) == f"waiting for node 1 (n1), node 2 (n2), {times * 10} s"

    def test_a_node_that_never_comes_ends_the_run_with_its_name(self) -> None:
        head = make_head(2, join_timeout_s=60.0)
        head.joined(0, "n0")
        head.ready(0)
        head.now_s = 60.1
        head.heard(0)
        effects = head.tick()
        assert sent(effects)[0] == ("kill", None)
        end = finish_of(effects + head.ready(0))
        assert (end.state, end.cause, end.exit_code) == (RunState.FAILED, Cause.RENDEZVOUS, 1)
        assert "node 1 (n1) did not come within 60 s" in end.reason

    def test_a_node_rank_claimed_twice_ends_the_run_at_once(self) -> None:
        """F092"""
        head = make_head(2)
        head.joined(0, "n0")
        head.ready(0)
        effects = head.duplicate(0, "n7")
        end = finish_of(effects)
        assert (end.state, end.cause, end.exit_code) == (RunState.FAILED, Cause.RENDEZVOUS, 1)
        assert "node rank 0 was claimed twice: by n0 and by n7" in said(effects)

    def test_a_rank_claimed_twice_after_the_end_changes_nothing(self) -> None:
        head = running()
        for node in range(2):
            head.done(node, 1, {node: 0})
        assert head.phase is Phase.OVER
        assert head.duplicate(1, "n7") == []


class TestEnd:
    def test_succeeds_when_every_node_is_done(self) -> None:
        head = running()
        assert head.done(1, 1, {1: 0}) == []
        effects = head.done(0, 1, {0: 0})
        assert finish_of(effects) == Finish(RunState.SUCCEEDED, Cause.DONE, 0, "all workers finished")
        assert sent(effects) == [("end", None)]

    def test_done_of_an_earlier_attempt_does_not_count(self) -> None:
        head = running()
        head.failed(failure(head))
        all_ready(head)
        head.done(0, 1, {0: 0})
        head.done(1, 1, {1: 0})
        assert head.phase is Phase.RUNNING

    def test_workers_that_leave_with_75_on_their_own_are_a_stop(self) -> None:
        head = running()
        head.done(0, 1, {0: 75})
        end = finish_of(head.done(1, 1, {1: 0}))
        assert (end.state, end.exit_code) == (RunState.CANCELLED, 75)

    def test_the_end_is_told_before_the_agents_are_let_go(self) -> None:
        """result.json is written on Finish, so it is there when the agents end."""
        head = running()
        head.done(1, 1, {1: 0})
        kinds = [type(effect) for effect in head.done(0, 1, {0: 0})]
        assert kinds == [Record, Finish, Send]


class TestFailure:
    @pytest.mark.parametrize(
        "cause", [cause for cause in Cause if POLICIES[cause].retry and cause not in (Cause.PEER_LOST, Cause.HANG)]
    )
    def test_what_may_pass_is_restarted(self, cause: Cause) -> None:
        head = running()
        effects = head.failed(failure(head, node=1, rank=3, cause=cause))
        assert recorded(effects) == ["failure", "attempt_ended", "restarting"]
        assert sent(effects) == [("kill", None)]
        assert "rank 3 on node 1: ValueError: boom; restarting (restart 1 of 3)" in said(effects)
        assert head.phase is Phase.JOINING

    @pytest.mark.parametrize("cause", [Cause.USAGE, Cause.OOM, Cause.NAN])
    def test_what_repeats_is_not_restarted_and_keeps_its_exit_code(self, cause: Cause) -> None:
        head = running()
        effects = head.failed(failure(head, cause=cause, exit_code=2))
        assert recorded(effects) == ["failure", "attempt_ended"]
        end = finish_of(all_ready(head))
        assert (end.state, end.cause, end.exit_code) == (RunState.FAILED, cause, 2)
        assert f"not retried: {POLICIES[cause].why_not}" in end.reason

    def test_without_resume_nothing_is_restarted_and_the_reason_says_so(self) -> None:
        head = running(resumable=False)
        head.failed(failure(head, exit_code=7))
        end = finish_of(all_ready(head))
        assert end.exit_code == 7
        assert "ValueError: boom; not retried: the script declares no `resume:`" in end.reason

    def test_a_worker_that_is_killed_with_the_others_is_no_failure(self) -> None:
        head = running(resumable=False)
        head.failed(failure(head, exit_code=7))
        assert head.failed(failure(head, node=1, exit_code=137, cause=Cause.SIGNAL)) == []
        assert recorded(head.failed(failure(head, node=1, exit_code=1))) == ["failure"]

    def test_a_lost_peer_that_is_killed_with_the_others_is_one_by_its_error_file(self) -> None:
        head = running(resumable=False)
        head.failed(failure(head))
        assert recorded(head.failed(failure(head, node=1, exit_code=137, cause=Cause.PEER_LOST))) == ["failure"]

    def test_the_same_exception_at_the_same_step_twice_ends_the_run(self) -> None:
        head = running()
        head.failed(failure(head, exception="ValueError", step=7))
        all_ready(head)
        effects = head.failed(failure(head, exception="ValueError", step=7))
        (ended,) = [e for e in effects if isinstance(e, Record) and e.event == "attempt_ended"]
        assert (ended.fields["cause"], ended.fields["step"]) == ("repeated", 7)
        end = finish_of(all_ready(head))
        assert (end.cause, end.policy) == (Cause.REPEATED, POLICIES[Cause.REPEATED].why_not)
        assert head.first_failure is not None
        assert head.first_failure.cause is Cause.WORKER_ERROR
        assert head.restarts == 1

    def test_the_successor_of_a_head_knows_what_came_before(self) -> None:
        head = make_head(attempt=1)
        before = failure(head, exception="ValueError", step=7)
        head = make_head(attempt=1, restarts=1, previous=before)
        all_ready(head, join=True)
        head.failed(failure(head, exception="ValueError", step=7))
        assert finish_of(all_ready(head)).cause is Cause.REPEATED

    @pytest.mark.parametrize("budget", [0, 1, 3])
    def test_an_exhausted_budget_ends_with_the_last_exit_code(self, budget: int) -> None:
        """F065"""
        head = running(max_restarts=budget)
        for step in range(budget):
            head.failed(failure(head, exit_code=7, step=step))
            all_ready(head)
        head.failed(failure(head, exit_code=9))
        end = finish_of(all_ready(head))
        assert head.attempt == budget + 1
        assert end.exit_code == 9
        assert end.policy == ("no restart is left" if budget else "faults.max_restarts is 0")

    def test_two_failures_of_one_attempt_cost_one_restart(self) -> None:
        head = running()
        head.failed(failure(head, rank=0))
        assert head.failed(failure(head, node=1, rank=1)) == []
        assert head.restarts == 1

    def test_a_failure_of_an_earlier_attempt_does_nothing(self) -> None:
        head = running()
        late = failure(head, node=1, rank=1)
        head.failed(failure(head))
        all_ready(head)
        assert head.failed(late) == []
        assert head.phase is Phase.RUNNING

    def test_all_nodes_have_to_be_ready_again_before_the_next_start(self) -> None:
        head = running()
        head.ready(1)  # said too early: its workers run
        head.failed(failure(head))
        assert head.ready(0) == []
        assert head.attempt == 1
        assert recorded(head.ready(1)) == ["attempt_started"]


class TestFirstFailure:
    def test_a_lost_peer_waits_for_the_error_that_it_comes_from(self) -> None:
        head = running()
        assert recorded(head.failed(failure(head, rank=1, cause=Cause.PEER_LOST))) == ["failure"]
        assert head.phase is Phase.RUNNING
        head.now_s = SETTLE_S / 2
        effects = head.failed(failure(head, rank=0, message="ValueError: the real one"))
        assert "the real one" in said(effects)
        assert head.first_failure is not None
        assert head.first_failure.rank == 0

    def test_a_lost_peer_alone_counts_after_a_second(self) -> None:
        head = running()
        head.failed(failure(head, rank=1, cause=Cause.PEER_LOST))
        head.failed(failure(head, rank=0, cause=Cause.PEER_LOST))
        assert head.tick() == []
        head.now_s = SETTLE_S
        effects = head.tick()
        assert recorded(effects) == ["attempt_ended", "restarting"]
        assert head.first_failure is not None
        assert head.first_failure.rank == 1

    def test_suspects_of_one_attempt_do_not_reach_the_next(self) -> None:
        head = running()
        head.failed(failure(head, rank=1, cause=Cause.PEER_LOST))
        head.failed(failure(head, rank=0))
        all_ready(head)
        head.now_s = 10 * SETTLE_S
        for node in range(2):
            head.heard(node)
        assert head.tick() == []


class TestLostNode:
    def test_restarts_when_the_node_has_come_back(self) -> None:
        head = running()
        effects = head.lost(1, "closed by the other side")
        assert recorded(effects) == ["node_lost", "failure", "attempt_ended", "restarting"]
        assert head.ready(0) == []
        head.joined(1, "n1")
        assert recorded(head.ready(1)) == ["attempt_started"]

    def test_after_its_workers_are_done_it_is_not_missed(self) -> None:
        head = running()
        head.done(1, 1, {1: 0})
        assert recorded(head.lost(1, "closed")) == ["node_lost"]
        assert finish_of(head.done(0, 1, {0: 0})).state is RunState.SUCCEEDED

    def test_in_a_restart_it_is_waited_for_and_named(self) -> None:
        head = running(join_timeout_s=60.0)
        head.lost(1, "closed")
        head.ready(0)
        head.now_s = 61.0
        head.heard(0)
        end = finish_of(head.tick() + head.ready(0))
        assert end.cause is Cause.NODE_LOST
        assert "node 1 (n1)" in end.reason

    def test_silence_counts_as_lost(self) -> None:
        head = running()
        head.now_s = SILENCE_S + 0.1
        head.heard(0)
        effects = head.tick()
        assert "node_lost" in recorded(effects)
        assert f"nothing heard for {SILENCE_S:g} s" in said(effects)

    def test_one_that_was_suspended_while_ready_is_asked_again_and_belongs_again(self) -> None:
        head = make_head()
        head.joined(1, "n1")
        head.ready(1)
        head.now_s = SILENCE_S + 0.1
        effects = head.tick()
        assert sent(effects) == [("kill", 1)]
        head.joined(0, "n0")
        assert head.ready(0) == []
        head.heard(1)  # it runs on, and answers the order that waited for it
        assert recorded(head.ready(1)) == ["attempt_started"]
        head.done(0, 1, {0: 0})
        head.failed(failure(head, node=1, cause=Cause.USAGE))
        assert head.ready(0) == []  # node 1 is waited for

    def test_the_successor_of_a_lost_head_restarts_everything(self) -> None:
        head = make_head(attempt=2, restarts=1)
        effects = head.succeed()
        assert recorded(effects) == ["node_lost", "failure", "attempt_ended", "restarting"]
        effects = all_ready(head, join=True)
        assert head.attempt == 3
        assert head.restarts == 2


class TestStop:
    def stopping(self, **fields: Any) -> Head:
        head = running(**fields)
        effects = head.stop(0, "Ctrl-C", 2)
        assert recorded(effects) == ["stop_requested"]
        assert sent(effects) == [("stop", None)]
        return head

    def test_saved_everywhere_is_75(self) -> None:
        head = self.stopping()
        head.done(0, 1, {0: 75})
        end = finish_of(head.done(1, 1, {1: 75}))
        assert (end.state, end.cause, end.exit_code) == (RunState.CANCELLED, Cause.CANCELLED, 75)
        assert end.reason == "Ctrl-C"

    def test_finished_before_it_heard_is_a_success(self) -> None:
        head = self.stopping()
        head.done(0, 1, {0: 0})
        assert finish_of(head.done(1, 1, {1: 0})).state is RunState.SUCCEEDED

    @pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143), (1, 129)])
    def test_killed_by_the_stop_is_the_code_of_the_request(self, signum: int, code: int) -> None:
        head = running()
        head.stop(1, "a signal", signum)
        head.failed(failure(head, exit_code=143, cause=Cause.SIGNAL))
        assert finish_of(all_ready(head)).exit_code == code

    def test_an_error_while_stopping_keeps_its_exit_code_and_restarts_nothing(self) -> None:
        head = self.stopping()
        head.failed(failure(head, exit_code=7))
        end = finish_of(all_ready(head))
        assert (end.state, end.exit_code) == (RunState.CANCELLED, 7)
        assert head.restarts == 0

    def test_the_end_of_the_grace_time_is_the_end(self) -> None:
        head = self.stopping()
        for now_s in (10.0, 20.0, GRACE_S - 0.1):
            head.now_s = now_s
            for node in range(2):
                head.heard(node)
            assert head.tick() == []
        head.now_s = GRACE_S
        effects = head.tick()
        assert sent(effects) == [("kill", None)]
        assert "grace time is over" in said(effects)
        assert finish_of(all_ready(head)).exit_code == 130

    def test_a_shorter_grace_may_be_asked_for_but_not_a_longer(self) -> None:
        for asked_s, granted_s in ((5.0, 5.0), (500.0, GRACE_S), (None, GRACE_S)):
            head = running()
            (record,) = [e for e in head.stop(0, "x", 15, asked_s) if isinstance(e, Record)]
            assert record.fields["grace_s"] == granted_s

    def test_the_second_request_through_one_node_is_immediate(self) -> None:
        head = self.stopping()
        assert head.stop(1, "Ctrl-C", 2) == []  # the same request, through the other agent
        assert sent(head.stop(0, "Ctrl-C", 2)) == [("kill", None)]
        assert finish_of(all_ready(head)).exit_code == 130

    def test_one_that_every_process_hears_is_one_request(self) -> None:
        """SkyPilot signals the agent, and who has started it, which passes it on."""
        head = running(all_signalled=True)
        head.stop(0, "SIGTERM", 15)
        head.now_s += 0.5
        assert head.stop(0, "SIGTERM", 15) == []
        head.now_s += 5.0
        assert Say("second request to stop: ending now") in head.stop(0, "SIGTERM", 15)

    def test_before_the_start_it_is_immediate(self) -> None:
        head = make_head()
        head.joined(0, "n0")
        effects = head.stop(0, "TERM", 15)
        assert sent(effects)[-1] == ("kill", None)
        assert finish_of(head.ready(0)).exit_code == 143

    def test_nothing_restarts_after_it(self) -> None:
        head = running()
        head.failed(failure(head))
        head.stop(0, "TERM", 15)
        effects = all_ready(head)
        assert finish_of(effects).exit_code == 143
        assert head.attempt == 1

    def test_a_node_lost_in_the_stop_ends_it(self) -> None:
        head = self.stopping()
        head.lost(1, "closed")
        assert finish_of(head.ready(0)).exit_code == 130

    def test_the_death_of_the_launcher_is_its_own_cause(self) -> None:
        head = running()
        head.stop(0, "the launcher was killed", 15, 5.0)
        head.done(0, 1, {0: 75})
        assert finish_of(head.done(1, 1, {1: 75})).cause is Cause.LAUNCHER_LOST


@pytest.mark.parametrize(
    "event",
    [
        lambda head: head.ready(0),
        lambda head: head.done(0, head.attempt, {0: 0}),
        lambda head: head.failed(failure(head)),
        lambda head: head.lost(1, "closed"),
        lambda head: head.stop(0, "TERM", 15),
        lambda head: head.tick(),
        lambda head: head.duplicate(1, "n9"),
    ],
)
def test_nothing_happens_after_the_end(event: Callable[[Head], list[Effect]]) -> None:
    head = running()
    for node in range(2):
        head.done(node, 1, {node: 0})
    assert event(head) == []


def test_who_comes_after_the_end_is_sent_away() -> None:
    head = running()
    for node in range(2):
        head.done(node, 1, {node: 0})
    assert sent(head.joined(1, "n1")) == [("end", 1)]


class TestHang:
    """F072: a collective that timed out. Who waited is known; the others are asked where they are before they end."""

    def test_the_others_show_their_stacks_before_they_are_killed(self) -> None:
        head = running()
        effects = head.failed(failure(head, cause=Cause.HANG))
        assert sent(effects) == [("stacks", None)]
        assert recorded(effects) == ["failure", "stacks_requested"]
        assert "rank 0 on node 0 waited in vain" in said(effects)
        head.now_s += STACKS_S - 0.1
        assert head.tick() == []
        head.now_s += 0.2
        effects = head.tick()
        assert sent(effects) == [("kill", None)]
        assert recorded(effects) == ["attempt_ended", "restarting"]
        assert head.first_failure is not None
        assert head.first_failure.cause is Cause.HANG

    def test_who_did_not_come_is_named(self) -> None:
        """F017: those that still run when all who waited have timed out."""
        head = running(workers_per_node=2, max_restarts=0)
        head.failed(failure(head, rank=0, cause=Cause.HANG, message="Timed out waiting 4000ms\nmore"))
        head.failed(failure(head, rank=1, cause=Cause.PEER_LOST))
        head.failed(failure(head, node=1, rank=3, cause=Cause.HANG))
        head.now_s += STACKS_S
        head.tick()
        assert head.first_failure is not None
        assert head.first_failure.message == "Timed out waiting 4000ms; still running then: rank 2 on node 1 (n1)\nmore"
        assert "rank 2 on node 1 (n1)" in finish_of(all_ready(head)).reason

    def test_of_many_that_did_not_come_some_are_named(self) -> None:
        head = running(workers_per_node=8, max_restarts=0)
        head.failed(failure(head, rank=0, cause=Cause.HANG))
        head.now_s += STACKS_S
        head.tick()
        assert head.first_failure is not None
        assert head.first_failure.headline.endswith("rank 4 on node 0 (n0) and 11 more")

    def test_what_fails_meanwhile_is_recorded_and_changes_nothing(self) -> None:
        head = running(max_restarts=0)
        head.failed(failure(head, cause=Cause.HANG))
        assert recorded(head.failed(failure(head, node=1, rank=1, cause=Cause.PEER_LOST))) == ["failure"]
        assert recorded(head.failed(failure(head, node=1, rank=1))) == ["failure"]
        head.now_s += STACKS_S
        head.tick()
        assert finish_of(all_ready(head)).cause is Cause.HANG

    def test_a_stop_does_not_wait_for_the_stacks(self) -> None:
        head = running()
        head.failed(failure(head, cause=Cause.HANG, exit_code=1))
        assert sent(head.stop(0, "Ctrl-C", 2)) == [("kill", None)]
        end = finish_of(all_ready(head))
        assert (end.state, end.exit_code) == (RunState.CANCELLED, 1)

    def test_the_next_attempt_has_forgotten_it(self) -> None:
        head = running()
        head.failed(failure(head, cause=Cause.HANG))
        head.now_s += STACKS_S
        for node in range(2):
            head.heard(node)
        head.tick()
        all_ready(head)
        assert head.phase is Phase.RUNNING
        assert sent(head.failed(failure(head))) == [("kill", None)]


def test_the_newest_checkpoint_is_looked_up_once_per_attempt_and_goes_to_all_nodes() -> None:
    found = iter([None, "out/checkpoint-500"])
    head = make_head(find_newest=lambda: next(found))
    effects = all_ready(head, join=True)
    head.failed(failure(head))
    again = all_ready(head)
    orders = [e for e in (*effects, *again) if isinstance(e, Send) and e.message["type"] == "start"]
    assert [(order.node, order.message["newest"]) for order in orders] == [(None, None), (None, "out/checkpoint-500")]
    records = [e for e in (*effects, *again) if isinstance(e, Record) and e.event == "attempt_started"]
    assert [record.fields.get("resumes_from") for record in records] == [None, "out/checkpoint-500"]
