"""Random data with a pattern to learn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from jobs.data.base import Data, Samples, TensorSamples
from jobs.data.windows import TokenWindows
from jobs.registry import OptionError, dataset

TASKS = {"classification": "classification", "regression": "regression", "tokens": "language_modelling"}
"""What each kind is made for."""
SURE = 0.8
"""How often a token is followed by the one that the pattern says; else by any. The rest cannot be learned: of ten
tokens the loss goes from 2.3 to 0.87 nats."""
BOUNDS = {"samples": (1, None), "eval_samples": (0, None), "classes": (1, None)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
HAS = (
    {"when": {"kind": "classification"}, "task": "classification", "shape": ("=shape",), "classes": "=classes"},
    {"when": {"kind": "regression"}, "task": "regression", "shape": ("=shape",)},
    {"when": {"kind": "tokens"}, "task": "language_modelling", "shape": ("=shape",), "classes": "=classes"},
)
"""What a sample is, for the check, which reads it from here: `=` names an option."""


@dataset("synthetic")
def synthetic(
    *,
    kind: Literal["classification", "regression", "tokens"] = "classification",
    samples: int = 10_000,
    eval_samples: int = 1_000,
    shape: str = "784",
    classes: int = 10,
    data_seed: int = 0,
) -> Synthetic:
    """Random numbers and a fixed random linear function of them, or random tokens with a pattern. Needs no files.

    Args:
        kind: classification = classes; regression = as many numbers as classes says; tokens = sequences of tokens.
        samples: Samples to train on.
        eval_samples: Samples held out. 0 = none, nothing is evaluated.
        shape: Shape of one sample: `784`, or `1x28x28`. Of tokens, how many: `128`.
        classes: Number of classes, of values or of different tokens.
        data_seed: Which random numbers. Independent of train.seed.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise OptionError(f"data.shape: {shape!r} is not a shape; write it as `784` or `1x28x28`")
    sizes = tuple(int(size) for size in shape.split("x"))
    if kind == "tokens" and len(sizes) > 1:
        raise OptionError(f"data.shape: {shape!r}, and tokens come in one row; write their number, as in `128`")
    return Synthetic(samples, eval_samples, sizes, classes, data_seed, kind)


@dataclass(frozen=True)
class Synthetic:
    """A seeded function instead of files."""

    samples: int
    eval_samples: int
    shape: tuple[int, ...]
    classes: int
    seed: int
    kind: str = "classification"

    @property
    def task(self) -> str:
        """What it is made for."""
        return TASKS[self.kind]

    @property
    def home(self) -> None:
        """Nothing has to be brought."""

    def prepare(self) -> None:
        """Nothing to bring."""

    def load(self) -> Data:
        """Draw the samples; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        make = self._tokens if self.kind == "tokens" else self._vectors
        samples = make(generator, self.samples + self.eval_samples)
        train = samples(slice(0, self.samples))
        held_out = samples(slice(self.samples, None)) if self.eval_samples else None
        return Data(train, held_out, classes=None if self.kind == "regression" else self.classes)

    def _vectors(self, generator: torch.Generator, count: int) -> Callable[[slice], Samples]:
        inputs = torch.randn(count, *self.shape, generator=generator)
        teacher = torch.randn(inputs[0].numel(), self.classes, generator=generator)
        values = inputs.flatten(1) @ teacher
        is_number = self.kind == "regression"
        targets = values / inputs[0].numel() ** 0.5 if is_number else values.argmax(dim=1)
        return lambda part: TensorSamples(inputs[part], targets[part])

    def _tokens(self, generator: torch.Generator, count: int) -> Callable[[slice], Samples]:
        length = self.shape[0] + 1
        following = torch.randperm(self.classes, generator=generator)
        rows = torch.randint(self.classes, (count, length), generator=generator)
        sure = torch.rand(count, length, generator=generator) < SURE
        for place in range(1, length):
            rows[:, place] = torch.where(sure[:, place], following[rows[:, place - 1]], rows[:, place])
        tokens = rows.numpy().astype(np.uint32)
        return lambda part: TokenWindows(tokens[part].reshape(-1), self.shape[0], stride=length)
