from __future__ import annotations

import json
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jobs.finite import KeptBuffers, LeftOut, loss_message, loss_problem, read_left_out


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
