"""The head among its connections: who joins, who is told what, what is written down."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from agent_values import TOKEN

from launcher.agent import allocation as allocations
from launcher.agent import office as office_module
from launcher.agent.allocation import Allocation
from launcher.agent.channel import Connection, connect, listen
from launcher.agent.head import Phase
from launcher.agent.loop import Loop
from launcher.agent.members import SILENCE_S
from launcher.agent.office import HeadOffice
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter, read_events
from launcher.runs.rundir import RunDir

LIMIT_S = 20.0
MakeRun = Callable[..., tuple[Plan, RunDir]]


class Office:
    """An office whose loop the test runs; node 0 is the test itself."""

    def __init__(self, plan: Plan, run: RunDir, allocation: Allocation | None = None) -> None:
        self.plan, self.run, self.loop = plan, run, Loop()
        self.loop.every(0.01, lambda: None)
        self.listener = listen("127.0.0.1")
        self.to_self: list[dict[str, Any]] = []
        self.office = HeadOffice(
            plan, run, self.loop, self.listener, to_self=self.to_self.append, allocation=allocation
        )
        self.peers: list[Peer] = []

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), timeout_s=LIMIT_S), "it did not happen"

    def peer(self, node: int, host: str = "n1", pid: int | None = None) -> Peer:
        peer = Peer(self)
        self.peers.append(peer)
        peer.connection.send({"type": "join", "node": node, "host": host, "pid": pid})
        return peer

    def join_self(self) -> None:
        self.office.join_self("n0")
        self.office.hear_self({"type": "ready"})

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.path) if event["event"] == name]

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.run.result.read_text()))


class Peer:
    """The agent of another node; hears on the same loop."""

    def __init__(self, office: Office) -> None:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._connect, office)
            office.until(future.done)
        self.connection: Connection = future.result()
        self.heard: list[str] = []
        self.ended: list[str] = []
        self.beats = 0
        self.connection.on_message = self._hear
        self.connection.on_end = self.ended.append
        self.loop = self._loop

    def _hear(self, message: dict[str, Any]) -> None:
        if message["type"] == "beat":  # they come whenever they come
            self.beats += 1
        else:
            self.heard.append(message["type"])

    def _connect(self, office: Office) -> Connection:
        self._loop = Loop()
        return connect(office.listener.getsockname()[:2], TOKEN, self._loop, timeout_s=LIMIT_S)

    def until_heard(self, office: Office, *kinds: str) -> None:
        def heard() -> bool:
            self.loop.run_until(lambda: False, timeout_s=0.01)
            return self.heard == list(kinds)

        office.until(heard)


@pytest.fixture
def office(make_run: MakeRun) -> Iterator[Office]:
    office = Office(*make_run())
    yield office
    for peer in office.peers:
        peer.connection.end("the test is over")
    office.listener.close()


def test_two_nodes_join_and_start_and_end(office: Office) -> None:
    office.join_self()
    peer = office.peer(1)
    peer.until_heard(office, "welcome")
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    assert [message["type"] for message in office.to_self] == ["welcome", "start"]
    assert office.to_self[1]["master_port"] > 0
    peer.connection.send({"type": "done", "attempt": 1, "exit_codes": {"1": 0}})
    office.office.hear_self({"type": "done", "attempt": 1, "exit_codes": {"0": 0}})
    peer.until_heard(office, "welcome", "start", "end")
    assert office.result["state"] == "SUCCEEDED"
    assert [event["node"] for event in office.events("node_joined")] == [0, 1]


def test_two_agents_with_the_same_node_rank_end_the_run_at_once(office: Office) -> None:
    """F092"""
    office.join_self()
    first = office.peer(1, "n1")
    first.until_heard(office, "welcome")
    second = office.peer(1, "n7")
    second.until_heard(office, "refused")
    first.until_heard(office, "welcome", "kill")
    office.office.hear_self({"type": "ready"})
    first.connection.send({"type": "ready"})
    first.until_heard(office, "welcome", "kill", "end")
    assert office.result["state"] == "FAILED"
    assert office.result["cause"] == "rendezvous"
    assert "node rank 1 was claimed twice: by n1 and by n7" in office.result["reason"]
    assert "claimed twice" in office.run.console.read_text()


def test_a_second_node_0_ends_the_run_at_once(office: Office) -> None:
    """F092: the same configuration on each node."""
    office.join_self()
    second = office.peer(0, "n7")
    second.until_heard(office, "refused")
    office.office.hear_self({"type": "ready"})
    assert "node rank 0 was claimed twice: by n0 and by n7" in office.result["reason"]


@pytest.mark.parametrize("node", [2, -1, "1", None])
def test_a_node_that_is_not_in_the_plan_is_refused_and_the_run_goes_on(office: Office, node: Any) -> None:
    office.join_self()
    stray = office.peer(node)
    stray.until_heard(office, "refused")
    assert not office.run.result.exists()


def test_the_successor_of_an_agent_that_died_is_not_taken_for_a_double(office: Office) -> None:
    """Even when it is there before the end of the first one was noticed."""
    office.join_self()
    first = office.peer(1)
    first.until_heard(office, "welcome")
    first.connection.send({"type": "ready"})
    first.until_heard(office, "welcome", "start")
    successor = Peer(office)
    office.peers.append(successor)
    first.connection.end("killed")
    successor.connection.send({"type": "join", "node": 1, "host": "n1"})
    successor.until_heard(office, "welcome")
    assert [event["reason"] for event in office.events("node_lost")] == ["closed by the other side"]
    assert not office.run.result.exists()


@pytest.mark.parametrize(("pid", "in_a_job"), [(7, False), (8, True)], ids=["same process", "same node of a job"])
def test_an_agent_whose_link_was_cut_comes_again_before_its_end_is_noticed(
    make_run: MakeRun, pid: int, *, in_a_job: bool
) -> None:
    """F094: its side of the connection is gone, and no word of it has come through."""
    office = Office(*make_run(), in_allocation(1) if in_a_job else None)
    office.join_self()
    first = office.peer(1, "n1", 7)
    first.until_heard(office, "welcome")
    second = office.peer(1, "n1", pid)
    second.until_heard(office, "welcome")
    assert [event["reason"] for event in office.events("node_lost")] == ["its agent has come again"]
    assert not office.run.result.exists()


def test_strangers_are_written_down(office: Office) -> None:
    with socket.create_connection(office.listener.getsockname()[:2]) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        office.until(lambda: office.events("stranger_refused"))
    (event,) = office.events("stranger_refused")
    assert event["reason"] == "did not answer the challenge"


def test_the_stop_file_is_there_before_anybody_is_told(office: Office) -> None:
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    there = []
    office.office._to_self = lambda message: there.append((message["type"], office.run.stop_file.exists()))
    peer.connection.send({"type": "stop", "reason": "TERM", "signum": 15, "grace_s": None})
    peer.until_heard(office, "welcome", "start", "stop")
    assert there == [("stop", True)]


def test_a_head_that_takes_over_counts_on_from_the_events(make_run: MakeRun) -> None:
    plan, run = make_run()
    past = EventWriter(run.path, "head")
    past.write("created")
    past.write("attempt_started", attempt=1)
    past.write("restarting", restarts=1)
    past.write("attempt_started", attempt=2)
    past.close()
    office = Office(plan, run)
    assert [event["cause"] for event in office.events("failure")] == ["node_lost"]
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    assert office.to_self[-1]["attempt"] == 3
    assert office.to_self[-1]["restarts"] == 2
    peer.connection.end("the test is over")
    office.listener.close()


def test_a_resume_begins_with_a_fresh_budget_and_the_next_attempt(make_run: MakeRun) -> None:
    plan, run = make_run()
    past = EventWriter(run.path, "head")
    for event, fields in (
        ("created", {}),
        ("attempt_started", {"attempt": 1}),
        ("restarting", {"restarts": 1}),
        ("attempt_started", {"attempt": 2}),
        ("finished", {}),
        ("resumed", {}),
    ):
        past.write(event, **fields)
    past.close()
    office = Office(plan, run)
    assert office.events("failure") == []
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    assert (office.to_self[-1]["attempt"], office.to_self[-1]["restarts"]) == (3, 0)
    peer.connection.end("the test is over")
    office.listener.close()


def test_the_port_of_an_attempt_is_held_and_another_one_each_time(office: Office) -> None:
    first = office.office._pick_port()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", first))
    with socket.socket() as store:  # what torch's store does
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", first))
        store.listen()
        assert office.office._pick_port() != first


@pytest.mark.parametrize(("kind", "told"), [("script", ["2 parts"]), ("job", [])])
def test_what_a_script_left_offline_is_named_at_the_end(make_run: MakeRun, kind: str, told: list[str]) -> None:
    """F062: the built-in job's own tracking has said it already."""
    plan, run = make_run()
    plan = replace(plan, nodes=plan.nodes[:1], worker=replace(plan.worker, kind=kind))
    for second, mark in (("1", ""), ("2", ""), ("3", ".synced")):
        part = run.path / "wandb" / f"offline-run-20261130_00000{second}-{run.run_id}"
        part.mkdir(parents=True)
        (part / "run-x.wandb").touch()
        if mark:
            (part / f"run-x.wandb{mark}").touch()
    office = Office(plan, run)
    office.join_self()
    office.office.hear_self({"type": "done", "attempt": 1, "exit_codes": {"0": 0}})
    office.listener.close()
    assert [event["wandb"]["reason"] for event in office.events("tracking")] == told
    assert all(event["wandb"]["sync"] == f"launch sync {run.run_id}" for event in office.events("tracking"))


