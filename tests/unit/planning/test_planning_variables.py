"""Variables of the workers that PyTorch and cuBLAS read when they take a GPU."""

from __future__ import annotations

import pytest
from planning_values import facts, job, plan, script

from launcher.planning.plan import Plan

SEGMENTS = {"nproc_per_node": 2, "alloc": "expandable_segments"}


def variables(made: Plan) -> dict[str, str]:
    return {each.name: each.value for each in made.env if each.name.startswith(("PYTORCH", "CUBLAS"))}


@pytest.mark.parametrize(("torch", "name"), [("2.13.0", "PYTORCH_ALLOC_CONF"), ("2.4.1", "PYTORCH_CUDA_ALLOC_CONF")])
def test_segments_that_grow_are_asked_for_under_the_name_that_this_torch_reads(torch: str, name: str) -> None:
    made = plan(script(resources=SEGMENTS), facts(gpus=2, torch_version=torch))
    assert variables(made) == {name: "expandable_segments:True"}
    assert [each.origin for each in made.env if each.name == name] == ["auto: resources.alloc: expandable_segments"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_is_kept_and_said(name: str) -> None:
    by_environment = plan(job(resources=SEGMENTS), facts(gpus=2, environment={name: "max_split_size_mb:64"}))
    assert variables(by_environment) == {}
    assert f"resources.alloc: expandable_segments is not set: {name} is yours (environment)" in by_environment.notes
    by_recipe = plan(job(resources=SEGMENTS, env={name: "max_split_size_mb:64"}), facts(gpus=2))
    assert variables(by_recipe) == {name: "max_split_size_mb:64"}
    assert any(note.endswith(f"{name} is yours (max_split_size_mb:64)") for note in by_recipe.notes)


def test_deterministic_needs_a_workspace_of_a_fixed_size_on_a_gpu() -> None:
    recipe = job(train={"until": "1 epoch", "deterministic": True}, resources={"nproc_per_node": 2})
    assert variables(plan(recipe, facts(gpus=2))) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    own = facts(gpus=2, environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert variables(plan(recipe, own)) == {}


def test_none_of_it_on_a_cpu_or_where_it_is_not_asked_for() -> None:
    train = {"until": "1 epoch", "deterministic": True}
    assert variables(plan(job(train=train, resources=SEGMENTS), facts())) == {}
    assert variables(plan(job(resources={"nproc_per_node": 2}), facts(gpus=2))) == {}
