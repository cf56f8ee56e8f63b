"""Random data with a pattern to learn."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from jobs.data.base import Data, TensorSamples
from jobs.registry import dataset


@dataset("synthetic")
def synthetic(
    *,
    samples: int = 10_000,
    eval_samples: int = 1_000,
    shape: str = "784",
    classes: int = 10,
    data_seed: int = 0,
) -> Synthetic:
    """Random numbers, labelled by a fixed random linear function of them. Needs no files.

    Args:
        samples: Samples to train on.
        eval_samples: Samples held out. 0 = none, nothing is evaluated.
        shape: Shape of one sample: `784`, or `1x28x28`.
        classes: Number of classes.
        data_seed: Which random numbers. Independent of train.seed.
    """
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"data.shape: {shape!r} is not a shape; write it as `784` or `1x28x28`")
    sizes = tuple(int(size) for size in shape.split("x"))
    return Synthetic(samples, eval_samples, sizes, classes, data_seed)


@dataclass(frozen=True)
class Synthetic:
    """A seeded function instead of files."""

    samples: int
    eval_samples: int
    shape: tuple[int, ...]
    classes: int
    seed: int

    def prepare(self) -> None:
        """Nothing to bring."""

    def load(self) -> Data:
        """Draw the samples; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.samples + self.eval_samples, *self.shape, generator=generator)
        teacher = torch.randn(inputs[0].numel(), self.classes, generator=generator)
        labels = (inputs.flatten(1) @ teacher).argmax(dim=1)
        held_out = TensorSamples(inputs[self.samples :], labels[self.samples :]) if self.eval_samples else None
        return Data(TensorSamples(inputs[: self.samples], labels[: self.samples]), held_out)
