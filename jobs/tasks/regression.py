"""Numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from jobs.registry import OptionError, task


@task("regression")
def regression() -> Regression:
    """Numbers of a sample, or of a sequence: squared and absolute error."""
    return Regression()


@dataclass(frozen=True)
class Regression:
    """Outputs and targets are numbers of the same shape, (batch, values). A sample has the mean over its values."""

    measures: tuple[str, ...] = ("absolute",)
    unit: str | None = None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error. Raises OptionError where the shapes differ: they would be broadcast."""
        _check(outputs, targets)
        return F.mse_loss(outputs.float(), targets.float(), reduction="sum") / _values(targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean absolute error."""
        _check(outputs, targets)
        return (outputs.float() - targets.float()).abs().sum().reshape(1) / _values(targets)

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Mean squared error, its root, and the mean absolute error."""
        return {"eval/loss": loss, "eval/rmse": math.sqrt(loss), "eval/mae": means["absolute"]}


def _values(targets: Tensor) -> int:
    return targets[0].numel()


def _check(outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise OptionError(
            f"train.task: regression compares numbers one by one, and the network gives {tuple(outputs.shape[1:])} "
            f"per sample where the data has {tuple(targets.shape[1:])}"
        )
