"""One training of `throughput.py` under torchrun, in the manner that KIND says; rank 0 writes OUT/steps.jsonl.

The network, its first weights, the digits, the share of the batch, the optimizer and its learning rate are the same in
all manners. What is noted is also the same: the time after the step WARM_UP, and after the last one.
"""

import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nets
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from jobs.data.mnist import MEAN, SAMPLE, STD, read_idx
from jobs.sampler import derive_seed

SETTINGS = json.loads(os.environ["SETTINGS"])
STEPS, WARM_UP, BATCH, LR = (SETTINGS[key] for key in ("steps", "warm_up", "batch", "lr"))
Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor], object]


class Digits(Dataset[tuple[Tensor, int]]):
    """One at a time, as torchvision makes them (ToTensor, Normalize), but without its detour over an image."""

    def __init__(self) -> None:
        self.images = read_idx(SAMPLE / "train-images-idx3-ubyte.gz").unsqueeze(1)
        self.labels = read_idx(SAMPLE / "train-labels-idx1-ubyte.gz").long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (self.images[index].float() / 255 - MEAN / 255) / (STD / 255), int(self.labels[index])


def make_net() -> nn.Module:
    """The same weights as ours."""
    torch.manual_seed(derive_seed("model", 0))
    net: nn.Module = getattr(nets, SETTINGS["model"])()
    return net


def note(step: int, rank: int) -> None:
    """When a step was complete."""
    if rank == 0 and step in (WARM_UP, STEPS):
        with (Path(os.environ["OUT"]) / "steps.jsonl").open("a") as file:
            line = {"step": step, "samples_seen": step * BATCH, "time": time.time(), "cpu_s": time.process_time()}
            file.write(json.dumps(line) + "\n")


def train(batches: Batches, step: Step, rank: int) -> None:
    """As many steps as are wanted."""
    for number, (inputs, targets) in enumerate(batches, 1):
        step(inputs, targets)
        note(number, rank)
        if number == STEPS:
            return


def again(loader: Any, sampler: Any = None) -> Batches:
    """Epoch after epoch."""
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def textbook() -> None:
    """The tutorial: a sample at a time, a loss that is looked at in each step."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = Digits()
    sampler: DistributedSampler[Any] = DistributedSampler(digits, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(digits, batch_size=BATCH // world, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    total = 0.0

    def step(inputs: Tensor, targets: Tensor) -> None:
        nonlocal total
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()

    train(again(loader, sampler), step, rank)


def best() -> None:
    """The best that is written by hand: all that speeds it up, and nothing that a training needs beside it."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = Digits()
    size = BATCH // world
    model = DistributedDataParallel(make_net(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    total = torch.zeros(())
    gc.collect()
    gc.freeze()
    gc.disable()

    def batches() -> Batches:
        epoch = 0
        while True:
            order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(epoch))[rank::world]
            for start in range(0, len(order) - size + 1, size):
                rows = order[start : start + size]
                yield digits.images[rows].float().sub_(MEAN).div_(STD), digits.labels[rows]
            epoch += 1

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    train(batches(), step, rank)


def lightning() -> None:
    """A LightningModule as in its documents, without logger, progress bar and checkpoints."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.net(inputs), targets)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            note(trainer.global_step, trainer.global_rank)

    world = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[Notes()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=os.environ["OUT"],
    )
    trainer.fit(Module(), DataLoader(Digits(), batch_size=BATCH // world, shuffle=True, drop_last=True))


def accelerate() -> None:
    """The textbook's loop with what accelerate prepares."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    world = accelerator.num_processes
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    loader = DataLoader(Digits(), batch_size=BATCH // world, shuffle=True, drop_last=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    total = 0.0

    def step(inputs: Tensor, targets: Tensor) -> None:
        nonlocal total
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item()

    train(again(loader), step, accelerator.process_index)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"textbook": textbook, "best": best, "lightning": lightning, "accelerate": accelerate}[os.environ["KIND"]]()
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # all is measured and written; the teardown of gloo's threads aborts now and then (torch 2.13)
