from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

from jobs.batches import Batches, divide, read_batches
from jobs.job import read_job
from jobs.making import with_all_nodes
from launcher.recipe.schema import Recipe


def first(batch: int, ranks: int, wanted: int = 1) -> Batches:
    return divide(batch, world_size=ranks, wanted=wanted, before=None)


def test_at_the_beginning_it_is_as_the_recipe_says() -> None:
    batches = first(64, 4, wanted=2)
    assert (batches.accumulate, batches.micro_batch_size, batches.changes(None)) == (2, 8, "")
    assert batches.changes(batches) == ""


def test_on_fewer_ranks_each_accumulates_more_and_back_again() -> None:
    """F070."""
    four = first(64, 4)
    two = divide(64, world_size=2, wanted=1, before=four)
    assert (two.accumulate, two.micro_batch_size) == (2, 16)
    assert two.changes(four) == (
        "data-parallel ranks 4 -> 2: accumulate 1 -> 2, micro-batch 16 -> 16; global batch 64 -> 64"
    )
    eight = divide(64, world_size=8, wanted=1, before=two)
    assert (eight.accumulate, eight.micro_batch_size, eight.largest) == (1, 8, 16)
    assert divide(64, world_size=4, wanted=1, before=eight) == four, "what once fitted fits again"


def test_a_person_may_ask_for_larger_micro_batches() -> None:
    before = first(64, 4, wanted=4)
    assert divide(64, world_size=4, wanted=1, before=before).accumulate == 1
    assert divide(128, world_size=4, wanted=4, before=before).micro_batch_size == 8


@pytest.mark.parametrize(("ranks", "wanted", "parts"), [(3, 1, 3), (2, 3, 6)])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(ranks: int, wanted: int, parts: int) -> None:
    """F070."""
    with pytest.raises(
        ValueError, match=rf"global_batch_size: 64 does not divide by {parts} \(data-parallel ranks {ranks} x"
    ):
        divide(64, world_size=ranks, wanted=wanted, before=first(64, 4))


@given(
    ranks=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    wanted=st.integers(1, 4),
    factor=st.integers(1, 5),
)
def test_through_any_numbers_of_ranks_no_micro_batch_grows(ranks: list[int], wanted: int, factor: int) -> None:
    """F070: and the parts always make up the batch."""
    batch = factor * wanted * 27720  # divides by 1 to 12
    limit = batch // (ranks[0] * wanted)
    before = None
    for world_size in ranks:
        now = divide(batch, world_size=world_size, wanted=wanted, before=before)
        assert now.micro_batch_size * now.accumulate * world_size == batch
        assert now.micro_batch_size <= limit
        assert now.accumulate >= wanted
        assert read_batches({"batches": now.to_record()}) == now
        before = now


def test_a_run_that_begins_with_fewer_nodes_than_planned_has_no_larger_micro_batches(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(tiny(resources={"nodes": "1:2", "nproc_per_node": 2}))
    plan = {
        "recipe": recipe.model_dump(mode="json", by_alias=True),
        "device": "cpu",
        "nodes": [{}, {}],
        "nproc_per_node": 2,
        "min_nodes": 1,
        "limits": {"grace_s": 30.0},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    env = {"LAUNCH_RUN_DIR": str(tmp_path), "LAUNCH_RUN_ID": "r", "LAUNCH_ATTEMPT": "1"}
    before = with_all_nodes(read_job([], env))
    assert before is not None
    alone = divide(16, world_size=2, wanted=1, before=before)
    assert (before.micro_batch_size, alone.micro_batch_size, alone.accumulate) == (4, 4, 2)
    assert alone.changes(before).startswith("data-parallel ranks 4 -> 2: accumulate 1 -> 2")