# ---------------------------------------------------------------- in a job of SLURM


def in_allocation(number: int) -> Allocation:
    return Allocation(number=number, head=("127.0.0.1", 1), ends_s=None)


def test_the_head_of_a_new_allocation_takes_over_from_nobody(make_run: MakeRun) -> None:
    """Attempts are counted on, the restarts that were used too; but no agent of the last allocation is waited for."""
    plan, run = make_run()
    EventWriter(run.path, "launch-1").write("created")
    before = EventWriter(run.path, "head")
    before.write("attempt_started", attempt=1, allocation=1)
    before.write("restarting", attempt=2, restarts=1, max_restarts=3)
    before.write("attempt_started", attempt=2, allocation=1)
    office = Office(plan, run, in_allocation(2))
    office.join_self()
    office.peer(1).connection.send({"type": "ready"})
    office.until(lambda: office.events("attempt_started")[-1]["attempt"] == 3)
    assert office.events("node_lost") == []
    assert office.events("attempt_started")[-1]["allocation"] == 2
    (start,) = [message for message in office.to_self if message["type"] == "start"]
    assert start["restarts"] == 1


def test_the_successor_of_a_head_in_the_same_allocation_does(make_run: MakeRun) -> None:
    plan, run = make_run()
    EventWriter(run.path, "launch-1").write("created")
    EventWriter(run.path, "head").write("attempt_started", attempt=1, allocation=2)
    office = Office(plan, run, in_allocation(2))
    (lost,) = office.events("node_lost")
    assert lost["node"] == 0


