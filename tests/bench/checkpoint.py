"""How long a training is blocked by a save of about 400 MB, ours against its peers; and what the verification costs.

`python tests/bench/checkpoint.py [--rounds 9] [--json] [--mbytes 400]`. Two ranks train a network with AdamW (gloo)
and save between two steps; each contender in turn, so that a slow minute of the machine meets all of them.

    ours                  the copy is made while the next forward and backward run, and the update waits for it
    ours, copied at once  the same with the copy before the next step
    ours, not asynchronous  all of it before the next step
    torch.save + fsync    rank 0 writes, the others wait
    dcp.save, dcp.async_save    of torch; async_save at its defaults, and with a stager and a group that are kept

`blocked` is what the loop waits, of the rank that waits longest; `complete` is the time until the checkpoint is on the
disk; `lost` is how much later the training is when that has happened, than without a save: the thread that writes takes
its share of the processors too. `torch_save` and `async_save` are the ratios of `blocked`, to torch.save + fsync and to
the better one of the two async_saves.

Tensors are hashed while they are read, so `verify_share` is what a verified load takes longer than one without, over a
save that blocks: the fastest of all rounds, since what is looked for is smaller than what a busy machine adds. Both
loads read from the page cache, as a restart on the same machine does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.parallel import DistributedDataParallel

from jobs.agreement import Agreement
from jobs.checkpoint import Checkpoints
from jobs.folders import Progress, read_state
from jobs.manifest import look, read_manifest, share
from jobs.saving import Saving, Voice
from jobs.state import TrainingState
from jobs.stop import StopRequest

RANKS = 2
VERIFY_LIMIT = 0.05
LIMITS = {"torch_save": 0.25, "async_save": 0.35}
LAYERS = 24
CPU_NOTE = "CPU, gloo: says nothing about copies from a GPU."


@dataclass
class Training:
    """A network of so many MB with its AdamW state, and its steps."""

    mbytes: int
    batch: int
    before_update: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        width = int((self.mbytes * 1e6 / 3 / 4 / LAYERS) ** 0.5)
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.state = TrainingState(net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True))
        self.inputs = torch.randn(self.batch, width)
        self.steps = 0

    def step(self) -> float:
        """Train; returns how long the update had to wait."""
        torch.autograd.backward(self.wrapped(self.inputs).square().mean())
        begin = time.perf_counter()
        self.before_update()
        waited_s = time.perf_counter() - begin
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return waited_s

    def content(self) -> dict[str, Any]:
        """For the peers."""
        return {"model": self.state.net.state_dict(), "optimizer": self.state.optimizer.state_dict()}


@dataclass
class Begun:
    """A save that has begun; `wait` returns when it is complete, and until then the training goes on."""

    is_complete: Callable[[], bool]
    wait: Callable[[], Any]


def done() -> Begun:
    """One that is complete."""
    return Begun(lambda: True, lambda: None)


class Contenders:
    """What saves, on one rank."""

    def __init__(self, training: Training, place: Path, rank: int) -> None:
        self.training, self.place, self.rank = training, place, rank
        self.group, self.peers_group = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        self.store = Checkpoints(place / "checkpoints", run_id="bench", attempt=1, keep=1, best=None)
        self.store.check_writable(rank)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self.stager = DefaultStager(options)
        self.agreement = Agreement(StopRequest())
        voice = Voice(complete=lambda *_: None, failed=lambda *_: None, say=lambda _: None)
        self.saving = {
            asynchronous: Saving(self.store, self.group, voice, asynchronous=asynchronous, max_failed=0)
            for asynchronous in (True, False)
        }

    def all(self) -> dict[str, Callable[[int], Begun]]:
        """By their names; each takes a number that no other save has."""
        return {
            "ours": lambda number: self.ours(number, at_once=False),
            "ours, copied at once": lambda number: self.ours(number, at_once=True),
            "ours, not asynchronous": self.ours_in_front,
            "torch.save + fsync": self.torch_save,
            "dcp.save": self.dcp_save,
            "dcp.async_save": self.async_save,
            "dcp.async_save, kept": self.async_save_kept,
        }

    def ours(self, number: int, *, at_once: bool) -> Begun:
        """In the background."""
        saving = self.saving[True]
        saving.begin(self.training.state, Progress(step=number), self.agreement, last=False)
        if at_once:
            saving.wait_for_copy()
        self.training.before_update = saving.wait_for_copy
        work = saving._work
        assert work is not None
        return Begun(work.done.is_set, lambda: saving.finish(self.agreement))

    def ours_in_front(self, number: int) -> Begun:
        """All of it before the training goes on."""
        saving = self.saving[False]
        saving.begin(self.training.state, Progress(step=number), self.agreement, last=False)
        saving.finish(self.agreement)
        return done()

    def torch_save(self, number: int) -> Begun:
        """As most scripts do, but to the disk."""
        if self.rank == 0:
            with (self.place / f"{number}.pt").open("wb") as file:
                torch.save(self.training.content(), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return done()

    def dcp_save(self, number: int) -> Begun:
        """Of torch; all ranks write."""
        dcp.save(self.training.content(), checkpoint_id=self.place / f"{number}.dcp", process_group=self.peers_group)
        return done()

    def async_save(self, number: int) -> Begun:
        """At its defaults, which need a group that gloo serves."""
        future = dcp.async_save(
            self.training.content(), checkpoint_id=self.place / f"{number}.dcp", process_group=self.peers_group
        )
        return self._of(future)

    def async_save_kept(self, number: int) -> Begun:
        """With memory that is kept from one save to the next."""
        future = dcp.async_save(
            self.training.content(),
            checkpoint_id=self.place / f"{number}.dcp",
            process_group=self.peers_group,
            async_stager=self.stager,
        )
        return self._of(getattr(future, "upload_completion", future))

    def _of(self, future: Any) -> Begun:
        return Begun(future.done, future.result)

    def tidy(self) -> None:
        """Remove what the peers have written, and let the disk come to rest."""
        if self.rank == 0:
            for path in self.place.iterdir():
                if path.suffix == ".pt":
                    path.unlink()
                elif path.suffix == ".dcp":
                    shutil.rmtree(path)
            os.sync()
        dist.barrier()


def all_say(value: bool) -> bool:
    """Whether it is so on every rank."""
    message = torch.tensor([float(value)])
    dist.all_reduce(message, op=dist.ReduceOp.MIN)
    return message.item() > 0


def slowest(value: float) -> float:
    """Of all ranks."""
    message = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    return message.item()


def measure(training: Training, save: Callable[[], Begun], step_s: float) -> dict[str, float]:
    """One save between two steps, and the steps until it is complete."""
    dist.barrier()
    begin = time.perf_counter()
    begun = save()
    blocked_s = time.perf_counter() - begin
    steps, training_s = 0, 0.0
    while True:
        before = time.perf_counter()
        blocked_s += training.step()
        training_s += time.perf_counter() - before
        steps += 1
        if all_say(begun.is_complete()):
            break
    complete_s = time.perf_counter() - begin
    begun.wait()
    training.before_update = lambda: None
    figures = {"blocked": blocked_s, "complete": complete_s, "lost": complete_s - steps * step_s}
    return {name: slowest(value) for name, value in figures.items()}


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def worker(rank: int, folder: str, options: argparse.Namespace, queue: Any) -> None:
    """Measure, on one of the ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    training = Training(options.mbytes, options.batch)
    for _ in range(3):
        training.step()
    contenders = Contenders(training, Path(folder), rank)
    samples: dict[str, dict[str, list[float]]] = {}
    number = 0
    for turn in range(options.rounds + 1):
        for name, save in contenders.all().items():
            step_s = timed(lambda: [training.step() for _ in range(3)]) / 3
            number += 1
            measured = measure(training, lambda: save(number), step_s)  # noqa: B023 - at once
            contenders.tidy()
            if turn:  # the first one has everything to learn: kernels, memory, torch's planner
                for figure, time_s in {**measured, "a step": step_s}.items():
                    samples.setdefault(name, {}).setdefault(figure, []).append(time_s)
        loads = measure_loads(contenders, training.state, rank)
        if turn:
            for figure, time_s in loads.items():
                samples.setdefault(figure, {}).setdefault("", []).append(time_s)
    if rank == 0:
        [newest] = contenders.store.folder.glob("step-*")
        queue.put((samples, sum(path.stat().st_size for path in newest.iterdir())))
    dist.barrier()
    os._exit(0)  # gloo's own end may wait for ever for a peer that has closed first


