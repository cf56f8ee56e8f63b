"""Sums over the ranks of one host, through memory that they share.

gloo sends a row of gradients through TCP, and three threads of each rank pass it on: on two cores 1.4 ms for half a
megabyte, of which the sum itself takes 0.03. Here each rank writes its row into memory, tells the others so, and adds
up what is there. There are two places for each row, used in turn: who writes into one has heard since that all have
read what was in it.

The order of the sum is that of gloo's ring, so the bits are too (compared at the start): it makes no difference to a
training whether its ranks are on one host.

A rank that is gone is seen by all others at once, since each has a connection to each; `jobs.sockets` shuts these.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

MARK = "host_sum"
"""Its name in a profile, where it counts as communication."""
MOST_RANKS = 16
"""Each one reads the rows of all."""
_CONNECT_S = 20.0
_NAME_BYTES = 6
"""Of an abstract Unix address that the kernel has chosen: a zero and five digits."""
_PER_RANK = 2
"""gloo's ring cuts a row into as many segments per rank at least (`allreduce.cc`), of 1 MiB at most."""
_SEGMENT_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""
_RANK = struct.Struct("!i")


@dataclass(frozen=True)
class _Peer:
    rank: int
    sock: socket.socket


class HostSum:
    """The sum of a row (fp32, always of the same size) over all ranks, which are on one host."""

    def __init__(self, memory: mmap.mmap, row: Tensor, peers: list[_Peer], rank: int, timeout_s: float) -> None:
        self._peers, self._timeout_s, self._row = peers, timeout_s, row
        ranks = len(peers) + 1
        places = torch.frombuffer(memory, dtype=torch.float32).view(2, ranks, row.numel())
        self._mine = [place[rank] for place in places]
        self._additions = [_additions(place, row) for place in places]
        self._turn = 0
        for peer in peers:
            seconds, part = divmod(timeout_s, 1)
            peer.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(part * 1e6))
            )

    def all_reduce(self) -> None:
        """Replace the row by the sum over all ranks; every rank must call it.

        Raises ConnectionResetError where another rank is gone, RuntimeError where one does not come in time.
        """
        turn, self._turn = self._turn, 1 - self._turn
        with record_function(MARK):
            self._mine[turn].copy_(self._row)
            self._meet()
            for one, other, out in self._additions[turn]:
                torch.add(one, other, out=out)

    def close(self) -> None:
        """Leave the others."""
        for peer in self._peers:
            peer.sock.close()

    def _meet(self) -> None:
        """Tell all others that this rank's row is there, and wait for theirs."""
        try:
            for peer in self._peers:
                peer.sock.send(b"\0")
        except OSError as error:
            raise ConnectionResetError(f"Connection closed by peer: rank {peer.rank} ({error.strerror})") from None
        for peer in self._peers:
            try:
                if peer.sock.recv(1):
                    continue
            except BlockingIOError:
                waited_ms = int(self._timeout_s * 1e3)
                raise RuntimeError(f"Timed out waiting {waited_ms}ms for rank {peer.rank} of this host") from None
            except OSError as error:
                raise ConnectionResetError(f"Connection closed by peer: rank {peer.rank} ({error.strerror})") from None
            raise ConnectionResetError(f"Connection closed by peer: rank {peer.rank}")


def connect(row: Tensor, *, local_size: int, timeout_s: float) -> HostSum | None:
    """Connect all ranks, which must call it together; None on all of them where that cannot be.

    That is: with a single rank or too many, where some are on other hosts, where the system does not give what it
    takes, or where this torch adds in another order.
    """
    ranks = dist.get_world_size()
    if not 1 < ranks <= MOST_RANKS or local_size != ranks:
        return None
    made: HostSum | None = None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract name, which leaves no file
        listener.listen(ranks)
        listener.settimeout(_CONNECT_S)
        try:
            made = _connect(row, listener, timeout_s)
        except OSError as error:
            print(f"gradients go through gloo: the ranks of this host share no memory: {error}", flush=True)
        if _all(made is not None):
            assert made is not None
            if _all(_adds_alike(made, row)):
                return made
            print("gradients go through gloo, which adds in an order that is not known here", flush=True)
    if made is not None:
        made.close()
    return None


