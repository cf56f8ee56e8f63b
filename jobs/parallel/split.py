"""One model over several devices, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jobs.mesh import Grid
from jobs.parallel.balance import balanced
from jobs.parallel.base import Pass, Shared
from jobs.registry import OptionError, strategy

ON_CPU = "parallelism.strategy: split has no GPUs to divide the model between: on CPU all parts are in one memory"


class Split(Shared):
    """Each device has some of the layers, one after the other; what lies between two layers goes where the next is."""

    def __init__(self, net: nn.Sequential, devices: Sequence[torch.device]) -> None:
        self._first = devices[0]
        layers = list(net)
        try:
            parts = balanced([_size_bytes(layer) for layer in layers], len(devices))
        except ValueError as error:
            raise OptionError(f"parallelism.devices: {error}") from None
        for part, device in zip(parts, devices, strict=True):
            for layer in layers[part.start : part.stop]:
                layer.to(device)
                layer.register_forward_pre_hook(_Bring(device))
        super().__init__(net)

    def loss(self, work: Pass, outputs: Tensor, targets: Tensor) -> Tensor:
        """Made where the last layer is; the number itself comes to the first device, as the trainer knows it there."""
        return work.loss(outputs, targets.to(outputs.device, non_blocking=True)).to(self._first)

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Outputs on the device of the inputs."""
        outputs: Tensor = self.net(inputs)
        return outputs.to(self._first)


class _Bring:
    """Before the forward of a layer: its input comes to its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each.to(self._device, non_blocking=True) for each in inputs)


@strategy("split")
def split(net: nn.Module, grid: Grid, device: torch.device, *, devices: int = 0) -> Shared:
    """One process holds a model that is too large for one GPU: each GPU has some of the layers, balanced by size.

    One GPU computes at a time. Where that matters, use `pp` (stages that work at the same time) or fsdp.

    Args:
        devices: How many GPUs; 0 = all. On CPU the parts are all in the same memory.
    """
    if not isinstance(net, nn.Sequential):
        raise OptionError(
            f"parallelism.strategy: split cuts between the layers of an nn.Sequential, and the model is a "
            f"{type(net).__name__}"
        )
    shared = Split(net, _devices(device, devices))
    if device.type == "cpu":
        shared.remarks = (ON_CPU,)
    return shared


def _devices(first: torch.device, wanted: int) -> list[torch.device]:
    if first.type == "cpu":
        return [first] * max(1, wanted)
    there = torch.cuda.device_count()
    if wanted > there:
        raise OptionError(f"parallelism.devices: {wanted}; CUDA devices here: {there}")
    others = [index for index in range(there) if index != first.index]
    return [torch.device("cuda", index) for index in [first.index, *others][: wanted or there]]


def _size_bytes(layer: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in layer.parameters())
