"""Held-out data: every sample once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from jobs.agreement import Agreement
from jobs.data.base import Samples
from jobs.loader import Fetch
from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.tasks.base import Task

BATCH = 512
TOKENS = 8192
"""Of a batch of sequences: the scores of each token, one for each of the vocabulary, take the memory."""


def batch_size(task: Task, fetch: Fetch) -> int:
    """Samples that are evaluated at once."""
    return BATCH if task.unit is None else max(1, TOKENS // fetch[0, torch.zeros(1, dtype=torch.int64)][1].numel())


def evaluate(
    shared: Shared,
    task: Task,
    samples: Samples,
    *,
    grid: Grid,
    device: torch.device,
    agreement: Agreement,
    precision: AbstractContextManager[object],
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float] | None:
    """The metrics of the task over all ranks, from exact sums; None where some rank was told to stop meanwhile."""
    fetch = Fetch(samples, seed=0)
    shares = grid.degrees.data
    mine = torch.arange(len(samples))[grid.data_rank :: shares]  # none, where there are fewer samples than ranks
    idle = torch.zeros(1, dtype=torch.int64)
    batch = batch_size(task, fetch)
    sums = torch.zeros(1 + len(task.measures), dtype=torch.float64)
    shared.net.eval()
    with torch.inference_mode(), precision:
        # every rank goes round as often as rank 0, which has the most: each round is an agreement
        for start in range(0, -(-len(samples) // shares), batch):
            on_batch()
            agreement.send()
            indices = mine[start : start + batch]
            if len(indices) or shared.everyone_evaluates:
                inputs, targets = (tensor.to(device) for tensor in fetch[0, indices if len(indices) else idle])
                outputs = shared.evaluate(inputs)
                if outputs is not None and grid.speaks and len(indices):
                    sums[0] += task.loss(outputs, targets).double().cpu()
                    sums[1:] += task.measure(outputs, targets).double().cpu()
            if agreement.receive().stop:
                shared.net.train()
                return None
    shared.net.train()
    loss, *measured = (value / len(samples) for value in agreement.now(*sums.tolist()).sums)
    metrics = task.metrics(loss, dict(zip(task.measures, measured, strict=True)))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
