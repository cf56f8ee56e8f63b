"""Degrees of the device mesh: what is left is filled in, what does not fit is said."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.recipe.degrees import Degrees, DegreesError, resolve_degrees
from launcher.recipe.schema import ParallelismSection


def section(**keys: Any) -> ParallelismSection:
    return ParallelismSection.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "ranks", "nodes", "found"),
    [
        ({}, 4, 2, {"dp": 4}),
        ({"tp": 2}, 4, 2, {"dp": 2, "tp": 2}),
        ({"dp": 2, "tp": 2}, 4, 2, {"dp": 2, "tp": 2}),
        ({"dp": 2, "tp": 2, "pp": 2}, 8, 2, {"dp": 2, "tp": 2, "pp": 2}),
        ({"strategy": "fsdp"}, 4, 2, {"fsdp": 4}),
        ({"strategy": "fsdp", "tp": 2}, 4, 2, {"fsdp": 2, "tp": 2}),
        ({"strategy": "hsdp"}, 8, 2, {"dp": 2, "fsdp": 4}),
        ({"strategy": "hsdp", "dp": 4}, 8, 2, {"dp": 4, "fsdp": 2}),
        ({"strategy": "hsdp", "fsdp": 8}, 8, 2, {"dp": 1, "fsdp": 8}),
        ({"strategy": "single"}, 1, 1, {}),
        ({"strategy": "split"}, 1, 1, {}),
    ],
)
def test_what_the_other_degrees_leave_is_filled_in(
    keys: dict[str, Any], ranks: int, nodes: int, found: dict[str, int]
) -> None:
    degrees = resolve_degrees(section(**keys), world_size=ranks, nodes=nodes)
    assert degrees == Degrees(**found)
    assert degrees.size == ranks


@pytest.mark.parametrize(
    ("keys", "ranks", "key", "message", "hint"),
    [
        ({"tp": 3}, 4, "tp", "the world size is 4, which does not divide by tp 3", "a multiple of 3"),
        ({"tp": 2, "pp": 2}, 2, "tp", "the world size is 2, which does not divide by pp 2 x tp 2", "a multiple of 4"),
        ({"dp": 2, "tp": 2}, 2, "dp", "dp 2 x tp 2 = 4, but the world size is 2", "dp: auto"),
        ({"strategy": "fsdp", "fsdp": 2}, 8, "fsdp", "fsdp 2, but the world size is 8", "fsdp: auto"),
        ({"strategy": "hsdp", "dp": 3}, 4, "dp", "dp 3, but the world size is 4", "dp: auto"),
        ({"fsdp": 2}, 2, "fsdp", "2, and strategy ddp has no fsdp", "strategy: fsdp, or hsdp"),
        ({"strategy": "fsdp", "dp": 2}, 2, "dp", "2, and strategy fsdp has no dp", "strategy: hsdp"),
        ({"strategy": "split", "tp": 2}, 1, "tp", "2, and strategy split has no tp", "strategy: ddp"),
        ({"strategy": "single"}, 2, "strategy", "single is one rank, but the world size is 2", "nproc_per_node: 1"),
        (
            {"strategy": "split"},
            2,
            "strategy",
            "split is one process, for all GPUs of a node, but",
            "nproc_per_node: 1",
        ),
        ({"strategy": "data_parallel"}, 2, "strategy", "data_parallel is one process", "strategy: ddp"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(
    keys: dict[str, Any], ranks: int, key: str, message: str, hint: str
) -> None:
    with pytest.raises(DegreesError) as caught:
        resolve_degrees(section(**keys), world_size=ranks, nodes=1)
    assert caught.value.key == f"parallelism.{key}"
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert str(caught.value) == f"{caught.value.message}; {caught.value.hint}"
