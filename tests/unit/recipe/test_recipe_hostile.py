"""Values that would only fail in the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('env={"": x}', "env: '' cannot be the name of a variable"),
        ('env={"A=B": x}', "env: 'A=B' cannot be the name of a variable"),
        (f"train.seed={2**63}", f"train.seed: {2**63} is not a whole number from 0 to {2**63 - 1}"),
        ("resources.nodes=10001", "resources.nodes: 10001 is not a whole number from 1 to 10000 or a range `MIN:MAX`"),
        (
            "resources.nproc_per_node=1025",
            "resources.nproc_per_node: 1025 is not a whole number from 1 to 1024 or auto",
        ),
    ],
)
def test_what_no_worker_can_take_is_refused(fail: Callable[..., Any], override: str, message: str) -> None:
    (problem,) = fail(override)
    assert (problem.where, problem.message) == (override, message)


def test_the_character_nul_is_refused(fail: Callable[..., Any]) -> None:
    (problem,) = fail(more='env: {A: "x\\0"}\n')
    assert (problem.where, problem.message) == ("a.yaml:6:10", "env.A: no text may hold the character NUL")
