"""A save, all ranks together and durable, against `torch.save` on rank 0; and what the verification costs.

`python tests/bench/checkpoint.py [--rounds 9] [--json] [--mbytes 400]`. `torch_save` is ours over a plain torch.save,
which does not wait for the disk; one that does is in the table. Tensors are hashed while they are read, so
`verify_share` is what a verified load takes longer than one without, over a save: the fastest of all rounds, since what
is looked for is smaller than what a busy machine adds. Both loads read from the page cache, as a restart on the same
machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from jobs.checkpoint import Checkpoints
from jobs.folders import Progress, read_state
from jobs.manifest import look, read_manifest, share
from jobs.state import TrainingState

RANKS = 2
VERIFY_LIMIT = 0.05


def make_state(mbytes: int) -> TrainingState:
    """A network and its AdamW state of so many MB, in 24 tensors of each kind and some small ones."""
    width = int((mbytes * 1e6 / 3 / 4 / 24) ** 0.5)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(24)))
    state = TrainingState(net, torch.optim.AdamW(net.parameters()))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    return state


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def worker(rank: int, folder: str, rounds: int, mbytes: int, queue: Any) -> None:
    """Measure, on one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    place = Path(folder)
    store = Checkpoints(place / "checkpoints", run_id="bench", attempt=1, keep=1, best=None)
    store.check_writable(rank)
    state = make_state(mbytes)
    samples: dict[str, list[float]] = {}

    def peer(path: Path, *, durable: bool) -> None:
        if rank == 0:
            content = {"model": state.net.state_dict(), "optimizer": state.optimizer.state_dict()}
            torch.save(content, path)
            if durable:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def load(path: Path, *, verified: bool) -> None:
        names = share(read_manifest(path), rank, RANKS) if verified else []
        if verified:
            look(path)
        state.restore(path, read_state(path)["optimizer"], None, verify=names)

    for number in range(rounds + 1):
        path = store.folder / f"step-{number}"
        measured = {
            "save": timed(lambda: store.save(state, Progress(step=number), None)),  # noqa: B023 - at once
            "load": timed(lambda: load(path, verified=False)),  # noqa: B023
            "load, verified": timed(lambda: load(path, verified=True)),  # noqa: B023
            "torch.save": timed(lambda: peer(place / f"{number}.pt", durable=False)),  # noqa: B023 - at once
            "torch.save, durable": timed(lambda: peer(place / f"{number}.durable.pt", durable=True)),  # noqa: B023
        }
        if rank == 0:
            for file in place.glob("*.pt"):
                file.unlink()
        if number:  # the first one has everything to learn: kernels, page tables, torch's planner
            for key, time_s in measured.items():
                samples.setdefault(key, []).append(time_s)
    if rank == 0:
        queue.put((samples, sum(p.stat().st_size for p in (store.folder / f"step-{rounds}").iterdir())))
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbytes", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="a last line with the ratios")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(worker, (folder, options.rounds, options.mbytes, queue), nprocs=RANKS)
        samples, size_bytes = queue.get()
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"\nOne checkpoint of {size_bytes / 1e6:,.0f} MB, {RANKS} ranks, gloo on CPU; read from the page cache")
    for name, values in samples.items():
        print(f"  {name:20} {medians[name]:7.3f} s  [{min(values):.3f} - {max(values):.3f}]  n={len(values)}")
    fastest = {name: min(values) for name, values in samples.items()}
    share_of_save = (fastest["load, verified"] - fastest["load"]) / fastest["save"]
    ratios = {"torch_save": medians["save"] / medians["torch.save"], "verify_share": share_of_save}
    print(f"  ratio torch_save     {ratios['torch_save']:.3f}")
    above = "" if share_of_save <= VERIFY_LIMIT else "   ABOVE"
    print(f"  ratio verify_share   {share_of_save:.3f}   (limit {VERIFY_LIMIT:.2f}){above}")
    if options.json:
        print(json.dumps({"ratios": ratios, "medians_s": medians}))


if __name__ == "__main__":
    main()
