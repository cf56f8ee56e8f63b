"""What `launch check` says of a recipe and the place where it would run."""

from __future__ import annotations

from typing import Any

import pytest
from planning_values import facts, job, script

from launcher.planning.fit import UNKNOWN, fit
from launcher.planning.slurm_facts import Allocation


def said(recipe: Any, executor: str = "local", **on: Any) -> tuple[list[str], list[str]]:
    remarks = fit(recipe, facts(**on), executor)
    return [problem.message for problem in remarks.problems], remarks.notes


def test_what_this_machine_lacks_is_a_remark() -> None:
    problems, notes = said(job(resources={"device": "cuda"}, parallelism={"tp": 2}))
    assert problems == []
    assert notes == [
        "it would not start here: resources.device: cuda was asked for, but this machine has no GPU",
        UNKNOWN,
    ]
    problems, notes = said(job(resources={"device": "cuda", "nproc_per_node": 3}, parallelism={"tp": 2}))
    assert problems == ["parallelism: the world size is 3, which does not divide by tp 2 (nodes 1 x nproc_per_node 3)"]
    assert said(job(resources={"device": "cuda:1"}))[0] == []
    split = {"strategy": "split", "devices": 4}
    lacks = "it would not start here: parallelism.devices: 4, but this machine has 2 GPUs"
    assert said(job(parallelism=split), gpus=2) == ([], [lacks])
    unknown = job(parallelism=split, resources={"device": "cuda", "nproc_per_node": 1})
    assert said(unknown)[1] == [
        "it would not start here: resources.device: cuda was asked for, but this machine has no GPU"
    ]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (job(parallelism={"dp": 3}), "parallelism: dp 3, but the world size is 1 (nodes 1 x nproc_per_node 1, auto: "),
        (job(parallelism={"sync_batchnorm": True}), "parallelism.sync_batchnorm: true, and the device is cpu"),
        (job(batch=7, resources={"nproc_per_node": 2}), "data.global_batch_size: 7 does not divide by 2"),
        (job(profiler={"steps": "5-2"}), "profiler.steps: 5-2 ends at 2, before it begins at 5"),
        (job(profiler={"ranks": [1]}), "profiler.ranks: 1, and this run has rank 0 alone"),
    ],
)
def test_what_does_not_go_together_is_a_problem(recipe: Any, message: str) -> None:
    (problem,), _ = said(recipe)
    assert problem.startswith(message)


def test_on_slurm_the_profile_says_what_there_is() -> None:
    slurm = {"gpus_per_node": 4}
    assert said(job(parallelism={"tp": 4}, slurm=slurm), "slurm") == ([], [])
    (problem,), _ = said(job(parallelism={"tp": 8}, slurm=slurm), "slurm")
    assert "the world size is 4, which does not divide by tp 8" in problem
    (problem,), _ = said(job(resources={"device": "cuda:1"}, slurm=slurm), "slurm")
    assert problem.endswith("which ones a job gets, SLURM decides")
    (problem,), _ = said(job(resources={"device": "cuda"}), "slurm")
    assert problem == "resources.device: cuda was asked for, but the job asks for no GPU"
    allocation = Allocation(job="1", nodes=1, gpus_per_node=2, cpus_per_node=4)
    assert said(job(parallelism={"tp": 2}), "here", allocation=allocation) == ([], [])


def test_a_script_asks_for_nothing_of_this() -> None:
    assert said(script(resources={"nproc_per_node": 3})) == ([], [])
