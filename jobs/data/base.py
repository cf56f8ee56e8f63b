"""What a dataset is here: something to prepare once, then samples by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.registry import UntrainableError


class DataError(UntrainableError, RuntimeError):
    """The data is not there, or is no data to train on: the message has the place, and what to do."""


Batch = tuple[Tensor, Tensor]
"""Inputs and targets of some samples, first axis = samples."""


class Samples(Protocol):
    """Samples by index.

    With a `__getitems__(indices: Tensor) -> Batch` whole batches are taken at once (faster). With `draws = False` the
    class says that nothing in it is random, and no generator is seeded for it.

    With a `drawn(indices: Tensor, seed: int) -> Batch` whole batches are taken at once, and what is random in a sample
    is made from (seed, index), as `jobs.data.draws` does it: the seed is another one in each epoch, and a sample is the
    same in whatever batch it comes, on however many ranks.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Data:
    """Samples to train on, and samples held out."""

    train: Samples
    evaluation: Samples | None = None
    classes: int | None = None
    """How many different targets there may be, where these are classes or tokens."""


class Source(Protocol):
    """What a function decorated with `@dataset` returns. Making one is cheap; nothing is read yet.

    With a `task` (a name of `jobs/tasks`, `classification` where there is none) it says what it is made for. With a
    `home: Path | None` it says which folder `prepare` fills (None: there is nothing to bring), and then has an
    `is_ready() -> bool` too, which says whether all is there: so nodes that share a file system do it once.
    """

    def prepare(self) -> None:
        """Bring the files here; one rank per file system, before there is a process group: it may take long.

        Where the source has no `home`, one rank per node, and that of the first node before the others.
        """

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
        inputs = self._inputs.index_select(0, rows)  # copies whole rows; indexing takes 7 to 17 times as long
        return inputs.float().sub_(self._mean).div_(self._std), self._targets.index_select(0, rows)
