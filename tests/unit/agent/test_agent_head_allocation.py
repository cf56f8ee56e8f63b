"""The head agent in a job of SLURM: what ends the allocation, and not the run."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from test_agent_head import all_ready, failure, finish_of, recorded, running, said, sent

from launcher.agent.effects import Effect, Finish, Leave, Record
from launcher.agent.head import REJOIN_S, Head, Phase
from launcher.agent.limits import Limit
from launcher.agent.members import SILENCE_S
from launcher.agent.stopping import ONE_SIGNAL_S
from launcher.agent.weighing import SETTLE_S
from launcher.runs.states import Cause, RunState

GRACE_S = 30.0
TERM = int(signal.SIGTERM)


def in_job(nodes: int = 2, **fields: Any) -> Head:
    return running(nodes, **{"allocation": 1, **fields})


def leave_of(effects: list[Effect]) -> Leave:
    (leave,) = [effect for effect in effects if isinstance(effect, Leave)]
    assert not [effect for effect in effects if isinstance(effect, Finish)], "the run is not over by this"
    return leave


def all_done(head: Head, code: int) -> list[Effect]:
    return [effect for node in range(head.node_count) for effect in head.done(node, head.attempt, {node: code})]


def all_killed(head: Head) -> list[Effect]:
    return all_ready(head)


def test_a_stop_ends_the_allocation_with_what_was_saved() -> None:
    head = in_job()
    assert recorded(head.stop(0, "TERM", TERM)) == ["stop_requested"]
    leave = leave_of(all_done(head, 75))
    assert leave == Leave(Cause.SIGNAL, 75, "TERM", saved=True)


def test_the_signal_of_all_processes_is_one_stop() -> None:
    """F049: SLURM signals the agents of all nodes and their parents; that ends nobody at once."""
    head = in_job()
    effects = head.stop(0, "TERM", TERM)
    for node, at_s in ((0, 0.01), (1, 0.02), (1, 0.03), (0, ONE_SIGNAL_S - 0.1)):
        head.now_s = at_s
        effects += head.stop(node, "TERM", TERM)
    assert recorded(effects).count("stop_requested") == 1
    assert head.phase is Phase.STOPPING
    head.now_s = GRACE_S - 0.1
    for node in (0, 1):
        head.heard(node)
    assert head.tick() == []


def test_a_later_stop_shortens_the_wait_and_ends_nothing_at_once() -> None:
    head = in_job()
    head.stop(0, "TERM", TERM)
    head.now_s = 5.0
    assert head.stop(0, "TERM", TERM) == []
    assert head.phase is Phase.STOPPING
    head.now_s = 5.0 + GRACE_S / 2
    for node in (0, 1):
        head.heard(node)
    assert "the grace time is over" in said(head.tick())


def test_workers_that_die_of_the_stop_have_saved_nothing() -> None:
    head = in_job()
    head.stop(0, "TERM", TERM)
    head.failed(failure(head, cause=Cause.SIGNAL, exit_code=143))
    assert leave_of(all_killed(head)) == Leave(Cause.SIGNAL, 143, "TERM", saved=False)


def test_a_worker_that_dies_of_slurms_signal_before_its_agent_speaks_is_no_crash() -> None:
    head = in_job()
    assert recorded(head.failed(failure(head, cause=Cause.SIGNAL, exit_code=143))) == ["failure"]
    head.now_s = 0.3
    head.stop(0, "TERM", TERM)
    assert leave_of(all_killed(head)).reason == "TERM"
    assert head.restarts == 0


def test_a_worker_that_dies_of_term_alone_is_restarted() -> None:
    head = in_job()
    head.failed(failure(head, cause=Cause.SIGNAL, exit_code=143))
    head.now_s = SETTLE_S + 0.1
    assert "restarting" in recorded(head.tick())


def test_workers_that_were_asked_by_others_have_saved() -> None:
    """F050: TERM to one worker; the ranks have agreed among themselves."""
    leave = leave_of(all_done(in_job(), 75))
    assert (leave.cause, leave.saved, leave.reason) == (Cause.SIGNAL, True, "a worker was asked to stop")


def test_it_stops_in_time_for_the_end_of_the_job() -> None:
    head = in_job(ends_s=600.0)
    for node in (0, 1):
        head.heard(node)
    head.now_s = 600.0 - GRACE_S - 1
    for node in (0, 1):
        head.heard(node)
    assert head.tick() == []
    head.now_s = 600.0 - GRACE_S
    assert recorded(head.tick()) == ["stop_requested"]
    leave = leave_of(all_done(head, 75))
    assert (leave.cause, leave.reason) == (Cause.TIME_LIMIT, "the job ends in 30 s")


def test_of_a_job_that_is_shorter_than_the_grace_half_is_for_training() -> None:
    head = in_job(ends_s=20.0)
    head.now_s = 9.0
    assert head.tick() == []
    head.now_s = 10.0
    assert recorded(head.tick()) == ["stop_requested"]


@pytest.mark.parametrize(
    ("ends_s", "ignored"), [(None, False), (2 * GRACE_S + 1, True), (2 * GRACE_S - 1, False), (3600.0, True)]
)
def test_a_warning_counts_when_the_end_is_near_or_unknown(ends_s: float | None, *, ignored: bool) -> None:
    """F015: SLURM may send it a minute early."""
    head = in_job(ends_s=ends_s)
    effects = head.warned(signal.SIGUSR1)
    assert recorded(effects) == (["signal_heard"] if ignored else ["signal_heard", "stop_requested"])
    (heard,) = [effect for effect in effects if isinstance(effect, Record) and effect.event == "signal_heard"]
    assert heard.fields == {"signal": "SIGUSR1", "seconds_left": ends_s, "ignored": ignored}
    assert head.phase is (Phase.RUNNING if ignored else Phase.STOPPING)


def test_a_warning_to_all_processes_is_heard_once() -> None:
    head = in_job(ends_s=3600.0)
    effects = [*head.warned(signal.SIGUSR1), *head.warned(signal.SIGUSR1)]
    head.now_s = ONE_SIGNAL_S + 1
    assert len(recorded([*effects, *head.warned(signal.SIGUSR1)])) == 2


def test_the_orders_of_f049() -> None:
    """F049: USR2, then TERM: one stop."""
    head = in_job()
    head.warned(signal.SIGUSR2)
    head.now_s = 0.5
    assert head.stop(0, "TERM", TERM) == []
    assert head.warned(signal.SIGUSR1) == []
    assert leave_of(all_done(head, 75)).reason == "SIGUSR2"


def test_a_lost_node_that_stays_away_ends_the_allocation() -> None:
    """F094: named, and it costs nothing of the budget."""
    head = in_job(max_restarts=0)
    head.now_s = SILENCE_S + 1
    head.heard(0)
    assert recorded(head.tick()) == ["node_lost", "failure", "attempt_ended", "restarting"]
    assert head.restarts == 0
    head.ready(0)
    head.now_s += REJOIN_S + 1
    head.heard(0)
    leave = leave_of(head.tick())
    assert (leave.cause, leave.node, leave.host, leave.saved) == (Cause.NODE_LOST, 1, "n1", False)


def test_an_agent_that_comes_back_goes_on_in_the_same_allocation() -> None:
    """F064."""
    head = in_job(max_restarts=0)
    assert "restarting" in recorded(head.lost(1, "closed by the other side"))
    head.ready(0)
    head.joined(1, "n1")
    assert recorded(head.ready(1)) == ["attempt_started"]
    assert (head.attempt, head.restarts) == (2, 0)


def test_an_agent_that_is_lost_without_a_way_to_resume_ends_the_run() -> None:
    head = in_job(resumable=False)
    head.lost(1, "closed by the other side")
    assert finish_of(head.ready(0)).cause is Cause.NODE_LOST


def test_the_end_of_the_run_is_the_heads_word_in_a_job_too() -> None:
    assert finish_of(all_done(in_job(), 0)).state is RunState.SUCCEEDED
    head = in_job(max_restarts=0)
    head.failed(failure(head, exit_code=7))
    assert finish_of(all_killed(head)).exit_code == 7


@pytest.mark.parametrize("allocation", [None, 1])
def test_a_limit_of_the_run_ends_it_anywhere(allocation: int | None) -> None:
    head = running(2, allocation=allocation, limit=Limit(at_s=50.0, reason="limits.wall: 50 s of 50 s are used"))
    head.now_s = 50.0
    for node in (0, 1):
        head.heard(node)
    assert recorded(head.tick()) == ["stop_requested"]
    finish = finish_of(all_done(head, 75))
    assert (finish.state, finish.cause, finish.exit_code) == (RunState.TIMED_OUT, Cause.TIME_LIMIT, 75)
    assert finish.reason == "limits.wall: 50 s of 50 s are used"


def test_a_head_that_was_cut_off_gives_way_to_the_next_allocation() -> None:
    head = in_job()
    assert sent(head.superseded()) == [("kill", None)]
    assert leave_of(all_killed(head)).reason == "a later allocation of this run has begun"
    assert head.superseded() == []


def test_the_attempt_says_which_allocation_it_is_in() -> None:
    head = in_job()
    assert head.attempt == 1
    head.failed(failure(head))
    started = [effect for effect in all_killed(head) if isinstance(effect, Record)]
    assert started[0].fields["allocation"] == 1


def test_a_later_stop_shortens_the_wait_for_the_one_who_saves_for_all() -> None:
    head = in_job(rescues=True)
    head.stop(0, "TERM", TERM)
    head.failed(failure(head, cause=Cause.SIGNAL, exit_code=137))
    head.holds(0, 1, {})
    assert sent(head.holds(1, 1, {1: 7})) == [("keep", 1)]
    head.now_s = 5.0
    assert head.stop(0, "TERM", TERM) == []
    for now_s, phase in ((5.0 + GRACE_S / 2 - 0.1, Phase.RESCUING), (5.0 + GRACE_S / 2, Phase.ENDING)):
        head.now_s = now_s
        for node in (0, 1):
            head.heard(node)
        head.tick()
        assert head.phase is phase
