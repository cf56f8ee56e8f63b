"""Whose connections are shut when a peer is lost, and whose are not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from jobs.sockets import GroupSockets

Pair = tuple[socket.socket, socket.socket]


class Place:
    """A port on this machine, with connections to it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]

    def connect(self) -> Pair:
        """A connection: its end that has connected, and the one that was accepted."""
        ours = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        theirs, _ = self._listener.accept()
        return ours, self._stack.enter_context(theirs)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def is_shut(pair: Pair) -> bool:
    """Whether a reader that waits gets the end of the connection; a living one has nothing to read."""
    try:
        return pair[0].recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def test_connections_of_the_groups_are_shut_and_no_others(stack: ExitStack) -> None:
    store, dataset, group = Place(stack), Place(stack), Place(stack)
    before = dataset.connect()
    sockets = GroupSockets(store_port=store.port)
    with sockets.watch():
        of_store, of_group = store.connect(), group.connect()
    after = dataset.connect()
    assert sockets.shut() == 2, "both ends are in this process"
    assert is_shut(of_group)
    assert not any(map(is_shut, (of_store, before, after)))
    assert sockets.shut() == 0


def test_a_connection_that_is_accepted_later_belongs_to_the_group_too(stack: ExitStack) -> None:
    """With TORCH_GLOO_LAZY_INIT=1 gloo listens at once and connects at the first use."""
    store = Place(stack)
    sockets = GroupSockets(store_port=store.port)
    with sockets.watch():
        group = Place(stack)
    later, of_store = group.connect(), store.connect()
    assert sockets.shut() == 1, "the end that was accepted; the other one notices"
    assert is_shut(later)
    assert not is_shut(of_store)


def test_other_descriptors_do_not_matter(stack: ExitStack) -> None:
    ours, theirs = map(stack.enter_context, socket.socketpair())
    datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sockets = GroupSockets(store_port=1)
    with sockets.watch():
        more = tuple(map(stack.enter_context, socket.socketpair(type=socket.SOCK_DGRAM)))
    after = tuple(map(stack.enter_context, socket.socketpair()))
    assert sockets.shut() == 0
    for pair in ((ours, theirs), more, after):
        pair[0].send(b"x")
        assert pair[1].recv(1) == b"x"
    assert datagrams.fileno() > 0


def test_connections_inside_a_host_are_shut_too(stack: ExitStack) -> None:
    sockets = GroupSockets(store_port=1)
    with sockets.watch():
        ours, theirs = map(stack.enter_context, socket.socketpair())
    assert sockets.shut() == 2, "both ends are in this process"
    assert is_shut((ours, theirs))
