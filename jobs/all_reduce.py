"""The first thing that ranks do together, tried alone: an all-reduce. What `launch doctor` starts.

Standard input is one JSON object:
    {"device": "cuda" or "cpu", "ranks": 4, "limit_s": 60}
and the last line of standard output too:
    {"ok", "hung", "said", "reduce_s", "size_bytes"}, said: what went wrong, as a sentence without a full stop
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
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

Work = Callable[[torch.device, int, int], float]
"""(device, rank, ranks) -> seconds."""


@dataclass(kw_only=True)
class Heard:
    """What one rank has told so far."""

    process: ForkProcess
    joined: bool = False
    reduce_s: float | None = None
    error: str = ""
    died: bool = False
    """Whether it ended and could not say why."""

    @property
    def is_through(self) -> bool:
        """Whether there is nothing more to hear."""
        return self.died or bool(self.error) or self.reduce_s is not None


def try_all_reduce(device: str, ranks: int, limit_s: float, work: Work | None = None) -> dict[str, Any]:
    """Fork the ranks, and hear what becomes of them; whoever is not through after `limit_s` is killed.

    work: what each rank does after it has joined, in place of the all-reduce.
    """
    context = multiprocessing.get_context("fork")  # here is no thread and no CUDA: that begins in the ranks
    heard: dict[Connection, Heard] = {}
    with tempfile.TemporaryDirectory(prefix="launch-all-reduce-") as folder:
        rank_of = _Rank(Path(folder) / "store", device, ranks, limit_s, work or measure_s)
        for rank in range(ranks):
            read, write = context.Pipe(duplex=False)
            process = context.Process(target=rank_of, args=(rank, write), daemon=True)
            process.start()
            write.close()
            heard[read] = Heard(process=process)
        try:
            _listen(heard, time.monotonic() + limit_s)
        finally:
            for each in heard.values():
                each.process.kill()
                each.process.join()
    return _judge(list(heard.values()), limit_s)


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


def _judge(ranks: list[Heard], limit_s: float) -> dict[str, Any]:
    """What there is to say when no rank lives any more. A rank that died is why others have lost it."""
    wrong = [f"rank {rank} {_end(each.process.exitcode)}" for rank, each in enumerate(ranks) if each.died]
    wrong += [f"rank {rank}: {each.error}" for rank, each in enumerate(ranks) if each.error]
    hung = not wrong and any(each.reduce_s is None for each in ranks)
    if hung and all(each.joined for each in ranks):
        wrong = [f"all ranks have met, and the all-reduce has not ended after {limit_s:g} s"]
    elif hung:
        absent = [str(rank) for rank, each in enumerate(ranks) if not each.joined]
        wrong = [f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} did not join in {limit_s:g} s"]
    return {
        "ok": not wrong,
        "hung": hung,
        "said": wrong[0] if wrong else "",
        "reduce_s": None if wrong else max(each.reduce_s or 0.0 for each in ranks),
        "size_bytes": SIZE_BYTES,
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

    def __call__(self, rank: int, pipe: Connection) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            where = torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)
            self._join(where, rank)
            _tell(pipe, joined=True)
            _tell(pipe, reduce_s=self.work(where, rank, self.ranks))
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
            init_method=f"file://{self.store}",
            rank=rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=2 * self.limit_s),  # the parent ends it before
            device_id=where if on_gpus else None,
        )


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


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


if __name__ == "__main__":
    order = json.loads(sys.stdin.read())
    print(json.dumps(try_all_reduce(order["device"], order["ranks"], order["limit_s"])), flush=True)