def measure_loads(contenders: Contenders, state: TrainingState, rank: int) -> dict[str, float]:
    """Of the newest checkpoint of ours, with and without its verification."""
    [path] = contenders.store.folder.glob("step-*")

    def load(*, verified: bool) -> None:
        names = share(read_manifest(path), rank, RANKS) if verified else []
        if verified:
            look(path)
        state.restore(path, read_state(path)["optimizer"], None, verify=names)

    load(verified=False)  # what comes first finds cold memory
    return {"load": timed(lambda: load(verified=False)), "load, verified": timed(lambda: load(verified=True))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbytes", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="of each rank: how long a forward and a backward take")
    parser.add_argument("--json", action="store_true", help="a last line with the ratios")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-", dir=options.folder)
    try:
        queue = mp.get_context("spawn").SimpleQueue()
        context = mp.spawn(worker, (folder, options, queue), nprocs=RANKS, join=False)
        samples, size_bytes = queue.get()
        while not context.join():
            pass
    finally:
        shutil.rmtree(folder)
    print(f"\nOne checkpoint of {size_bytes / 1e6:,.0f} MB, {RANKS} ranks. {CPU_NOTE}")
    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in samples.items()
    }
    for name, figures in samples.items():
        for figure, values in figures.items():
            spread = f"[{min(values):.3f} - {max(values):.3f}]"
            print(f"  {name:24} {figure:9} {medians[name][figure]:7.3f} s  {spread}  n={len(values)}")
    blocked = {name: figures["blocked"] for name, figures in medians.items() if "blocked" in figures}
    peer = min(blocked["dcp.async_save"], blocked["dcp.async_save, kept"])
    ratios = {"torch_save": blocked["ours"] / blocked["torch.save + fsync"], "async_save": blocked["ours"] / peer}
    for key, ratio in ratios.items():
        print(f"  ratio {key:18} {ratio:.3f}   (limit {LIMITS[key]:.2f}){'' if ratio <= LIMITS[key] else '   ABOVE'}")
    at_once = blocked["ours, copied at once"]
    print(f"  copied at once: {at_once / blocked['torch.save + fsync']:.3f} and {at_once / peer:.3f}")
    saved_s = min(samples["ours, not asynchronous"]["blocked"])
    share_of_save = (min(samples["load, verified"][""]) - min(samples["load"][""])) / saved_s
    above = "" if share_of_save <= VERIFY_LIMIT else "   ABOVE"
    print(f"  ratio verify_share       {share_of_save:.3f}   (limit {VERIFY_LIMIT:.2f}){above}")
    if options.json:
        print(json.dumps({"ratios": {**ratios, "verify_share": share_of_save}, "medians_s": medians}))


if __name__ == "__main__":
    main()
