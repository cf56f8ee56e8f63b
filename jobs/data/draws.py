"""Random numbers of a sample from (seed, index) alone, for a whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def uniform(seed: int, indices: Tensor, count: int) -> NDArray[np.float64]:
    """So many numbers from 0 to below 1 for each index; shape (indices, count).

    The generator is SplitMix64, which can be entered anywhere: sample k has the numbers from k x count on.
    """
    rows = (indices[:, None] * count + torch.arange(count)).numpy().astype(np.uint64)
    start = np.uint64(seed * 0xD1342543DE82EF95 & _MASK)
    state: NDArray[np.uint64] = rows * _STEP + start  # they wrap around, as they should
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * factor
    state ^= state >> np.uint64(31)
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) / 2.0**53
    return numbers
