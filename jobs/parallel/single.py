"""One rank."""

from __future__ import annotations

import torch
from torch import nn

from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.registry import strategy


@strategy("single")
def single(net: nn.Module, grid: Grid, device: torch.device) -> Shared:
    """One process, nothing is shared."""
    return Shared(net.to(device))
