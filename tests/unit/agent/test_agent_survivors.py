"""What the agent of a node asks its workers in a rescue; the workers are sockets in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.agent import survivors
from launcher.agent.loop import Loop
from launcher.agent.survivors import Survivors

LIMIT_S = 20.0
HERE = os.getpid()


class Node:
    """Survivors, and the other ends of their sockets."""

    def __init__(self, ranks: int = 2) -> None:
        self.loop = Loop()
        self.told: list[dict[str, Any]] = []
        self.suspects: list[tuple[int, str, int | None]] = []
        self.survivors = Survivors(self.loop, disk="/run/checkpoints")
        self.survivors.on_message = self.told.append
        self.survivors.on_peer_lost = lambda *what: self.suspects.append(what)
        self.survivors.begin(3, "/memory/node-0")
        self.ends = [socket.socket(fileno=self.survivors.add(rank)) for rank in range(ranks)]
        for end in self.ends:
            end.settimeout(LIMIT_S)

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), timeout_s=LIMIT_S), "it did not happen"

    def say(self, rank: int, **message: Any) -> None:
        self.ends[rank].send(json.dumps(message).encode())

    def ordered(self, rank: int) -> dict[str, Any]:
        order: dict[str, Any] = json.loads(self.ends[rank].recv(1 << 16))
        return order


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.survivors.begin(99, None)
    for end in node.ends:
        end.close()


def holds(steps: dict[str, int | None], attempt: int = 3) -> dict[str, Any]:
    return {"type": "holds", "attempt": attempt, "steps": steps}


def test_all_are_asked_and_what_they_hold_is_told_once_together(node: Node) -> None:
    node.survivors.report(3, {0: HERE, 1: HERE})
    assert [node.ordered(rank) for rank in (0, 1)] == [{"order": "report"}] * 2
    node.say(0, holds=7)
    node.say(1, holds=None)
    node.until(lambda: node.told)
    assert node.told == [holds({"0": 7, "1": None})]


def test_who_has_ended_is_not_waited_for_and_what_it_said_counts_no_more(node: Node) -> None:
    node.survivors.report(3, {0: HERE, 1: HERE})
    node.say(1, holds=9)
    node.survivors.ended(1)
    node.say(0, holds=7)
    node.until(lambda: node.told)
    assert node.told == [holds({"0": 7})]


def test_with_nobody_left_the_answer_is_there_at_once(node: Node) -> None:
    node.survivors.ended(0)
    node.survivors.ended(1)
    node.survivors.report(3, {})
    assert node.told == [holds({})]


def test_workers_of_another_attempt_are_not_asked(node: Node) -> None:
    node.survivors.report(2, {0: HERE, 1: HERE})
    node.survivors.keep(2, 0)
    assert node.told == [holds({}, 2), {"type": "kept", "attempt": 2, "rank": 0, "error": "it has ended"}]


def test_one_that_says_nothing_is_waited_for_so_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "ANSWER_S", 0.05)
    node.survivors.report(3, {0: HERE, 1: HERE})
    node.say(0, holds=7)
    node.until(lambda: node.told)
    assert node.told == [holds({"0": 7})]
    node.say(1, holds=7)
    node.loop.run_until(lambda: False, timeout_s=0.01)
    assert len(node.told) == 1


def test_one_that_is_stopped_is_not_waited_for_at_all(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "ANSWER_S", 10 * LIMIT_S)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as frozen:
        os.kill(frozen.pid, signal.SIGSTOP)
        os.waitpid(frozen.pid, os.WUNTRACED)
        node.survivors.report(3, {0: HERE, 1: frozen.pid})
        node.say(0, holds=7)
        node.until(lambda: node.told)
        frozen.kill()
    assert node.told == [holds({"0": 7})]


@pytest.mark.parametrize(("to_disk", "folder"), [(False, "/memory/node-0"), (True, "/run/checkpoints")])
def test_one_is_told_to_keep_it_and_the_head_hears_how_that_went(node: Node, to_disk: bool, folder: str) -> None:
    node.survivors.keep(3, 1, to_disk=to_disk)
    assert node.ordered(1) == {"order": "keep", "folder": folder}
    node.say(1, kept="step-7")
    node.say(0, not_kept="no room")
    node.until(lambda: len(node.told) == 2)
    by_rank = {message["rank"]: message for message in node.told}
    assert by_rank[1] == {"type": "kept", "attempt": 3, "rank": 1, "name": "step-7"}
    assert by_rank[0] == {"type": "kept", "attempt": 3, "rank": 0, "error": "no room"}


def test_without_memory_it_is_kept_on_disk(node: Node) -> None:
    node.survivors.begin(4, None)
    with socket.socket(fileno=node.survivors.add(0)) as end:
        node.survivors.keep(4, 0)
        assert json.loads(end.recv(1 << 16))["folder"] == "/run/checkpoints"


def test_a_lost_peer_and_a_checkpoint_are_told(node: Node) -> None:
    node.say(1, peer_lost="connection closed by peer", step=7)
    node.say(0, saved=5)
    node.until(lambda: node.suspects and node.told)
    assert node.suspects == [(1, "connection closed by peer", 7)]
    assert node.told == [{"type": "saved", "attempt": 3, "step": 5}]


def test_the_last_words_of_one_that_ended_are_heard(node: Node) -> None:
    node.say(0, saved=5)
    node.ends[0].close()
    node.survivors.ended(0)
    assert [message["type"] for message in node.told] == ["saved"]


def answering(node: Node, rank: int, step: int | None, kept: dict[str, Any] | None) -> threading.Thread:
    """A worker that says what it holds, and how keeping it went (None: it is not asked to)."""

    def answer() -> None:
        assert node.ordered(rank) == {"order": "report"}
        node.say(rank, holds=step)
        if kept is not None:
            assert node.ordered(rank) == {"order": "keep", "folder": "/memory/node-0"}
            node.say(rank, **kept)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(("kept", "step"), [({"kept": "step-9"}, 9), ({"not_kept": "no room"}, None)])
def test_where_nobody_asks_the_newest_state_of_the_node_is_kept_all_the_same(
    node: Node, kept: dict[str, Any], step: int | None
) -> None:
    workers = [answering(node, 0, 8, None), answering(node, 1, 9, kept)]
    assert node.survivors.keep_alone(3, {0: HERE, 1: HERE}) == step
    for worker in workers:
        worker.join(LIMIT_S)
    assert node.told == [], "there is nobody to tell"
    node.say(0, saved=4)
    node.until(lambda: node.told)


def test_where_nobody_asks_and_nothing_is_held_nothing_is_kept(node: Node) -> None:
    workers = [answering(node, rank, None, None) for rank in (0, 1)]
    assert node.survivors.keep_alone(3, {0: HERE, 1: HERE}) is None
    for worker in workers:
        worker.join(LIMIT_S)
