"""Replicas."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.parallel.mixed import mix, shard_layers
from jobs.parallel.row import Row, fits_row
from jobs.registry import OptionError, strategy

NOT_EXACT = (
    "parallelism.comm: powersgd: its memory of what it left out of the gradients is not in the checkpoints; a resumed "
    "run trains as well as one that was never stopped, and ends with other bits"
)


@strategy("ddp")
def ddp(
    net: nn.Module,
    grid: Grid,
    device: torch.device,
    *,
    bucket_cap_mb: int = 25,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    sync_batchnorm: bool = False,
    comm: Literal["fp32", "fp16", "bf16", "powersgd"] = "fp32",
    powersgd_rank: int = 1,
    powersgd_start: int = 1000,
) -> Shared:
    """Each rank holds the whole model and a share of the batch; gradients are averaged (DistributedDataParallel).

    The gradients of a small model on CPUs (1 MiB at most) travel in one row, without it: faster, with the same sums.

    With `tp` or `pp` the replicas are made by FSDP2 over ranks of which each holds all of its part: of torch's public
    ways it is the one that knows of layers that are shared out. It has none of the options below but `sync_batchnorm`.

    A run with `comm: powersgd` that is resumed ends with other bits than one that was never stopped: what is left out
    of the gradients of a step is added in a later one, and this memory is each rank's own and not saved.

    Args:
        bucket_cap_mb: Gradients travel in buckets of this size (MiB).
        static_graph: The forward is the same in every step: fewer checks, and layers may be used again in a step.
        find_unused_parameters: A forward may leave layers out. Slower; with static_graph it is not needed.
        sync_batchnorm: Batch norm over the samples of all ranks. GPUs only.
        comm: What gradients travel as. fp16, bf16 = half of the bytes; powersgd = a product of two small matrices.
        powersgd_rank: Width of these matrices: more is more exact, and more bytes.
        powersgd_start: Steps of each attempt before powersgd begins, in which gradients travel as fp32; 2 or more.
    """
    if sync_batchnorm:
        if device.type == "cpu":
            raise OptionError(
                "parallelism.sync_batchnorm: true, on CPU, where torch has none; leave it out, or use GPUs"
            )
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
    if comm == "bf16" and device.type == "cpu":
        raise OptionError("parallelism.comm: bf16 travels over NCCL alone, and this is a CPU; use fp32 or fp16 here")
    if grid.mesh is not None:
        _refuse_in_products(
            static_graph=static_graph or None,
            find_unused_parameters=find_unused_parameters or None,
            comm=comm if comm != "fp32" else None,
        )
        return mix(net, grid, device, shard=lambda layers: shard_layers(layers, grid))
    is_plain = comm == "fp32" and bucket_cap_mb == 25 and not (static_graph or find_unused_parameters)
    if is_plain and fits_row(net, device):
        return Row(net, ranks=grid.degrees.size)
    wrapped = DistributedDataParallel(
        net.to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,  # jobs.buffers does it, earlier
    )
    shared = Shared(net, wrapped)
    if comm == "powersgd":
        _compress(wrapped, rank=powersgd_rank, start=powersgd_start)
        shared.remarks = (NOT_EXACT,)
    elif comm != "fp32":
        _halve(wrapped, comm)
    return shared


def _halve(wrapped: DistributedDataParallel, comm: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.fp16_compress_hook if comm == "fp16" else default_hooks.bf16_compress_hook
    wrapped.register_comm_hook(None, hook)


def _compress(wrapped: DistributedDataParallel, *, rank: int, start: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if start < 2:  # torch's own bound: the buckets are made anew after the first step
        raise OptionError(f"parallelism.powersgd_start: {start}; it must be 2 or more")
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _refuse_in_products(**given: object) -> None:
    wrong = [f"{name} ({value})" for name, value in given.items() if value is not None]
    if wrong:
        raise OptionError(f"parallelism: {', '.join(wrong)}: of ddp alone, not together with tp or pp")
