from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from jobs import registry
from jobs.data.synthetic import synthetic
from jobs.registry import OptionError
from jobs.tasks.base import Task
from jobs.tasks.classification import classification
from jobs.tasks.language_modelling import language_modelling
from jobs.tasks.regression import regression

GENERATOR = torch.Generator().manual_seed(0)
SCORES, TOKENS = torch.randn(4, 6, 5, generator=GENERATOR), torch.randint(5, (4, 6), generator=GENERATOR)
VALUES, WANTED = torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 3, generator=GENERATOR)


def test_every_task_is_found_by_its_name() -> None:
    assert {"classification", "language_modelling", "regression"} <= set(registry.names("task"))


def test_the_loss_of_a_sequence_is_the_mean_over_its_tokens() -> None:
    each = F.cross_entropy(SCORES.flatten(0, 1), TOKENS.flatten(), reduction="none").view(4, 6)
    assert language_modelling().loss(SCORES, TOKENS).item() == pytest.approx(each.mean(dim=1).sum().item())


def test_language_modelling_counts_what_people_expect() -> None:
    task = language_modelling()
    right = (SCORES.argmax(dim=2) == TOKENS).float()
    assert task.measure(SCORES, TOKENS).tolist() == pytest.approx([right.mean(dim=1).sum().item()])
    assert task.metrics(1.5, {"accuracy": 0.25}) == {
        "eval/loss": 1.5,
        "eval/perplexity": math.exp(1.5),
        "eval/accuracy": 0.25,
    }
    assert task.metrics(1e4, {"accuracy": 0.0})["eval/perplexity"] == math.inf
    assert task.unit == "tokens"


def test_regression_takes_squared_and_absolute_errors() -> None:
    task = regression()
    assert task.loss(VALUES, WANTED).item() == pytest.approx((VALUES - WANTED).square().mean(dim=1).sum().item())
    assert task.measure(VALUES, WANTED).tolist() == pytest.approx([(VALUES - WANTED).abs().mean(dim=1).sum().item()])
    assert task.metrics(4.0, {"absolute": 1.0}) == {"eval/loss": 4.0, "eval/rmse": 2.0, "eval/mae": 1.0}


@pytest.mark.parametrize(
    ("made", "outputs", "targets", "said"),
    [
        (language_modelling(), torch.zeros(2, 3), (2, 5), r"each token, \(2, 5, scores\) .* of the shape \(2, 3\)"),
        (language_modelling(), torch.zeros(2, 4, 7), (2, 5), r"of the shape \(2, 4, 7\)"),
        (classification(), torch.zeros(2, 7, 4), (2,), r"each sample, \(2, scores\) .* of the shape \(2, 7, 4\)"),
        (classification(), (torch.zeros(2, 7), None), (2,), "gives a tuple, not a tensor"),
        (
            classification(),
            torch.zeros(2, 5, 7),
            (2, 5),
            r"and .* has one of the shape \(5,\); .*language_m",
        ),
        (language_modelling(), torch.zeros(2, 7), (2,), r"each token, and .* has a single one; .*name: classification"),
    ],
)
def test_a_network_that_does_not_score_each_target_is_refused_in_words(
    made: Task, outputs: torch.Tensor, targets: tuple[int, ...], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        made.loss(outputs, torch.zeros(targets, dtype=torch.long))


def test_targets_that_are_no_whole_numbers_are_for_another_task() -> None:
    with pytest.raises(OptionError, match=r"whole number for each sample, and the data has float64; .*regression"):
        classification().loss(torch.zeros(2, 7), torch.zeros(2, dtype=torch.float64))


def test_numbers_of_other_shapes_are_not_broadcast() -> None:
    with pytest.raises(OptionError, match=r"the network gives \(1,\) per sample where the data has \(3,\)"):
        regression().loss(VALUES[:, :1], WANTED)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (classification(), SCORES[:, 0], TOKENS[:, 0]),
        (language_modelling(), SCORES, TOKENS),
        (language_modelling(label_smoothing=0.1), SCORES, TOKENS),
        (regression(), VALUES, WANTED),
    ],
)
def test_sums_of_parts_are_the_sum_of_the_whole_in_fp32(
    task: Task, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """So no number depends on micro-batches and ranks."""
    for function in (task.loss, task.measure):
        parts = [function(outputs[part], targets[part]) for part in (slice(0, 1), slice(1, 4))]
        assert torch.allclose(sum(parts, torch.zeros(())), function(outputs, targets).float())
    assert task.loss(outputs.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "task"),
    [("classification", "classification"), ("regression", "regression"), ("tokens", "language_modelling")],
)
def test_data_says_what_it_is_made_for(kind: str, task: str) -> None:
    source = registry.build("dataset", "synthetic", {"kind": kind, "shape": "4"})
    assert source.task == task


def test_random_numbers_of_old_recipes_are_the_same() -> None:
    """Labels by a linear function of numbers from one generator, as they were before there were other kinds."""
    data = synthetic(samples=6, eval_samples=2, shape="2x3", classes=4, data_seed=3).load()
    generator = torch.Generator().manual_seed(3)
    inputs, teacher = torch.randn(8, 2, 3, generator=generator), torch.randn(6, 4, generator=generator)
    assert data.evaluation is not None
    for samples, part in ((data.train, slice(0, 6)), (data.evaluation, slice(6, 8))):
        assert torch.equal(torch.stack([samples[k][0] for k in range(len(samples))]), inputs[part])
        labels = (inputs.flatten(1) @ teacher).argmax(dim=1)[part]
        assert torch.equal(torch.stack([samples[k][1] for k in range(len(samples))]), labels)


def test_random_tokens_have_a_pattern_that_can_be_learned() -> None:
    data = synthetic(kind="tokens", samples=200, eval_samples=50, shape="20", classes=7).load()
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (200, 50)
    inputs, targets = data.train[3]
    assert torch.equal(inputs[1:], targets[:-1])
    pairs = torch.stack([torch.stack(data.train[k]) for k in range(200)])
    followed = torch.zeros(7, 7).index_put((pairs[:, 0].flatten(), pairs[:, 1].flatten()), torch.ones(1), True)
    assert (followed.max(dim=1).values / followed.sum(dim=1)).tolist() == pytest.approx([0.8 + 0.2 / 7] * 7, abs=0.06)


def test_random_values_to_find_out_are_a_linear_function() -> None:
    data = synthetic(kind="regression", samples=100, eval_samples=0, shape="4x2", classes=3).load()
    inputs, targets = (torch.stack([data.train[k][part] for k in range(100)]) for part in (0, 1))
    assert targets.shape == (100, 3)
    found = torch.linalg.lstsq(inputs.flatten(1), targets)
    assert torch.allclose(inputs.flatten(1) @ found.solution, targets, atol=1e-4)
    assert data.evaluation is None


@pytest.mark.parametrize("shape", ["", "x4", "4x0", "-3"])
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    with pytest.raises(OptionError, match=r"data.shape"):
        synthetic(shape=shape)


def test_tokens_come_in_one_row() -> None:
    with pytest.raises(OptionError, match=r"data.shape: '4x4', and tokens come in one row"):
        synthetic(kind="tokens", shape="4x4")
