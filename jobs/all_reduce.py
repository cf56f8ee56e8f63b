"""The first thing that ranks do together, tried alone: an all-reduce; and a product of matrices. What `launch doctor`
starts, on one machine or on each of several. It needs torch, and nothing of ours.

Standard input is one JSON object:
    {"device": "cuda" or "cpu", "ranks": 4, "limit_s": 60}
    of several machines besides {"node": 0, "nodes": 2, "head": address, "port"}, with `ranks` on each
and the last line of standard output too:
    {"ok", "hung", "said", "reduce_s", "size_bytes", "flops", "network"}
    said: what went wrong, as a sentence without a full stop; flops: of each rank here, by its product of matrices;
    network: what NCCL has chosen for the way between machines
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE_BYTES = 64 << 20
"""Of what each rank brings: large enough that GPUs use the way between them that a training would."""
_TIMES = 5
_AFTER_ERROR_S = 1.0
"""So long the others may tell what they have seen: of several errors one is the first."""
_PR_SET_PDEATHSIG = 1

_LEAVE_S = 0.5
"""So long ranks of other machines may take for the last message of those here."""
_SIDE = {"cuda": 8192, "cpu": 1024}
"""Of the matrices: large enough for a GPU to be busy, and for a core to take no second."""
_MULTIPLY_S = 0.3
_SIOCGIFADDR = 0x8915
_NETWORK = re.compile(r"NCCL INFO Using network (\S+)")

Work = Callable[[torch.device, int, int], float]
"""(device, rank, ranks) -> seconds."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines that take part, and which one this is."""

    node: int = 0
    nodes: int = 1
    head: str = ""
    """Address of the first one; empty where there is one."""
    port: int = 0


@dataclass(kw_only=True)
class Heard:
    """What one rank has told so far."""

    process: ForkProcess
    joined: bool = False
    reduce_s: float | None = None
    flops: float | None = None
    error: str = ""
    died: bool = False
    """Whether it ended and could not say why."""

    @property
    def is_through(self) -> bool:
        """Whether there is nothing more to hear."""
        return self.died or bool(self.error) or self.reduce_s is not None


def try_all_reduce(
    device: str, ranks: int, limit_s: float, work: Work | None = None, machines: Machines | None = None
) -> dict[str, Any]:
    """Fork the ranks, and hear what becomes of them; whoever is not through after `limit_s` is killed.

    work: what each rank does after it has joined, in place of the all-reduce.
    """
    of = Machines() if machines is None else machines
    if of.nodes > 1:
        _choose_interface(of)
    context = multiprocessing.get_context("fork")  # here is no thread and no CUDA: that begins in the ranks
    heard: dict[Connection, Heard] = {}
    with tempfile.TemporaryDirectory(prefix="launch-all-reduce-") as folder:
        if device == "cuda" and not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & os.environ.keys():
            asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
            os.environ.update(asked)
        rank_of = _Rank(Path(folder) / "store", device, ranks, limit_s, work or measure_s, of)
        for rank in range(ranks):
            read, write = context.Pipe(duplex=False)
            process = context.Process(target=rank_of, args=(rank, write), daemon=True)
            process.start()
            write.close()
            heard[read] = Heard(process=process)
        try:
            _listen(heard, time.monotonic() + limit_s)
            if of.nodes > 1:
                time.sleep(_LEAVE_S)
        finally:
            for each in heard.values():
                each.process.kill()
                each.process.join()
        network = _network(Path(folder))
    return {**_judge(list(heard.values()), limit_s, first=of.node * ranks), "network": network}


