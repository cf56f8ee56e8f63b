"""`checkpoint.store`: what a recipe may say, and what is refused where a package is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from planning_values import facts, job, plan

from launcher.errors import RecipeError, Refused
from launcher.planning.render import render_plan
from launcher.planning.store_facts import store_fault, store_refusals
from launcher.recipe.loader import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    "store", ["shared", "replicate", "s3://bucket/runs", "gs://b", "file:///data/runs", "abfs://c/x"]
)
def test_what_a_store_may_be(store: str) -> None:
    recipe = load_recipe(RECIPES / "mnist_ddp.yaml", [f"checkpoint.store={store}"]).recipe
    assert recipe.checkpoint.store == store


@pytest.mark.parametrize("store", ["Shared", "two", "/data/runs", "s3:/bucket", "s3://key:secret@bucket/x", "s3://a b"])
def test_what_it_may_not_be(store: str) -> None:
    """A secret in it would be in the plan."""
    with pytest.raises(RecipeError, match=r"checkpoint\.store"):
        load_recipe(RECIPES / "mnist_ddp.yaml", [f"checkpoint.store={store}"])


@pytest.mark.parametrize("store", ["shared", "replicate", "file:///data/runs", "memory://x"])
def test_no_fault_is_found_in_what_can_be_used(store: str) -> None:
    assert store_fault(store) == ""
    assert list(store_refusals(store, "")) == []


def test_a_protocol_that_nobody_knows_and_one_whose_package_is_missing_are_refused() -> None:
    assert store_fault("nowhere://bucket") == "Protocol not known: nowhere"
    fault = store_fault("dropbox://bucket/x")
    assert "dropboxdrivefs" in fault
    (refusal,) = store_refusals("dropbox://bucket/x", fault)
    assert refusal.key == "checkpoint.store"
    assert refusal.message.startswith("dropbox://bucket/x cannot be used here: ")


def test_without_fsspec_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "the package fsspec, which is not installed" in store_fault("file:///data")
    assert store_fault("shared") == ""


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("shared", "from the last checkpoint\n"),
        ("replicate", "from the last checkpoint, which is whole on two disks where the nodes share none\n"),
        ("s3://bucket/runs", "from the last checkpoint, the newest also at s3://bucket/runs\n"),
    ],
)
def test_a_dry_run_says_what_a_restart_goes_on_from(store: str, told: str) -> None:
    assert told in render_plan(plan(job(checkpoint={"store": store}), facts()))


def test_the_launch_is_refused_where_the_store_cannot_be_used() -> None:
    with pytest.raises(Refused, match="s3://bucket cannot be used here: Install s3fs to access S3"):
        plan(job(checkpoint={"store": "s3://bucket"}), facts(store_fault="Install s3fs to access S3"))
