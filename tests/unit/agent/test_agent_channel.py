"""Who speaks with the head, and who does not."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from launcher.agent import channel
from launcher.agent.channel import ChannelError, Connection, Server, connect, listen
from launcher.agent.loop import Loop

TOKEN = b"\x01" * 32
LIMIT_S = 20.0


class Head:
    """The head's side, run by the test through `until`."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.loop.every(0.01, lambda: None)  # a future that is done in another thread is no event of the loop
        self.listener = listen("127.0.0.1")
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.connections: list[Connection] = []
        self.messages: list[Any] = []
        self.ends: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.server = Server(
            self.listener,
            TOKEN,
            self.loop,
            on_connection=self._admit,
            on_refused=lambda peer, reason: self.refused.append((peer, reason)),
        )

    def _admit(self, connection: Connection) -> None:
        self.connections.append(connection)
        connection.on_message = self.messages.append
        connection.on_end = self.ends.append

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), timeout_s=LIMIT_S), "it did not happen"


class Agent:
    """An honest agent, connected from another thread while the head's loop runs."""

    def __init__(self, head: Head) -> None:
        self.loop = Loop()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(connect, head.address, TOKEN, self.loop, timeout_s=LIMIT_S)
            head.until(future.done)
            self.connection = future.result()
        self.messages: list[Any] = []
        self.ends: list[str] = []
        self.connection.on_message = self.messages.append
        self.connection.on_end = self.ends.append

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), timeout_s=LIMIT_S), "it did not happen"


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    for connection in head.connections:
        connection.sock.close()
    head.server.close()


def stranger(head: Head) -> socket.socket:
    return socket.create_connection(head.address, timeout=LIMIT_S)


