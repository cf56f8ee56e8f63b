"""Next tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from jobs.registry import task
from jobs.tasks.base import check_scores

BOUNDS = {"label_smoothing": (0, 1)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""


@task("language_modelling")
def language_modelling(*, label_smoothing: float = 0.0) -> LanguageModelling:
    """The next token at every place of a sequence: cross-entropy, perplexity, accuracy.

    Args:
        label_smoothing: Share of the target that is spread over all tokens.
    """
    return LanguageModelling(label_smoothing)


@dataclass(frozen=True)
class LanguageModelling:
    """Outputs are one score per token of the vocabulary, (batch, time, vocabulary); targets the tokens, (batch, time).

    The loss of a sample is the mean over its tokens, in nats: of bytes, loss / ln 2 is bits per byte.
    """

    label_smoothing: float = 0.0
    measures: tuple[str, ...] = ("accuracy",)
    unit: str | None = "tokens"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy. Raises OptionError where there are not scores for each token."""
        check_scores("language_modelling", outputs, targets, "each token", dims=2)
        scores = outputs.flatten(0, 1).float()
        summed = F.cross_entropy(scores, targets.flatten(), reduction="sum", label_smoothing=self.label_smoothing)
        return summed / targets.shape[1]

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of each sequence that is predicted correctly."""
        return (outputs.argmax(dim=-1) == targets).sum().reshape(1) / targets.shape[1]

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Loss, perplexity (infinite where that is no number any more) and accuracy."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/accuracy": means["accuracy"]}
