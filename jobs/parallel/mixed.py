"""Strategies over a device mesh: stages (pp), layers that are shared out (tp), and shards or replicas of them (FSDP2).

They are applied in this order, each to what the one before has left of the network. Replicas beside tp or pp are made
by FSDP2 too, with `Replicate` along `dp` and a shard axis of size 1: DistributedDataParallel has no public way to take
parameters that are DTensors, and torch's `replicate` is private.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from jobs.mesh import Grid
from jobs.parallel.base import Shared

Shard = Callable[[nn.Module], None]


class Sharded(Shared):
    """Parameters are DTensors; a forward needs the other ranks."""

    everyone_evaluates = True

    def __init__(self, net: nn.Module, *, sync_each_batch: bool = False) -> None:
        super().__init__(net)
        self._sync_each_batch = sync_each_batch

    @contextmanager
    def sync(self, is_last: bool) -> Iterator[None]:
        """FSDP2 is told so in place of a context."""
        set_gradient_sync(self.net, is_last or self._sync_each_batch)
        yield


def mix(net: nn.Module, grid: Grid, device: torch.device, *, shard: Shard, sync_each_batch: bool = False) -> Shared:
    """The network as the axes of the mesh say. Raises OptionError where it cannot be cut so.

    shard: makes FSDP2 modules of a network's layers and of itself; it is called where a batch is divided.
    """
    if grid.mesh is None:
        assert grid.degrees.size == 1, "nothing would bring the gradients of these ranks together"
        return Shared(net.to(device))
    if grid.degrees.tp > 1:
        from jobs.parallel.tensor import check_plan

        check_plan(net, grid.degrees.tp)  # the whole of it: a stage may have nothing to share out
    if grid.degrees.pp > 1:
        from jobs.parallel.pipeline import Pipeline, cut

        stage = cut(net, grid)
        _share_out(stage.net, grid, device, shard)
        return Pipeline(stage, grid, device)
    _share_out(net, grid, device, shard)
    return Sharded(net, sync_each_batch=sync_each_batch)


def _share_out(net: nn.Module, grid: Grid, device: torch.device, shard: Shard) -> None:
    if grid.degrees.tp > 1:
        from jobs.parallel.tensor import share_layers

        share_layers(net, grid)
    if grid.degrees.data > 1:
        shard(net)
    net.to(device)  # the rest: each layer was brought there as it was divided, so the whole was never there


def shard_layers(net: nn.Module, grid: Grid, *, reshard_after_forward: bool = True, gather: str = "fp32") -> None:
    """Make FSDP2 modules of the layers of a network, and of what is left. In place, and names stay as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if gather == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = grid.axis("fsdp") if grid.degrees.dp == 1 else grid.axis("dp", "fsdp")
    for layer in layers_of(net):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def layers_of(net: nn.Module) -> list[nn.Module]:
    """What is gathered at once: each child with parameters that are its own alone; of a list each of its items."""
    children = [
        child
        for each in net.children()
        for child in (each.children() if isinstance(each, nn.ModuleList | nn.ModuleDict) else (each,))
    ]
    owners = Counter(parameter for child in children for parameter in set(child.parameters()))
    return [
        child
        for child in children
        if (parameters := list(child.parameters())) and all(owners[parameter] == 1 for parameter in parameters)
    ]


def set_gradient_sync(net: nn.Module, wanted: bool) -> None:
    """Whether gradients travel with the next backward. Nothing where the network is no FSDP2 module."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(wanted)
