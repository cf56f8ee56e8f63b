"""Replicas in one process."""

from __future__ import annotations

import torch
from torch import nn

from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.registry import strategy

ON_CPU = "parallelism.strategy: data_parallel has no GPUs to divide a batch between: on CPU it is the same as single"


@strategy("data_parallel")
def data_parallel(net: nn.Module, grid: Grid, device: torch.device) -> Shared:
    """One process copies the model to all its GPUs in every step (nn.DataParallel). Slower than ddp; for old scripts.

    On CPU it is the same as `single`, and the run says so.
    """
    net = net.to(device)
    devices = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    if device.index:  # the first one has the parameters, and gathers the outputs
        devices = [device.index, *(index for index in devices if index != device.index)]
    shared = Shared(net, nn.DataParallel(net, device_ids=devices or None))
    if not devices:
        shared.remarks = (ON_CPU,)
    return shared
