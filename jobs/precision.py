"""Numbers of fewer bits: around the forward, and between the backward and the update.

The order of an update is unscale, clip, step, update of the scale; always, whatever was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Precision:
    """Full precision, tf32, or autocast to bf16: nothing is scaled."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device

    def around_forward(self) -> AbstractContextManager[Any]:
        """Around a forward and its loss."""
        return torch.autocast(self._device.type, torch.bfloat16) if self.name == "bf16" else nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it goes into the backward."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """After the last backward, before anybody looks at the gradients: give them their own size."""

    def step(self, optimizer: Optimizer) -> None:
        """The update of the weights."""
        optimizer.step()

    def update(self, *, overflow: bool) -> None:
        """After each step, made or left out. overflow: some rank has found gradients that are not finite."""

    @property
    def may_overflow(self) -> bool:
        """Whether gradients that are not finite are a matter of the scale, and a step left out for them is none of
        `faults.on_nan`."""
        return False

    def to_record(self) -> dict[str, Any] | None:
        """For state.json, `scaler`; None where there is nothing to go on from."""
        return None

    def restore(self, record: Mapping[str, Any] | None) -> None:
        """Go on from there. Raises jobs.state.DifferenceError where the checkpoint has a scale and this has none."""


def make_precision(name: str, device: torch.device) -> Precision:
    """For `train.precision`."""
    return Precision(name, device)
