from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.optim import constant, cosine, linear

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
