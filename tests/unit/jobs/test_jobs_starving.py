"""Advice to a training that waits for its samples."""

from __future__ import annotations

import os

import torch

from jobs.starving import Means, advice
from jobs.world import World


def means(loader_workers: int = 0, *, cpus: int = 16, ranks: int = 2, threads: int = 1) -> Means:
    return Means(loader_workers=loader_workers, cpus=cpus, ranks=ranks, threads=threads)


def test_a_share_below_the_threshold_is_no_news() -> None:
    assert advice(9.9, 100.0, means()) == ""
    assert advice(38.0, 100.0, means()) == "input-bound 38 %: try data.loader_workers=2"


def test_a_short_wait_is_no_news() -> None:
    assert advice(0.9, 1.0, means()) == ""


def test_as_many_processes_as_make_up_for_the_wait() -> None:
    assert advice(80.0, 100.0, means()) == "input-bound 80 %: try data.loader_workers=5"
    assert advice(50.0, 100.0, means(2)) == "input-bound 50 %: try data.loader_workers=5"


def test_no_more_processes_than_there_are_cpus_for() -> None:
    assert advice(80.0, 100.0, means(cpus=8)) == "input-bound 80 %: try data.loader_workers=3"
    assert advice(80.0, 100.0, means(3, cpus=8)) == (
        "input-bound 80 % with data.loader_workers=3: the 8 CPUs of 2 ranks are all in use; "
        "more of them help where samples wait for a disk, else make samples cheaper, or give each rank more CPUs"
    )
    assert advice(80.0, 100.0, means(cpus=2)) == (
        "input-bound 80 %: the 2 CPUs of 2 ranks are all in use; "
        "data.loader_workers=1 helps where samples wait for a disk, else make them cheaper"
    )


def test_the_cpus_are_those_of_the_agent() -> None:
    found = Means.here(3, World(rank=1, size=4, local_rank=1, local_size=2), torch.device("cpu"))
    assert found == Means(
        loader_workers=3, cpus=len(os.sched_getaffinity(os.getppid())), ranks=2, threads=torch.get_num_threads()
    )
