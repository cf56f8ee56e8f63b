"""One rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from jobs.registry import strategy


@strategy("single")
def single(net: nn.Module, device: torch.device) -> nn.Module:
    """One process, nothing is shared."""
    if dist.is_initialized() and dist.get_world_size() != 1:
        raise ValueError(
            f"parallelism.strategy: single is for one rank, and there are {dist.get_world_size()}; use ddp"
        )
    return net
