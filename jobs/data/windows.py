"""Sequences out of one long row of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jobs.data.base import Batch

Tokens = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
"""May be a file, mapped into memory: what is not asked for is not read."""


class TokenWindows:
    """Sample k is the tokens from k x stride on: `context` of them, and as targets those that follow each."""

    draws = False

    def __init__(self, tokens: Tokens, context: int, *, stride: int | None = None) -> None:
        """Without a stride the inputs lie end to end: each token is an input once per epoch, but for the last ones."""
        self._tokens, self._stride = tokens, context if stride is None else stride
        self._window = np.arange(context + 1)

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - len(self._window)) // self._stride + 1)

    def __getitem__(self, index: int, /) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> Batch:
        starts = np.asarray(indices, dtype=np.int64) * self._stride
        rows = torch.from_numpy(self._tokens[starts[:, None] + self._window].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
