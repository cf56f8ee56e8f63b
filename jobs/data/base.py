"""What a dataset is here: something to prepare once, then samples by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of some samples, first axis = samples."""


class Samples(Protocol):
    """Samples by index.

    With a `__getitems__(indices: Tensor) -> Batch` whole batches are taken at once (faster). With `draws = False` the
    class says that nothing in it is random, and no generator is seeded for it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Data:
    """Samples to train on, and samples held out."""

    train: Samples
    evaluation: Samples | None = None


class Source(Protocol):
    """What a function decorated with `@dataset` returns. Making one is cheap; nothing is read yet.

    With a `task` (a name of `jobs/tasks`, `classification` where there is none) it says what it is made for.
    """

    def prepare(self) -> None:
        """Bring the files here. Called by one rank per node, before there is a process group: it may take long."""

    def load(self) -> Data:
        """Open what is here. Called by every rank; never downloads."""


class TensorSamples:
    """Samples that are rows of two tensors in memory."""

    draws = False

    def __init__(self, inputs: Tensor, targets: Tensor, *, mean: float = 0.0, std: float = 1.0) -> None:
        assert len(inputs) == len(targets)
        self._inputs, self._targets, self._mean, self._std = inputs, targets, mean, std

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int, /) -> Batch:
        inputs, targets = self.__getitems__(torch.tensor([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return self._inputs[rows].float().sub_(self._mean).div_(self._std), self._targets[rows]
