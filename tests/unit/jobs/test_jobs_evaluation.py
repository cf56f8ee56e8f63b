from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.data.synthetic import synthetic
from jobs.evaluate import measure
from jobs.evaluation import BATCH, TOKENS, evaluate
from jobs.mesh import Grid
from jobs.parallel.base import Shared
from jobs.tasks.classification import classification
from jobs.tasks.language_modelling import language_modelling
from launcher.recipe.degrees import Degrees


class Alone:
    """An agreement of one rank."""

    def send(self, *sums: float) -> None: ...

    def receive(self) -> Any:
        return SimpleNamespace(stop=False)

    def now(self, *sums: float) -> Any:
        return SimpleNamespace(sums=sums)


class Counted(nn.Module):
    """Says the right answer, and remembers how many samples came at once."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._classes = classes

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        return torch.zeros(*inputs.shape[: 2 if inputs.dtype == torch.int64 else 1], self._classes)


@pytest.mark.parametrize(
    ("kind", "shape", "task", "batch"),
    [
        ("tokens", "512", language_modelling(), TOKENS // 512),
        ("tokens", "9000", language_modelling(), 1),
        ("classification", "4", classification(), BATCH),
    ],
)
def test_sequences_are_evaluated_few_at_a_time(kind: Any, shape: str, task: Any, batch: int) -> None:
    """The scores of a vocabulary at each place of 512 sequences would not fit anywhere."""
    samples = synthetic(kind=kind, shape=shape, samples=1, eval_samples=batch + 3).load().evaluation
    assert samples is not None
    net = Counted(10)
    metrics = evaluate(
        Shared(net),
        task,
        samples,
        grid=Grid(degrees=Degrees(), rank=0),
        device=torch.device("cpu"),
        agreement=Alone(),  # type: ignore[arg-type]
        precision=nullcontext(),
    )
    assert net.sizes == ([1] * 4 if batch == 1 else [batch, 3])
    assert metrics is not None
    assert metrics["eval/loss"] == pytest.approx(torch.tensor(10.0).log().item())


def test_a_rank_beyond_the_held_out_samples_has_none_of_them() -> None:
    samples = synthetic(shape="4", samples=1, eval_samples=2).load().evaluation
    assert samples is not None
    net = Counted(10)
    evaluate(
        Shared(net),
        classification(),
        samples,
        grid=Grid(degrees=Degrees(dp=4), rank=3),
        device=torch.device("cpu"),
        agreement=Alone(),  # type: ignore[arg-type]
        precision=nullcontext(),
    )
    assert net.sizes == []
    metrics = measure(net, classification(), samples, shares=4, device=torch.device("cpu"), around_forward=nullcontext)
    assert net.sizes == [1, 1]
    assert metrics["eval/loss"] == pytest.approx(torch.tensor(10.0).log().item())
