"""Device, workers, GPUs and cores of each node, threads, batch."""

from __future__ import annotations

import pytest
from planning_values import env, facts, job, origins, plan, script

from launcher.errors import Problem, RecipeError
from launcher.recipe.schema import Recipe


def problems(recipe: Recipe, **on: object) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        plan(recipe, facts(**on))  # type: ignore[arg-type]
    return caught.value.problems


@pytest.mark.parametrize(
    ("nodes", "gpus", "device", "nproc"),
    [(1, 0, "cpu", 1), (2, 0, "cpu", 1), (1, 8, "cuda", 8), (2, 8, "cuda", 4), (2, 1, "cpu", 1), (1, 1, "cuda", 1)],
)
def test_auto_takes_cuda_where_every_node_gets_a_gpu(nodes: int, gpus: int, device: str, nproc: int) -> None:
    made = plan(job(resources={"nodes": nodes}), facts(gpus=gpus))
    assert (made.device, made.nproc_per_node, made.backend) == (device, nproc, {"cpu": "gloo", "cuda": "nccl"}[device])


def test_auto_says_why_it_is_cpu() -> None:
    assert plan(job(), facts()).device_reason == "this machine has no GPU"
    assert "2 nodes" in plan(job(resources={"nodes": 2}), facts(gpus=1)).device_reason
    assert "CUDA_VISIBLE_DEVICES=9" in plan(job(), facts(environment={"CUDA_VISIBLE_DEVICES": "9"})).device_reason
    assert "without CUDA" in plan(job(), facts(gpus=1, torch_version="2.13.0+cpu")).device_reason
    assert "NVML: mismatch" in plan(job(), facts(gpu_fault="NVML: mismatch")).device_reason


def test_cuda_that_is_not_there_is_a_problem_and_never_cpu() -> None:
    (problem,) = problems(job(resources={"device": "cuda"}))
    assert problem.message == "resources.device: cuda was asked for, but this machine has no GPU"


def test_more_workers_than_gpus_is_a_problem_and_never_fewer_workers() -> None:
    (problem,) = problems(job(resources={"nodes": 2, "nproc_per_node": 4}), gpus=4)
    assert "4 per node x 2 nodes = 8 workers need a GPU each, but there are 4 here" in problem.message
    assert problem.hint == "nproc_per_node: 2, or device: cpu"


def test_gpus_are_dealt_out_in_order_and_the_rest_is_said() -> None:
    made = plan(job(resources={"nodes": 3}, batch=126), facts(gpus=8))
    assert [node.gpus for node in made.nodes] == [(0, 1), (2, 3), (4, 5)]
    assert "2 of 8 GPUs stay idle: 3 nodes get 2 each" in made.notes


def test_cores_are_dealt_out_as_evenly_as_they_go() -> None:
    made = plan(job(resources={"nodes": 3}, batch=126), facts(cpus=8))
    assert [node.cpus for node in made.nodes] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_nodes_share_cores_where_there_are_fewer_of_them() -> None:
    made = plan(job(resources={"nodes": 4, "nproc_per_node": 2}), facts(cpus=2))
    assert [node.cpus for node in made.nodes] == [()] * 4
    assert made.world_size == 8
    assert any("share 2 CPU cores" in note for note in made.notes)


def test_a_quota_counts_as_cpus_but_pins_nothing() -> None:
    made = plan(job(resources={"nodes": 2}), facts(cpus=64, cpu_quota=3.5))
    assert made.threads == 2
    assert [node.cpus for node in made.nodes] == [(), ()]