class TestHonest:
    def test_messages_go_both_ways(self, head: Head) -> None:
        agent = Agent(head)
        agent.connection.send({"type": "join", "host": "nœud\n1"})
        agent.connection.send({"type": "ready"})
        head.until(lambda: len(head.messages) == 2)
        assert head.messages == [{"type": "join", "host": "nœud\n1"}, {"type": "ready"}]
        head.connections[0].send({"type": "welcome"})
        agent.until(lambda: agent.messages)
        assert agent.messages == [{"type": "welcome"}]
        assert head.refused == []

    def test_a_long_message_arrives_whole(self, head: Head) -> None:
        agent = Agent(head)
        text = "x" * 300_000
        sender = threading.Thread(target=agent.connection.send, args=({"type": "failed", "text": text},))
        sender.start()
        head.until(lambda: head.messages)
        sender.join()
        assert head.messages[0]["text"] == text

    def test_the_end_of_an_agent_is_heard_once(self, head: Head) -> None:
        agent = Agent(head)
        agent.connection.end("enough")
        head.until(lambda: head.ends)
        head.connections[0].end("again")
        head.connections[0].send({"type": "kill"})
        assert head.ends == ["closed by the other side"]
        assert agent.ends == ["enough"]

    def test_an_end_can_be_noticed_without_the_loop(self, head: Head) -> None:
        agent = Agent(head)
        head.until(lambda: head.connections)
        head.connections[0].check()
        assert head.ends == []
        agent.connection.end("enough")
        head.connections[0].check()
        assert head.ends == ["closed by the other side"]

    def test_an_admitted_agent_that_sends_no_message_is_ended(self, head: Head) -> None:
        agent = Agent(head)
        agent.connection.sock.sendall(b"\x80 not json\n")
        head.until(lambda: head.ends)
        assert head.ends == ["not a message of ours"]

    def test_sending_to_one_that_is_gone_ends_the_connection(self, head: Head) -> None:
        agent = Agent(head)
        head.until(lambda: head.connections)
        agent.connection.sock.close()
        for _ in range(10):
            head.connections[0].send({"type": "heartbeat", "text": "x" * 100_000})
        assert len(head.ends) == 1

    def test_the_token_never_travels(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[bytes] = []
        encode = channel._encode
        monkeypatch.setattr(channel, "_encode", lambda message: seen.append(encode(message)) or seen[-1])
        Agent(head)
        assert len(seen) == 3
        assert not any(TOKEN.hex().encode() in line or TOKEN in line for line in seen)


STRANGERS = {
    "random bytes": b"\x00\xff\x17\x80" * 20 + b"\n",
    "a pickle": pickle.dumps({"answer": 1}) + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a wrong answer": b'{"answer": "0000", "challenge": "1"}\n',
    "an answer that is not ascii": '{"answer": "é", "challenge": "1"}\n'.encode(),
    "an answer that is no text": b'{"answer": "\\ud800", "challenge": "\\ud800"}\n',
    "no answer": b"{}\n",
    "a list": b"[1, 2]\n",
    "a number": b"1\n",
    "an empty line": b"\n",
    "deep nesting": b"[" * 500 + b"\n",
    "a line without an end": b"x" * 600,
    "half a line, then gone": b'{"answer": "ab',
    "nothing, then gone": b"",
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_and_reported_and_an_agent_is_served_beside_it(head: Head, sent: bytes) -> None:
    """F034: nobody joins without the token of the run."""
    with stranger(head) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        head.until(lambda: head.refused)
        ((peer, reason),) = head.refused
        assert peer == "{}:{}".format(*sock.getsockname())
        assert reason in ("did not answer the challenge", "does not know the token of this run")
    assert head.connections == []
    Agent(head)
    assert len(head.connections) == 1


def test_a_silent_stranger_blocks_nobody_and_is_turned_away_in_the_end(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stranger(head) as silent:
        Agent(head)
        assert len(head.connections) == 1
        assert head.refused == []
        monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.0)
        head.server._expire()
        assert head.refused == [("{}:{}".format(*silent.getsockname()), "did not answer the challenge")]


def test_a_stranger_that_resets_the_connection_is_no_trouble(head: Head) -> None:
    sock = stranger(head)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()
    Agent(head)
    head.until(lambda: head.refused)


def test_an_overheard_answer_is_worth_nothing_the_second_time(head: Head) -> None:
    with stranger(head) as first, stranger(head) as second:
        head.until(lambda: len(head.server._strangers) == 2)
        nonce = json.loads(first.recv(512))["challenge"]
        second.recv(512)
        answer = channel._encode({"answer": channel._sign(TOKEN, "agent", nonce), "challenge": "1"})
        second.sendall(answer)
        head.until(lambda: head.refused)
        first.sendall(answer)
        head.until(lambda: head.connections)
    assert [reason for _, reason in head.refused] == ["does not know the token of this run"]


def test_an_agent_with_another_token_is_told_why(head: Head) -> None:
    """F034"""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect, head.address, b"\x02" * 32, Loop(), timeout_s=LIMIT_S)
        head.until(future.done)
        with pytest.raises(ChannelError, match="refuses this agent: it does not know the token of this run"):
            future.result()


def impostor(*replies: bytes) -> tuple[tuple[str, int], threading.Thread]:
    """Something else that listens where the head should be."""
    listener = listen("127.0.0.1")

    def serve() -> None:
        sock, _ = listener.accept()
        with listener, sock, contextlib.suppress(ConnectionError):
            for reply in replies:
                sock.sendall(reply)
                sock.recv(4096)

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[:2], thread


CHALLENGE = b'{"challenge": "1"}\n'


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ((CHALLENGE, b'{"answer": "0000"}\n'), "does not know the token"),
        ((CHALLENGE, '{"answer": "é"}\n'.encode()), "does not know the token"),
        ((b'{"challenge": "\\ud800"}\n', b"{}\n"), "does not know the token"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "does not speak this protocol"),
        ((b"[]\n",), "does not speak this protocol"),
        ((b"x" * 600,), "does not speak this protocol"),
    ],
)
def test_an_agent_does_not_believe_an_impostor(replies: tuple[bytes, ...], message: str) -> None:
    address, thread = impostor(*replies)
    with pytest.raises(ChannelError, match=message):
        connect(address, TOKEN, Loop(), timeout_s=LIMIT_S)
    thread.join()


def test_a_head_that_dies_in_the_handshake_may_be_tried_again() -> None:
    """An OSError, unlike a ChannelError, is worth another attempt: its successor listens on the same endpoint."""
    address, thread = impostor(CHALLENGE)
    with pytest.raises(OSError, match="in the middle of the handshake"):
        connect(address, TOKEN, Loop(), timeout_s=LIMIT_S)
    thread.join()


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_the_head_may_listen_on_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """F096"""
    try:
        listener = listen("::1")
    except OSError:
        pytest.skip("this machine has no ::1")
    loop, admitted = Loop(), []
    loop.every(0.01, lambda: None)
    server = Server(listener, TOKEN, loop, on_connection=admitted.append, on_refused=lambda *_: None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect, listener.getsockname()[:2], TOKEN, Loop(), timeout_s=LIMIT_S)
        assert loop.run_until(future.done, timeout_s=LIMIT_S)
        connection = future.result()
    assert connection.peer == f"[::1]:{listener.getsockname()[1]}"
    connection.end("enough")
    admitted[0].end("enough")
    server.close()


def test_a_head_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    """A frozen process still has a kernel that accepts for it."""
    with listen("127.0.0.1") as listener:
        begun_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(listener.getsockname()[:2], TOKEN, Loop(), timeout_s=0.2)
        assert time.monotonic() - begun_s < 5.0
