"""What a watcher does about what it sees, and how it says that a run has ended of which no head agent could."""

from __future__ import annotations

import signal
from typing import Any

from launcher.agent.effects import Finish
from launcher.executors.places import NodeState
from launcher.executors.watching import BACKSTOP_S, Lost, Replace, Signal, Watching, earlier, finish_of
from launcher.runs.states import Cause, RunState

UP = NodeState(alive=True)
DONE = NodeState(alive=False, exit_code=0)
KILLED = NodeState(alive=False, exit_code=137, killed=True, detail="its container was killed by SIGKILL")
FAILED = NodeState(alive=False, exit_code=3, detail="its container ended with exit code 3")
SILENT = NodeState(alive=None, detail="n1 does not answer")
HOSTS = {0: "n0", 1: "n1"}


def watching(**fields: Any) -> Watching:
    return Watching(**{"nodes": (0, 1), "max_replaced": 2, "grace_s": 30.0, **fields})


def look(of: Watching, *states: NodeState, at: float = 0.0, has_result: bool = False, stop_asked: bool = False) -> Any:
    seen = dict(enumerate(states))
    left = {node: state for node, state in seen.items() if node not in of.ended}
    return of.look(left, has_result=has_result, stop_asked=stop_asked, now_s=at)


def test_a_killed_node_is_replaced_within_the_budget_and_then_ends_the_run() -> None:
    w = watching(max_replaced=1)
    assert look(w, UP, KILLED) == [Replace(1, KILLED)]
    assert look(w, UP, UP) == []
    assert look(w, UP, KILLED) == [Lost(1, KILLED), Signal((0,), signal.SIGTERM)]
    assert look(w, UP, KILLED, at=33.0) == []
    assert look(w, UP, KILLED, at=33.1) == [Signal((0,), signal.SIGKILL)]
    look(w, KILLED, KILLED, at=34.0)
    assert w.is_over
    finish = finish_of([], w, HOSTS, "")
    assert (finish.state, finish.cause, finish.exit_code) == (RunState.FAILED, Cause.NODE_LOST, 1)
    assert finish.reason == "node 1 (n1) was lost: its container was killed by SIGKILL, after 1 replacement"


def test_a_machine_that_is_silent_is_left_alone() -> None:
    w = watching()
    assert look(w, UP, SILENT) == []
    assert look(w, UP, SILENT, at=1e6) == []
    assert not w.is_over


def test_a_node_that_ended_by_itself_badly_is_not_replaced() -> None:
    w = watching()
    assert look(w, UP, FAILED) == [Lost(1, FAILED), Signal((0,), signal.SIGTERM)]
    look(w, DONE, FAILED)
    assert finish_of([], w, HOSTS, "first\nImportError: no torch") == Finish(
        RunState.FAILED, Cause.INTERNAL, 3, "node 1 (n1): its container ended with exit code 3: ImportError: no torch"
    )


def test_why_a_node_could_not_take_part_is_how_the_run_ended() -> None:
    w = watching()
    look(w, FAILED, FAILED)
    event = {"event": "node_failed", "node": 1, "host": "n1", "cause": "setup", "exit_code": 7, "message": "no"}
    finish = finish_of([event], w, HOSTS, "")
    assert (finish.cause, finish.exit_code, finish.reason) == (Cause.SETUP, 7, "node 1 (n1): no")


def test_after_the_result_all_have_a_moment_to_leave_and_none_is_replaced() -> None:
    w = watching()
    assert look(w, UP, KILLED, has_result=True) == []
    assert look(w, UP, KILLED, has_result=True, at=BACKSTOP_S + 0.1) == [Signal((0,), signal.SIGKILL)]
    look(w, DONE, KILLED, has_result=True, at=4.0)
    assert w.is_over


def test_a_stop_is_passed_on_each_time_and_ends_in_bounded_time() -> None:
    w = watching()
    assert w.stop(signal.SIGINT, 10.0) == [Signal((0, 1), signal.SIGINT)]
    assert w.stop(signal.SIGINT, 11.0) == [Signal((0, 1), signal.SIGINT)]
    assert look(w, UP, DONE, at=43.0) == []
    assert look(w, UP, DONE, at=43.1) == [Signal((0,), signal.SIGKILL)]
    look(w, KILLED, DONE, at=44.0)
    finish = finish_of([], w, HOSTS, "")
    assert (finish.state, finish.exit_code, finish.reason) == (RunState.CANCELLED, 130, "Ctrl-C")


def test_once_somebody_has_asked_an_agent_to_stop_no_node_is_replaced() -> None:
    w = watching()
    assert look(w, UP, KILLED, stop_asked=True) == [Lost(1, KILLED)]
    assert not [action for action in look(w, UP, KILLED, at=1.0) if isinstance(action, Replace)]


def test_a_stop_before_the_agent_could_hear_it_is_a_stop() -> None:
    w = watching()
    stopped = NodeState(alive=False, exit_code=143, detail="its container was killed by SIGTERM")
    look(w, stopped, UP)
    look(w, stopped, DONE)
    finish = finish_of([], w, HOSTS, "")
    assert (finish.state, finish.cause, finish.exit_code) == (RunState.CANCELLED, Cause.CANCELLED, 143)


def test_an_elastic_run_goes_on_without_a_node_that_ended_badly() -> None:
    w = watching(nodes=(0, 1, 2), least=2)
    assert look(w, UP, UP, FAILED) == [Lost(2, FAILED)]
    assert not w.is_stopping


def test_what_an_earlier_watcher_has_replaced_counts_since_the_newest_resume() -> None:
    replaced = {"event": "node_replaced", "node": 1}
    assert earlier([replaced, {"event": "resumed"}, {"event": "submitted"}, replaced, replaced]) == 2
