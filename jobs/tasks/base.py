"""What a task is here: a loss, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from jobs.registry import OptionError


class Task(Protocol):
    """What a function decorated with `@task` returns.

    Sums over samples add up over micro-batches and ranks of any size; means do not. So everything here is a sum over
    samples, and what is a mean within one sample (over its tokens, over its values) has been taken already.
    """

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what `measure` counts, beside the loss."""

    @property
    def unit(self) -> str | None:
        """What each target consists of (tokens), where people count the speed of a training in these too."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, summed over the samples; a number to train with. In fp32."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is counted of an evaluation, summed over the samples: one number for each of `measures`."""

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics by their names (`eval/accuracy`), from the mean loss and the means of `measures` over all samples."""


def check_scores(task: str, outputs: Tensor, targets: Tensor, each: str, *, dims: int = 1) -> None:
    """Raise OptionError where targets are no whole numbers, or a network does not give one row of scores for each.

    What torch would say of it names neither the model nor the data. each: what a target is of, in words. dims: of the
    targets of a batch.
    """
    if targets.is_floating_point():
        kind = str(targets.dtype).removeprefix("torch.")
        raise OptionError(
            f"train.task: {task} wants a whole number for {each}, and the data has {kind}; "
            "the number of its class, or train.task: {name: regression}"
        )
    if targets.ndim != dims:
        shape = f"one of the shape {tuple(targets.shape[1:])}" if targets.ndim > 1 else "a single one"
        other = "classification" if dims > 1 else "language_modelling"
        raise OptionError(
            f"train.task: {task} wants a whole number for {each}, and a sample of the data has {shape}; other data, or "
            f"train.task: {{name: {other}}}"
        )
    if not isinstance(outputs, Tensor):
        given = f"a {type(outputs).__name__}, not a tensor"
    elif outputs.ndim != targets.ndim + 1 or outputs.shape[:-1] != targets.shape:
        given = f"numbers of the shape {tuple(outputs.shape)}"
    else:
        return
    wanted = ", ".join([*(str(size) for size in targets.shape), "scores"])
    raise OptionError(
        f"train.task: {task} wants scores for {each}, ({wanted}) for these samples, and the network gives {given}"
    )
