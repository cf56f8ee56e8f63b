"""What is minimised, and what is counted."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, summed over the samples: sums add up over micro-batches and ranks of any size, means do not."""
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


def num_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many of the samples are classified correctly."""
    return (outputs.argmax(dim=1) == targets).sum()
