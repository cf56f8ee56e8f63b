"""Joins, makes one all-reduce (and one DDP step with STEP=1), notes the times; LOOP=1: goes on until OUT/stop exists.

Plain torchrun script: knows nothing of any launcher. OUT: a folder for the notes.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def note(kind: str) -> None:
    """Write down when this rank got here, complete or not at all."""
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["RANK"]
    path = Path(os.environ["OUT"]) / f"{kind}-{attempt}-{rank}"
    path.with_suffix(".tmp").write_text(f"{time.time()} {os.getpid()}")
    path.with_suffix(".tmp").rename(path)


def step() -> None:
    """One optimizer step of a small network under DDP."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()


def main() -> None:
    """Join, do the work, note, leave."""
    dist.init_process_group("gloo")
    value = torch.ones(4)
    dist.all_reduce(value)
    note("first_all_reduce")
    if os.environ.get("STEP"):
        step()
        note("first_step")
    stop = torch.zeros(1)
    while os.environ.get("LOOP") and not stop:
        stop.fill_(float((Path(os.environ["OUT"]) / "stop").exists()))
        dist.all_reduce(stop)
        time.sleep(0.002)
    dist.destroy_process_group()
    if os.environ.get("STEP"):
        # After a DDP step torch 2.13's own end may abort ("terminate called without an active exception"; seen in 3 of
        # about 40 ends under torchrun). What is measured has been noted.
        os._exit(0)


if __name__ == "__main__":
    main()
