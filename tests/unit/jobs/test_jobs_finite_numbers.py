from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jobs.finite import KeptBuffers, LeftOut, gradient_problem, loss_message, loss_problem, read_left_out

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def never(finding: bool) -> bool:
    raise AssertionError("the gradients of replicas need no further message")


def net_with(*gradients: torch.Tensor | None) -> nn.Module:
    net = nn.Module()
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        net.register_parameter(f"p{number}", parameter)
    return net


@given(st.lists(st.lists(FLOATS, max_size=5), max_size=4))
def test_a_gradient_is_found_exactly_where_a_number_is_not_finite(rows: list[list[float]]) -> None:
    """Numbers whose squares are too large for their type are numbers all the same."""
    problem = gradient_problem(net_with(None, *(torch.tensor(row, dtype=torch.float32) for row in rows)), never)
    bad = [(number, value) for number, row in enumerate(rows, 1) for value in row if not math.isfinite(value)]
    assert problem == (f"the gradient of p{bad[0][0]} is {bad[0][1]}" if bad else "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert gradient_problem(net_with(torch.full((3, 2), largest, dtype=dtype)), never) == ""
    assert (
        gradient_problem(net_with(torch.tensor([0.0, -math.inf], dtype=dtype)), never) == "the gradient of p0 is -inf"
    )


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    )
)
def test_the_rank_is_named_where_one_alone_has_a_bad_loss(losses: list[tuple[float, int]]) -> None:
    messages = [loss_message(total, samples, rank) for rank, (total, samples) in enumerate(losses)]
    problem = loss_problem([sum(column) for column in zip(*messages, strict=True)], ranks=len(losses))
    bad = [rank for rank, (total, _) in enumerate(losses) if not math.isfinite(total)]
    assert bool(problem) == bool(bad)
    assert (" alone" in problem) == (len(bad) == 1 < len(losses)), "of one rank there is no other"
    if len(bad) == 1 < len(losses):
        assert problem.endswith(f" on rank {bad[0]} alone")


@given(st.sets(st.integers(1, 30)))
def test_steps_left_out_are_kept_as_ranges(steps: set[int]) -> None:
    left_out = LeftOut()
    for step in sorted(steps):
        left_out = left_out.with_steps(step, step)
        assert left_out.in_a_row(step) == next(n for n in range(1, 32) if step - n not in steps)
    assert {n for first, last in left_out.ranges for n in range(first, last + 1)} == steps
    assert left_out.count == len(steps)
    assert all(last + 1 < first for (_, last), (first, _) in zip(left_out.ranges, left_out.ranges[1:], strict=False))
    assert read_left_out(json.loads(json.dumps(left_out.to_record()))) == left_out


def test_a_rollback_covers_what_was_skipped_since() -> None:
    left_out = LeftOut().with_steps(3, 3).with_steps(6, 7).with_steps(9, 9)
    assert left_out.with_steps(5, 12).ranges == ((3, 3), (5, 12))
    assert left_out.with_steps(7, 12).ranges == ((3, 3), (6, 12))
    assert left_out.with_steps(4, 4).ranges == ((3, 4),)
    assert read_left_out(None) == LeftOut()


def test_buffers_are_put_back_as_they_were() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net(torch.randn(4, 3))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    buffers = KeptBuffers(net)
    buffers.keep()
    net(torch.full((4, 3), math.nan))
    assert any(not torch.isfinite(buffer).all() for buffer in net.buffers())
    buffers.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_a_buffer_that_a_forward_makes_larger_is_kept_and_put_back() -> None:
    net = nn.Module()
    net.register_buffer("seen", torch.zeros(2))
    buffers = KeptBuffers(net)
    net.seen = torch.arange(3.0)
    buffers.keep()
    net.seen = torch.zeros(5, dtype=torch.float64)
    buffers.restore()
    assert torch.equal(net.get_buffer("seen"), torch.arange(3.0))


class Part(torch.Tensor):
    """Stands for a gradient of which this rank has a part."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("value", "others", "problem"),
    [
        (1.0, False, ""),
        (1.0, True, "a gradient is not finite on another rank"),
        (math.nan, True, "the gradient of p0 is nan"),
    ],
)
def test_ranks_that_hold_parts_of_the_gradients_tell_each_other(
    monkeypatch: pytest.MonkeyPatch, value: float, others: bool, problem: str
) -> None:
    monkeypatch.setattr("jobs.finite.DTensor", Part)
    told: list[bool] = []

    def agree(finding: bool) -> bool:
        told.append(finding)
        return others

    gradient = torch.tensor([0.5, value]).as_subclass(Part)
    net = nn.Module()
    net.register_parameter("p0", nn.Parameter(torch.zeros(2)))
    monkeypatch.setattr(net, "named_parameters", lambda: [("p0", type("Held", (), {"grad": gradient}))])
    assert gradient_problem(net, agree) == problem
    assert told == [math.isnan(value)]
