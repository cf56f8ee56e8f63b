"""A rank of `test_jobs_host_sum.py`: `host_sum_ranks.py RANK RANKS PORT DO FOLDER`; its finding goes to FOLDER/RANK."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jobs import host_sum
from jobs.keeper import is_peer_lost
from jobs.sockets import GroupSockets

RANK, RANKS, PORT = (int(text) for text in sys.argv[1:4])
DO, OUT = sys.argv[4], Path(sys.argv[5]) / sys.argv[1]
SIZES = (1, 7, 1000, 118_283, 600_000)


def numbers(size: int, seed: int) -> torch.Tensor:
    """Whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 10.0**powers


def sums() -> object:
    """Which sums differ from those of torch."""
    wrong = []
    for size in SIZES:
        row = torch.zeros(size)
        made = host_sum.connect(row, local_size=RANKS, timeout_s=60)
        assert made is not None
        assert not row.any()
        for turn in range(5):
            row.copy_(numbers(size, 100 * turn + RANK))
            plain = row.clone()
            dist.all_reduce(plain)
            made.all_reduce()
            wrong += [] if torch.equal(row, plain) else [(size, turn)]
        made.close()
    return wrong


def ends(how: str) -> object:
    """What the others see when the last rank does something else than to meet them."""
    row, sockets = torch.zeros(1000), GroupSockets(store_port=PORT)
    with sockets.watch():
        made = host_sum.connect(row, local_size=RANKS, timeout_s=0.5 if how == "late" else 60)
    assert made is not None
    made.all_reduce()
    if RANK == RANKS - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(30 if how == "late" else None)
    if how == "shut":
        threading.Timer(0.2, sockets.shut).start()
    try:
        made.all_reduce()
    except (RuntimeError, OSError) as error:
        return [is_peer_lost(error), f"{type(error).__name__}: {error}"]
    return "it came back"


def refusals() -> object:
    """Where ranks are elsewhere, and where the memory cannot be had on one of them."""
    row = torch.zeros(10)
    elsewhere = host_sum.connect(row, local_size=RANKS - 1, timeout_s=60)
    if RANK == 0:
        os.memfd_create = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    without = host_sum.connect(row, local_size=RANKS, timeout_s=60)
    return [elsewhere is None, without is None]


if __name__ == "__main__":
    torch.set_num_threads(1)
    host_sum._CONNECT_S = 5.0
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    found = {"sums": sums, "refusals": refusals}[DO]() if DO in ("sums", "refusals") else ends(DO)
    OUT.write_text(json.dumps(found))
    os._exit(0)