@pytest.mark.parametrize(
    ("cpus", "nodes", "nproc", "threads"), [(4, 1, 2, 2), (8, 2, 2, 2), (2, 2, 4, 1), (1, 1, 1, 1)]
)
def test_threads_are_the_cpus_by_the_workers_of_the_machine(cpus: int, nodes: int, nproc: int, threads: int) -> None:
    """F075."""
    made = plan(job(resources={"nodes": nodes, "nproc_per_node": nproc}), facts(cpus=cpus))
    assert made.threads == threads
    assert env(made)["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4)])
def test_threads_of_the_user_are_kept(value: str, threads: int) -> None:
    """F075."""
    made = plan(job(), facts(environment={"OMP_NUM_THREADS": value}))
    assert made.threads == threads
    assert env(made)["OMP_NUM_THREADS"] == value
    assert origins(made)["OMP_NUM_THREADS"] == "environment"


def test_threads_of_the_recipe_beat_the_environment_and_that_is_said() -> None:
    made = plan(job(resources={"threads": 2}), facts(environment={"OMP_NUM_THREADS": "3"}))
    assert env(made)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS=2 from resources.threads; 3 in the environment is not used" in made.notes


def test_threads_in_env_count_as_the_recipe_s() -> None:
    made = plan(job(env={"OMP_NUM_THREADS": "5"}), facts(environment={"OMP_NUM_THREADS": "3"}))
    assert (made.threads, env(made)["OMP_NUM_THREADS"]) == (5, "5")


def test_threads_said_twice_in_a_recipe_are_a_problem() -> None:
    (problem,) = problems(job(env={"OMP_NUM_THREADS": "5"}, resources={"threads": 2}))
    assert problem.message == "env.OMP_NUM_THREADS: 5 here, but resources.threads is 2"


def test_threads_that_are_no_number_are_a_problem_of_the_environment() -> None:
    (problem,) = problems(job(), environment={"OMP_NUM_THREADS": "many"})
    assert problem.where == "environment"
    assert "'many'" in problem.message


@pytest.mark.parametrize(
    ("batch", "nodes", "accumulate", "hint"),
    [
        (128, 3, 1, "the nearest that do: 126 or 129"),
        (100, 2, 8, "the nearest that do: 96 or 112"),
        (2, 4, 1, "the smallest that does: 4"),
    ],
)
def test_batch_that_does_not_divide_shows_its_arithmetic(batch: int, nodes: int, accumulate: int, hint: str) -> None:
    recipe = job(batch=batch, resources={"nodes": nodes}, train={"until": "1 epoch", "accumulate": accumulate})
    (problem,) = problems(recipe)
    assert problem.message.startswith(f"data.global_batch_size: {batch} does not divide by {nodes * accumulate} = ")
    assert f"nodes {nodes} x nproc_per_node 1" in problem.message
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("batch", "nodes", "parts", "also", "hint"),
    [
        (128, "1:3", 3, "", "the nearest that do for all of 1:3 nodes: 126 or 132"),
        (128, "2:8", 7, ", nor with 3, 5 or 6 of 2:8 nodes", "the nearest that do for all of 2:8 nodes: 840"),
        (64, "1:64", 63, ", nor with ", "one that does for all of 1:64 nodes is "),
    ],
)
def test_a_batch_divides_for_every_number_of_nodes_of_a_range(
    batch: int, nodes: str, parts: int, also: str, hint: str
) -> None:
    (problem,) = problems(job(batch=batch, resources={"nodes": nodes}))
    assert f"{batch} does not divide by {parts} = world size {parts} (nodes {parts}, of {nodes} x " in problem.message
    assert also in problem.message
    assert hint in problem.hint.replace("smallest that does", "nearest that do")


def test_a_batch_that_divides_for_all_of_a_range_is_a_plan_of_the_most_nodes() -> None:
    made = plan(job(batch=12, resources={"nodes": "1:4", "nproc_per_node": 1}), facts())
    assert (len(made.nodes), made.min_nodes, made.is_elastic, made.world_size) == (4, 1, True, 4)
    fixed = plan(job(batch=12, resources={"nodes": "4:4"}), facts())
    assert (len(fixed.nodes), fixed.min_nodes, fixed.is_elastic) == (4, None, False)


def test_a_script_that_cannot_resume_has_a_fixed_size() -> None:
    (problem,) = problems(script(resources={"nodes": "1:2"}))
    assert "there is no `resume:`" in problem.message
    assert plan(script(resources={"nodes": "1:2"}, resume="self"), facts()).min_nodes == 1


def test_single_is_one_rank() -> None:
    (problem,) = problems(job(parallelism={"strategy": "single"}, resources={"nodes": 2}))
    assert problem.message.startswith("parallelism.strategy: single is one rank, but the world size is 2")
    assert plan(job(parallelism={"strategy": "single"}), facts()).world_size == 1


def test_a_script_has_no_batch_and_no_strategy_of_ours() -> None:
    assert plan(script(resources={"nodes": 3}), facts()).world_size == 3
