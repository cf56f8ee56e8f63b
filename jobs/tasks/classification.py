"""Classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from jobs.registry import task
from jobs.tasks.base import check_scores

BOUNDS = {"label_smoothing": (0, 1)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""


@task("classification")
def classification(*, label_smoothing: float = 0.0) -> Classification:
    """One class per sample: cross-entropy, accuracy.

    Args:
        label_smoothing: Share of the target that is spread over all classes.
    """
    return Classification(label_smoothing)


@dataclass(frozen=True)
class Classification:
    """Outputs are one score per class, targets the number of a class."""

    label_smoothing: float = 0.0
    measures: tuple[str, ...] = ("accuracy",)
    unit: str | None = None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy. Raises OptionError where there are not scores for each sample."""
        check_scores("classification", outputs, targets, "each sample")
        return F.cross_entropy(outputs.float(), targets, reduction="sum", label_smoothing=self.label_smoothing)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many are classified correctly."""
        return (outputs.argmax(dim=1) == targets).sum().reshape(1)

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Loss and accuracy."""
        return {"eval/loss": loss, "eval/accuracy": means["accuracy"]}
