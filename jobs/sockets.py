"""The connections of the process groups, which can be shut from another thread: gloo has no abort of its own.

A rank that waits in a collective of gloo learns of a dead peer only where it has a connection to it that is in use: in
a ring its two neighbours do, the others wait for a peer that waits itself. With its connections shut, each of them
fails at once.

Which connections are gloo's: those that came up while a group was made (by inode, which no other socket gets while
this one lives), and those that were accepted later at a port where gloo began to listen then (with
TORCH_GLOO_LAZY_INIT=1 a connection is made at its first use; the side that accepts it shuts it for both). Connections
to the store go by its port, and are left alone: it may be asked afterwards who is missing. Nothing else is touched:
what a data set or a tracker has opened is not among them. Connections between ranks of one host (`jobs.host_sum`, Unix
sockets) belong to them too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_FOLDER = "/proc/self/fd"


class GroupSockets:
    """Knows the connections of all groups that were made inside `watch`."""

    def __init__(self, *, store_port: int) -> None:
        self._store_port = store_port
        self._inodes: set[int] = set()
        self._ports: set[int] = set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Make groups inside; the process must open no other connections meanwhile."""
        before = {inode for inode, _ in _sockets()}
        yield
        for inode, sock in _sockets():
            if inode in before:
                continue
            if sock.family == socket.AF_UNIX:
                self._inodes.add(inode)
                continue
            if self._store_port in (_port(sock.getsockname()), _peer_port(sock)):
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._ports.add(_port(sock.getsockname()))
            else:
                self._inodes.add(inode)

    def shut(self) -> int:
        """Shut them all, in both directions. Returns how many. From any thread; what waits in one fails."""
        count = 0
        for inode, sock in _sockets():
            if inode in self._inodes or self._is_late(sock):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    continue
                count += 1
        return count

    def _is_late(self, sock: socket.socket) -> bool:
        """Whether it was accepted after `watch`, at a port of a group."""
        if sock.family == socket.AF_UNIX or _peer_port(sock) in (None, self._store_port):
            return False
        return _port(sock.getsockname()) in self._ports


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The TCP and Unix sockets of this process with their inodes, each as a copy that is closed afterwards.

    A copy, since another thread may close one at any moment, and its number may then be that of something else.
    """
    for name in os.listdir(_FOLDER):  # noqa: PTH208 - numbers, not paths
        try:
            if not os.readlink(f"{_FOLDER}/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # no socket any more
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and sock.type == socket.SOCK_STREAM:
                yield os.fstat(copy).st_ino, sock


def _port(address: tuple[object, ...]) -> int:
    port = address[1]
    assert isinstance(port, int)
    return port


def _peer_port(sock: socket.socket) -> int | None:
    """None where it is not connected."""
    try:
        return _port(sock.getpeername())
    except OSError:
        return None
