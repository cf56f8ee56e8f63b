from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from jobs.data.base import Data
from jobs.fit import check_fit, data_changes
from jobs.registry import OptionError
from jobs.tasks.base import Task
from jobs.tasks.classification import classification
from jobs.tasks.language_modelling import language_modelling
from jobs.tasks.regression import regression
from launcher.recipe.schema import ModelSection

SAMPLES: Any = [(torch.zeros(1, 28, 28), 0)] * 50
TOKENS: Any = [(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))]


def check(task: Task, classes: int | None, model: dict[str, Any]) -> None:
    samples = TOKENS if task.unit == "tokens" else SAMPLES
    check_fit(ModelSection.model_validate(model), Data(samples, classes=classes), task)


@pytest.mark.parametrize(
    ("task", "classes", "model"),
    [
        (language_modelling(), 256, {"name": "gpt"}),
        (language_modelling(), 100, {"name": "lstm", "vocabulary": 256, "outputs": 256}),
        (classification(), 10, {"name": "lstm", "outputs": 10}),
        (classification(), 10, {"name": "mlp"}),
        (regression(), 10, {"name": "mlp", "classes": 3}),
        (classification(), None, {"name": "mlp", "classes": 3}),
        (classification(), 10, {"target": "mine:net", "classes": 3}),
    ],
)
def test_a_model_for_as_many_classes_as_the_data_has_goes(task: Task, classes: int | None, model: Any) -> None:
    check(task, classes, model)


@pytest.mark.parametrize(
    ("task", "classes", "model", "lines"),
    [
        (
            language_modelling(),
            50_257,
            {"name": "gpt"},
            ["model.vocabulary: 256, and the data has 50,257 tokens; make it 50257"],
        ),
        (
            language_modelling(),
            300,
            {"name": "lstm", "vocabulary": 256, "each_step": True},
            [
                "model.vocabulary: 256, and the data has 300 tokens; make it 300",
                "model.outputs: 1, and the data has 300 tokens; make it 300",
            ],
        ),
        (
            classification(),
            1000,
            {"name": "resnet18", "in_channels": 1},
            ["model.classes: 10, and the data has 1,000 classes; make it 1000"],
        ),
    ],
)
def test_a_model_for_fewer_is_refused_with_both_numbers(task: Task, classes: int, model: Any, lines: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        check(task, classes, model)
    assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ({"name": "mlp"}, ["model.in_features: 784, and a sample of the data is 3 x 32 x 32; make it 3072"]),
        (
            {"name": "convnet"},
            [
                "model.in_channels: 1, and a sample of the data is 3 x 32 x 32; make it 3",
                "model.image_size: 28, and a sample of the data is 3 x 32 x 32; make it 32",
            ],
        ),
        ({"name": "resnet18"}, []),
    ],
)
def test_a_model_for_other_samples_is_refused_with_both_shapes(model: Any, lines: list[str]) -> None:
    samples: Any = [(torch.zeros(3, 32, 32), 0)]
    with pytest.raises(OptionError) if lines else nullcontext() as caught:
        check_fit(ModelSection.model_validate(model), Data(samples, classes=10), classification())
    if caught is not None:
        assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize(
    ("model", "sample", "line"),
    [
        (
            {"name": "gpt"},
            torch.zeros(8),
            "model.vocabulary: 256: it reads tokens, and a sample of the data is 8 numbers",
        ),
        (
            {"name": "lstm"},
            torch.zeros(8, dtype=torch.int64),
            "model.vocabulary: 0: it takes numbers, and a sample of the data is 8 tokens; gpt and lstm read them",
        ),
        (
            {"name": "mlp", "in_features": 8},
            torch.zeros(8, dtype=torch.int64),
            "model: it takes numbers, and a sample of the data is 8 tokens; gpt and lstm read them",
        ),
        (
            {"name": "resnet18"},
            torch.zeros(3, 32),
            "model.in_channels: it takes channels x height x width, and a sample of the data is 3 x 32",
        ),
    ],
)
def test_a_model_for_another_kind_of_samples_is_refused(model: Any, sample: torch.Tensor, line: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_fit(ModelSection.model_validate(model), Data([(sample, 0)], classes=10), classification())  # type: ignore[arg-type]
    assert str(caught.value).splitlines()[0] == line


def test_other_data_than_the_checkpoint_had_is_said() -> None:
    assert data_changes({"samples": 50}, Data(SAMPLES)) == ""
    assert data_changes({}, Data(SAMPLES)) == ""
    text = data_changes({"samples": 60_000}, Data(SAMPLES))
    assert "50 samples to train on, and the checkpoint was trained on 60,000" in text