def _connect(row: Tensor, listener: socket.socket, timeout_s: float) -> HostSum:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.frombuffer(bytearray(listener.getsockname()), dtype=torch.uint8)
    assert mine.numel() == _NAME_BYTES
    names = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(names, mine)
    peers = []
    for other in range(rank):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_CONNECT_S)
        sock.connect(bytes(names[other].tolist()))
        _refuse_strangers(sock)
        sock.sendall(_RANK.pack(rank))
        peers.append(_Peer(other, sock))
    for _ in range(rank + 1, ranks):
        sock, _ = listener.accept()
        sock.settimeout(_CONNECT_S)
        _refuse_strangers(sock)
        peers.append(_Peer(_rank_of(sock), sock))
    peers.sort(key=lambda peer: peer.rank)
    size_bytes = 2 * ranks * row.numel() * row.element_size()
    if rank == 0:
        file = os.memfd_create("gradients")
        os.posix_fallocate(file, 0, size_bytes)
        for peer in peers:
            socket.send_fds(peer.sock, [b"\0"], [file])
    else:
        _, files, _, _ = socket.recv_fds(peers[0].sock, 1, 1)
        if not files:
            raise ConnectionResetError("rank 0 has given no memory")
        (file,) = files
    memory = mmap.mmap(file, size_bytes)
    os.close(file)
    for peer in peers:
        peer.sock.settimeout(None)
    return HostSum(memory, row, peers, rank, timeout_s)


def _rank_of(sock: socket.socket) -> int:
    told = sock.recv(_RANK.size, socket.MSG_WAITALL)
    if len(told) < _RANK.size:
        raise ConnectionResetError("a rank has left before it said which one it is")
    rank: int = _RANK.unpack(told)[0]
    return rank


def _refuse_strangers(sock: socket.socket) -> None:
    """An abstract address is open to all users of a host."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"user {user} has connected to the ranks of user {os.geteuid()}")


def _all(finding: bool) -> bool:
    """Whether all ranks have found it."""
    told = torch.tensor(float(finding))
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told)


def _adds_alike(made: HostSum, row: Tensor) -> bool:
    """Whether a sum is that of torch to the bit; with numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = torch.randn(row.numel(), generator=generator) * 10.0 ** torch.randint(
        -3, 4, (row.numel(),), generator=generator
    )
    row.copy_(numbers)
    dist.all_reduce(numbers)
    made.all_reduce()
    alike = torch.equal(row, numbers)
    row.zero_()
    return alike


def _additions(place: Tensor, row: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(one, other, out): additions that sum the rows of a place, in the order of gloo's ring.

    There a row is cut into one chunk per rank, and the chunk of rank c is added up along the ring from rank c - 1
    downwards; c itself is the last. Of two numbers the order does not matter.
    """
    ranks = len(place)
    if ranks == 2:
        return [(place[0], place[1], row)]
    found = []
    size = _chunk_size(row, ranks)
    for chunk in range(ranks):
        part = slice(chunk * size, (chunk + 1) * size)
        out = row[part]
        if not out.numel():
            break
        order = [place[(chunk - 1 - turn) % ranks][part] for turn in range(ranks)]
        found.append((order[0], order[1], out))
        found += [(out, other, out) for other in order[2:]]
    return found


def _chunk_size(row: Tensor, ranks: int) -> int:
    """How many numbers gloo gives to a rank."""
    size_bytes = row.numel() * row.element_size()
    segments = max(_up(size_bytes, _SEGMENT_BYTES), ranks * _PER_RANK)
    per_rank = _up(segments, ranks)
    return per_rank * _up(_up(size_bytes, per_rank * ranks), row.element_size())


def _up(number: int, unit: int) -> int:
    return -(-number // unit)