def _network(folder: Path) -> str:
    """What NCCL says that it uses between machines, where it was asked to."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*"))]
    return next((found[1] for text in texts if (found := _NETWORK.search(text))), "")


def _choose_interface(of: Machines) -> None:
    """The one that leads to the first machine, unless the user has said another."""
    family = socket.AF_INET6 if ":" in of.head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((of.head, 9))  # nothing is sent
        own = sock.getsockname()[0]
    names = [name for _, name in socket.if_nameindex() if family == socket.AF_INET and _address(name) == own]
    for variable, value in (("GLOO_SOCKET_IFNAME", "{}"), ("NCCL_SOCKET_IFNAME", "={}")):
        if names:
            os.environ.setdefault(variable, value.format(names[0]))


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""  # it has none
    return socket.inet_ntoa(answer[20:24])


def _listen(heard: dict[Connection, Heard], end_s: float) -> None:
    """Until all are through, or the time is over; after an error that is soon."""
    while waited := [pipe for pipe, each in heard.items() if not each.is_through]:
        ready = wait(waited, end_s - time.monotonic())
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                told = json.loads(pipe.recv_bytes())
            except EOFError:
                told = {"died": True}
                heard[pipe].process.join()
            for name, value in told.items():
                setattr(heard[pipe], name, value)
            if told.keys() & {"died", "error"}:
                end_s = min(end_s, time.monotonic() + _AFTER_ERROR_S)


def _judge(ranks: list[Heard], limit_s: float, *, first: int = 0) -> dict[str, Any]:
    """What there is to say when no rank lives any more. A rank that died is why others have lost it."""
    numbered = list(enumerate(ranks, first))
    wrong = [f"rank {rank} {_end(each.process.exitcode)}" for rank, each in numbered if each.died]
    wrong += [f"rank {rank}: {each.error}" for rank, each in numbered if each.error]
    hung = not wrong and any(each.reduce_s is None for each in ranks)
    if hung and all(each.joined for each in ranks):
        wrong = [f"all ranks have met, and the all-reduce has not ended after {limit_s:g} s"]
    elif hung:
        absent = [str(rank) for rank, each in numbered if not each.joined]
        wrong = [f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} did not join in {limit_s:g} s"]
    return {
        "ok": not wrong,
        "hung": hung,
        "said": wrong[0] if wrong else "",
        "reduce_s": None if wrong else max(each.reduce_s or 0.0 for each in ranks),
        "size_bytes": SIZE_BYTES,
        "flops": [each.flops or 0.0 for each in ranks],
    }


def _end(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


@dataclass(frozen=True)
class _Rank:
    """The life of a rank."""

    store: Path
    device: str
    ranks: int
    limit_s: float
    work: Work
    of: Machines

    def __call__(self, rank: int, pipe: Connection) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            where = torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)
            number = self.of.node * self.ranks + rank
            self._join(where, number)
            _tell(pipe, joined=True)
            _tell(pipe, flops=multiply(where))
            _tell(pipe, reduce_s=self.work(where, number, self.of.nodes * self.ranks))
        except (RuntimeError, ValueError, OSError) as error:  # what torch.distributed, CUDA and sockets raise
            lines = str(error).strip().splitlines()
            _tell(pipe, error=f"{type(error).__name__}: {lines[0] if lines else 'no message'}")
        signal.pause()  # who leaves first would break off the others' last message; the parent ends them all

    def _join(self, where: torch.device, rank: int) -> None:
        on_gpus = where.type == "cuda"
        if on_gpus:
            torch.cuda.set_device(where)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            init_method=self._meeting_place(),
            rank=rank,
            world_size=self.of.nodes * self.ranks,
            timeout=timedelta(seconds=2 * self.limit_s),  # the parent ends it before
            device_id=where if on_gpus else None,
        )

    def _meeting_place(self) -> str:
        if self.of.nodes == 1:
            return f"file://{self.store}"
        head = f"[{self.of.head}]" if ":" in self.of.head else self.of.head
        return f"tcp://{head}:{self.of.port}"


def _tell(pipe: Connection, **what: Any) -> None:
    pipe.send_bytes(json.dumps(what).encode())


def measure_s(where: torch.device, rank: int, ranks: int) -> float:
    """Seconds of one all-reduce. Raises ValueError where a sum is wrong."""
    numbers = torch.empty(SIZE_BYTES // 4, device=where)
    expected = ranks * (ranks + 1) / 2
    times_s = []
    for _ in range(1 + _TIMES):
        numbers.fill_(rank + 1)
        _wait(where)
        begin_s = time.perf_counter()
        dist.all_reduce(numbers)
        _wait(where)
        times_s.append(time.perf_counter() - begin_s)
        if wrong := int((numbers != expected).sum()):
            raise ValueError(f"{wrong:,} of {numbers.numel():,} sums are wrong")
    return sum(times_s[1:]) / _TIMES  # the first one also makes the connections


def multiply(where: torch.device) -> float:
    """Floating point operations per second of a product of matrices. Raises ValueError where it is wrong."""
    side = _SIDE[where.type]
    ones = torch.ones(side, side, device=where, dtype=torch.bfloat16 if where.type == "cuda" else torch.float32)
    times_s: list[float] = []
    while not times_s or sum(times_s) < _MULTIPLY_S:
        _wait(where)
        begin_s = time.perf_counter()
        product = ones @ ones
        _wait(where)
        times_s.append(time.perf_counter() - begin_s)
    if wrong := int((product != side).sum()):
        raise ValueError(f"{wrong:,} of {product.numel():,} numbers of a product of matrices are wrong")
    return float(2 * side**3 / min(times_s))


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


if __name__ == "__main__":
    order = json.loads(sys.stdin.read())
    place = Machines(**{name: order[name] for name in ("node", "nodes", "head", "port") if name in order})
    print(json.dumps(try_all_reduce(order["device"], order["ranks"], order["limit_s"], machines=place)), flush=True)
