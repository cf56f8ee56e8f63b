from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW

from jobs.optim import QuickAdamW, constant, cosine, linear, sgd
from jobs.registry import OptionError

steps = st.integers(0, 2000)


@given(steps, st.integers(1, 1000), st.integers(0, 500))
def test_factors_stay_between_zero_and_one(step: int, total: int, warmup: int) -> None:
    for schedule in (constant, linear, cosine):
        assert 0.0 <= schedule(step, total, warmup) <= 1.0 + 1e-12


def test_the_warm_up_loses_no_step() -> None:
    assert [constant(step, 100, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert constant(0, 100, 0) == 1.0


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_the_decay_ends_at_its_final_share(schedule: object) -> None:
    assert callable(schedule)
    assert schedule(110, 110, 10, final=0.1) == pytest.approx(0.1)
    assert schedule(10, 110, 10) == pytest.approx(1.0)
    assert schedule(60, 110, 10) == pytest.approx(0.5)
    assert schedule(500, 110, 10, final=0.1) == pytest.approx(0.1)


def test_quick_adamw_is_adamw_to_the_bit() -> None:
    found = []
    for kind in (AdamW, QuickAdamW):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        made = kind(net.parameters(), lr=0.05, betas=(0.8, 0.99), weight_decay=0.1, fused=True)
        for step in range(5):
            made.param_groups[0]["lr"] = 0.05 / (step + 1)
            made.zero_grad()
            net(torch.randn(4, 6)).square().sum().backward()
            if step == 2:
                net[0].bias.grad = None
            made.step()
        found.append([*net.parameters(), *(value for slots in made.state.values() for value in slots.values())])
    assert len(found[0]) == 4 + 3 * 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_quick_adamw_leaves_the_step_to_torch_where_a_scaler_has_found_an_overflow() -> None:
    weight = nn.Parameter(torch.ones(3))
    made = QuickAdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(3)
    made.step()
    before = weight.detach().clone()
    made.grad_scale, made.found_inf = None, torch.ones(())
    made.step()
    assert torch.equal(weight, before)
    del made.grad_scale, made.found_inf
    made.step()
    assert not torch.equal(weight, before)


def test_looking_along_a_momentum_takes_one() -> None:
    with pytest.raises(
        OptionError, match=r"train\.optimizer\.nesterov: true looks along the momentum, and momentum is 0"
    ):
        sgd(nn.Linear(2, 2).parameters(), nesterov=True)
    sgd(nn.Linear(2, 2).parameters(), nesterov=True, momentum=0.9)
