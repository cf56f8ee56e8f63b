"""Held-out data: every sample once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from jobs.agreement import Agreement
from jobs.data.base import Samples
from jobs.loader import Fetch
from jobs.objective import loss_sum, num_correct
from jobs.world import World

BATCH = 512


def evaluate(
    net: nn.Module,
    samples: Samples,
    *,
    world: World,
    device: torch.device,
    agreement: Agreement,
    precision: AbstractContextManager[object],
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float] | None:
    """Mean loss and accuracy over all ranks, as exact sums; None where some rank was told to stop meanwhile."""
    fetch = Fetch(samples, seed=0)
    mine = torch.arange(world.rank, len(samples), world.size)
    loss, correct = 0.0, 0.0
    net.eval()
    with torch.inference_mode(), precision:
        # every rank goes round as often as rank 0, which has the most: each round is an agreement
        for start in range(0, -(-len(samples) // world.size), BATCH):
            on_batch()
            agreement.send()
            indices = mine[start : start + BATCH]
            if len(indices):
                inputs, targets = (tensor.to(device) for tensor in fetch[0, indices])
                outputs = net(inputs)
                loss += loss_sum(outputs, targets).item()
                correct += num_correct(outputs, targets).item()
            if agreement.receive().stop:
                net.train()
                return None
    net.train()
    agreed = agreement.now(loss, correct)
    loss, correct = agreed.sums
    metrics = {"eval/loss": loss / len(samples), "eval/accuracy": correct / len(samples)}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
