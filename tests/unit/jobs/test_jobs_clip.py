"""The gradients of a step, looked at once: what is not finite, how long they are, and clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jobs.clip import GradientCheck
from jobs.mesh import Grid
from launcher.recipe.degrees import Degrees

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
REPLICAS = Grid(degrees=Degrees(dp=2), rank=0)
MESH: Any = object()
"""Of ranks that hold parts; what is told does not go through it here."""


def never(problem: float, squares: float) -> Sequence[float]:
    raise AssertionError("the gradients of replicas need no further message")


def net_with(*gradients: torch.Tensor | None) -> nn.Module:
    net = nn.Module()
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        net.register_parameter(f"p{number}", parameter)
    return net


def check(*gradients: torch.Tensor | None) -> GradientCheck:
    return GradientCheck(net_with(*gradients), REPLICAS, never)


@given(st.lists(st.lists(FLOATS, max_size=5), max_size=4))
def test_a_gradient_is_found_exactly_where_a_number_is_not_finite(rows: list[list[float]]) -> None:
    """Numbers whose squares are too large for their type are numbers all the same, and have a length."""
    finding = check(None, *(torch.tensor(row, dtype=torch.float32) for row in rows)).look()
    bad = [(number, value) for number, row in enumerate(rows, 1) for value in row if not math.isfinite(value)]
    assert finding.problem == (f"the gradient of p{bad[0][0]} is {bad[0][1]}" if bad else "")
    if not bad:
        # numbers below 1e-19 have no squares in fp32
        expected = math.hypot(*(value for row in rows for value in row))
        assert finding.norm == pytest.approx(expected, rel=1e-5, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert check(torch.full((3, 2), largest / 2, dtype=dtype)).look().problem == ""
    bad = check(torch.tensor([0.0, -math.inf], dtype=dtype)).look()
    assert bad.problem == "the gradient of p0 is -inf"
    assert math.isnan(bad.norm)


def test_what_is_longer_is_scaled_down_to_the_norm_as_torch_does() -> None:
    gradients = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    ours, theirs = (net_with(*(gradient.clone() for gradient in gradients)) for _ in range(2))
    one = GradientCheck(ours, REPLICAS, never)
    norm = one.look().norm
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item(), rel=1e-6)
    one.clip(norm, 0.5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert one.look().norm == pytest.approx(0.5, rel=1e-5)


def test_what_is_shorter_keeps_its_bits() -> None:
    gradient = torch.tensor([0.3, 0.4])
    one = check(gradient)
    one.clip(one.look().norm, 0.6)
    assert gradient.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_stages_that_hold_different_layers_add_up_their_squares_and_tell_each_other() -> None:
    """Two stages, two replicas of each: four ranks send, and each square is sent twice."""
    grid = Grid(degrees=Degrees(pp=2, dp=2), rank=0, mesh=MESH)
    sent: list[tuple[float, float]] = []

    def add(problem: float, squares: float) -> Sequence[float]:
        sent.append((problem, squares))
        return 2 * problem, 2 * squares + 2 * 8.0  # of the other stage: a square of 16

    finding = GradientCheck(net_with(torch.tensor([3.0])), grid, add).look()
    assert sent == [(0.0, 4.5)]
    assert finding.norm == 5.0
    assert finding.problem == ""


@pytest.mark.parametrize(
    ("value", "others", "problem"),
    [
        (1.0, 0.0, ""),
        (1.0, 1.0, "a gradient is not finite on another rank"),
        (math.nan, 0.0, "the gradient of p0 is nan"),
    ],
)
def test_ranks_that_hold_parts_of_the_gradients_tell_each_other(value: float, others: float, problem: str) -> None:
    def add(bad: float, squares: float) -> Sequence[float]:
        assert bad == float(math.isnan(value))
        assert math.isfinite(squares)
        return bad + others, squares

    grid = Grid(degrees=Degrees(fsdp=2), rank=0, mesh=MESH)
    assert GradientCheck(net_with(torch.tensor([0.5, value])), grid, add).look().problem == problem
