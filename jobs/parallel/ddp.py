"""Replicas."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.registry import strategy


@strategy("ddp")
def ddp(net: nn.Module, grid: Grid, device: torch.device, *, bucket_cap_mb: int = 25) -> Shared:
    """Each rank holds the whole model and a share of the batch; gradients are averaged (DistributedDataParallel).

    Args:
        bucket_cap_mb: Gradients travel in buckets of this size (MiB).
    """
    wrapped = DistributedDataParallel(
        net,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,  # jobs.buffers does it, earlier
    )
    return Shared(net, wrapped)