def test_what_the_batch_side_asks_for_is_done(make_run: MakeRun) -> None:
    """By a file, since the signals of a job come from anybody."""
    plan, run = make_run()
    office = Office(plan, run, in_allocation(1))
    office.join_self()
    office.peer(1).connection.send({"type": "ready"})
    office.until(lambda: office.events("attempt_started"))
    run.slurm.mkdir()
    allocations.stop_request(run.path, 1).write_text("Ctrl-C\n")
    office.until(lambda: office.events("stop_requested"))
    assert office.events("stop_requested")[0]["reason"] == "Ctrl-C"
    assert run.stop_file.exists()


def test_the_end_of_the_job_and_the_limits_of_the_run_are_known_to_the_head(make_run: MakeRun) -> None:
    """F016: the head stops by its own clock; whichever comes first."""
    for limits, ends_in_s, reason in ((None, 0.2, "the job ends in"), (0.1, 3600.0, "limits.wall: 0.1 s")):
        plan, run = make_run(run_id=f"r{ends_in_s:.0f}")
        plan = replace(plan, limits=replace(plan.limits, wall_s=limits))
        allocation = replace(in_allocation(1), ends_s=time.monotonic() + ends_in_s)
        office = Office(plan, run, allocation)
        office.join_self()
        office.peer(1).connection.send({"type": "ready"})
        office.until(partial(office.events, "stop_requested"))
        assert office.events("stop_requested")[0]["reason"].startswith(reason)


def test_an_error_that_ended_the_attempt_before_the_requeue_is_known_again(make_run: MakeRun) -> None:
    """F043: the same exception at the same place and step would only come a third time."""
    plan, run = make_run()
    fields = {"attempt": 1, "node": 1, "rank": 1, "pid": 9, "exit_code": 1, "cause": "worker_error", "message": "boom",
              "place": "train.py:3 in f", "log": "x", "exception": "ValueError", "step": 3}  # fmt: skip
    past = EventWriter(run.path, "head")
    past.write("created")
    past.write("attempt_started", attempt=1, allocation=1)
    past.write("failure", **fields)
    past.write("attempt_ended", attempt=1, node=1, rank=1, cause="worker_error")
    past.close()
    office = Office(plan, run, in_allocation(2))
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    peer.connection.send({"type": "failed", "failure": {**fields, "attempt": 2}})
    office.until(lambda: len(office.events("attempt_ended")) == 2)
    assert office.events("attempt_ended")[-1]["cause"] == "repeated"


def test_a_later_allocation_ends_this_one_without_a_word_on_the_run(make_run: MakeRun) -> None:
    plan, run = make_run()
    office = Office(plan, run, in_allocation(1))
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    office.until(lambda: office.events("attempt_started"))
    EventWriter(run.path, "batch-2").write("allocation_started", allocation=2)
    office.until(lambda: {"type": "kill"} in office.to_self)
    office.office.hear_self({"type": "ready"})
    peer.connection.send({"type": "ready"})
    office.until(lambda: office.events("stopped"))
    assert office.events("stopped")[0]["allocation"] == 1
    assert not run.result.exists()


