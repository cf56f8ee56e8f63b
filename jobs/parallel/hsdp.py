"""Replicas of shards: FSDP2 over a mesh with two axes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.parallel.fsdp import fsdp
from jobs.registry import strategy


@strategy("hsdp")
def hsdp(
    net: nn.Module,
    grid: Grid,
    device: torch.device,
    *,
    reshard_after_forward: bool = True,
    sync_each_batch: bool = False,
    gather: Literal["fp32", "bf16"] = "fp32",
) -> Shared:
    """Shards within a node, replicas of them over the nodes: layers are gathered over the fast links alone (FSDP2).

    Args:
        reshard_after_forward: Layers are given up after the forward, and gathered again in the backward: less memory.
        sync_each_batch: Gradients travel with each micro-batch: less memory with `accumulate`, and more traffic.
        gather: What layers travel and compute as. bf16 = half of the bytes; gradients and optimizer stay in fp32.
    """
    options = {"reshard_after_forward": reshard_after_forward, "sync_each_batch": sync_each_batch}
    return fsdp(net, grid, device, gather=gather, **options)  # the mesh makes the difference