def test_the_other_agents_hear_the_head_regularly(office: Office) -> None:
    office.join_self()
    peer = office.peer(1)

    def twice() -> bool:
        peer.loop.run_until(lambda: False, timeout_s=0.01)
        return peer.beats >= 2

    office.until(twice)


def test_after_a_pause_of_the_head_itself_nobody_counts_as_silent(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was suspended as a whole goes on as if nothing had been."""
    office.join_self()
    peer = office.peer(1)
    peer.until_heard(office, "welcome")
    now_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 10 * SILENCE_S)
    office.office._tick()
    office.office._tick()
    assert office.events("node_lost") == []


def test_a_rescue_goes_from_the_agents_to_the_head_and_back(make_run: MakeRun) -> None:
    office = Office(*make_run(rescue=True))
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    lost = {"attempt": 1, "node": 1, "rank": 1, "pid": 9, "exit_code": 1, "cause": "peer_lost", "message": "closed"}
    peer.connection.send({"type": "suspect", "failure": {**lost, "place": "", "log": ""}})
    peer.until_heard(office, "welcome", "start", "report")
    assert office.to_self[-1] == {"type": "report", "attempt": 1}
    office.office.hear_self({"type": "holds", "attempt": 1, "steps": {"0": 6}})
    peer.connection.send({"type": "holds", "attempt": 1, "steps": {"1": 7}})
    peer.until_heard(office, "welcome", "start", "report", "keep")
    peer.connection.send({"type": "kept", "attempt": 1, "rank": 1, "name": "step-7"})
    peer.until_heard(office, "welcome", "start", "report", "keep", "kill")
    (rescued,) = office.events("rescued")
    assert (rescued["step"], rescued["node"], rescued["rank"]) == (7, 1, 1)
    office.peers[0].connection.end("the test is over")
    office.listener.close()


def test_a_head_that_takes_over_asks_who_comes_with_workers(make_run: MakeRun) -> None:
    plan, run = make_run(rescue=True, min_nodes=1)
    earlier = EventWriter(run.path, "head")
    earlier.write("attempt_started", attempt=3, members=[0, 1])
    office = Office(plan, run)
    office.join_self()
    peer = Peer(office)
    office.peers.append(peer)
    peer.connection.send({"type": "join", "node": 1, "host": "n1", "pid": 7, "holds": 3})
    peer.until_heard(office, "report")
    peer.connection.end("the test is over")
    office.listener.close()


def test_a_node_that_has_come_is_taken_in_at_the_next_checkpoint_of_a_script(make_run: MakeRun) -> None:
    plan, run = make_run(min_nodes=1, resumable=True)
    (run.checkpoints / "step-1").mkdir(parents=True)
    (run.checkpoints / "step-1" / "state.pt").write_text("x")
    EventWriter(run.path, "head").write("attempt_started", attempt=1, members=[0])
    office = Office(plan, run)
    office.office._head.phase = Phase.RUNNING  # with node 0 alone

    def taken_in() -> list[int]:
        return [event["attempt"] for event in office.events("attempt_ended") if event["cause"] == "scaled"]

    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    office.until(lambda: office.office._head.members.newcomers)
    for _ in range(3):
        office.office._look_for_checkpoint()
    assert taken_in() == [], "that checkpoint was there before it came"
    later = run.checkpoints / "step-2"
    later.mkdir()
    (later / "state.pt").write_text("x")
    office.office._look_for_checkpoint()
    assert taken_in() == [], "it may be half-written"
    office.office._look_for_checkpoint()
    assert taken_in() == [1]
    peer.connection.end("the test is over")
    office.listener.close()


def test_an_attempt_before_a_resume_with_fewer_nodes_is_another_story(make_run: MakeRun) -> None:
    plan, run = make_run()
    EventWriter(run.path, "head").write("attempt_started", attempt=3, members=[0, 1, 2])
    EventWriter(run.path, "launch-1").write("resumed")
    office = Office(plan, run)
    office.join_self()
    peer = office.peer(1)
    peer.connection.send({"type": "ready"})
    peer.until_heard(office, "welcome", "start")
    assert office.to_self[-1]["attempt"] == 4
    peer.connection.end("the test is over")
    office.listener.close()


def test_the_limit_of_gpu_hours_is_that_of_the_nodes_that_start(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(office_module, "limit_of", lambda *_, nodes=None, **__: asked.append(nodes))
    plan, run = make_run(min_nodes=1)
    office = Office(plan, run)
    monkeypatch.setattr("launcher.agent.members.FIRST_S", 0.0)
    office.join_self()
    office.until(lambda: office.events("attempt_started"))
    assert asked == [None, 1]
    office.listener.close()
