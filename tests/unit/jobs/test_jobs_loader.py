from __future__ import annotations

import multiprocessing
import random
import time

import numpy as np
import pytest
import torch

from jobs.data.base import TensorSamples
from jobs.loader import Loader
from jobs.sampler import Sampler


class Draws:
    """A dataset of nothing but random draws, from all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor(draws, dtype=torch.float64), index


def draws(workers: int, *, rank: int = 0, epochs: int = 2, samples_seen: int = 0) -> list[tuple[float, ...]]:
    sampler = Sampler(num_samples=24, global_batch_size=8, seed=5, rank=rank, world_size=2)
    loader = Loader(Draws(), sampler, samples_seen=samples_seen, loader_workers=workers)
    steps = (epochs * 24 - samples_seen) // 8
    found = [tuple(row.tolist()) for inputs, _ in loader.take(steps) for row in inputs]
    loader.close()
    return found


def test_no_two_random_draws_are_alike() -> None:
    """F023: ranks x loader workers x epochs."""
    streams = draws(2, rank=0) + draws(2, rank=1)
    for generator in range(3):
        assert len({stream[generator] for stream in streams}) == 2 * 24


def test_random_draws_are_the_same_again_whoever_loads_and_after_a_resume() -> None:
    """F023: two runs, other numbers of loader workers, and the second half alone."""
    reference = draws(0)
    assert draws(2) == reference
    assert draws(0) == reference
    assert draws(2, samples_seen=24) == reference[12:]


def test_peek_takes_nothing() -> None:
    sampler = Sampler(num_samples=10, global_batch_size=5, seed=0)
    loader = Loader(TensorSamples(torch.arange(10.0), torch.arange(10)), sampler)
    peeked = loader.peek()[1].tolist()
    assert [targets.tolist() for _, targets in loader.take(1)] == [peeked]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_follow_the_sampler(workers: int) -> None:
    sampler = Sampler(num_samples=10, global_batch_size=4, seed=0, accumulate=2)
    loader = Loader(TensorSamples(torch.arange(10.0), torch.arange(10)), sampler, loader_workers=workers)
    targets = [targets.tolist() for _, targets in loader.take(5)]
    loader.close()
    assert [len(batch) for batch in targets] == [2, 2, 2, 2, 2]
    assert sorted(target for batch in targets for target in batch) == list(range(10))


def test_what_a_network_draws_does_not_depend_on_who_loads_its_samples() -> None:
    sampler = Sampler(num_samples=24, global_batch_size=8, seed=5)
    drawn = []
    for workers in (0, 1):
        loader = Loader(Draws(), sampler, loader_workers=workers)
        torch.manual_seed(3)
        for _ in loader.take(2):
            drawn.append(torch.rand(()).item())
        loader.close()
    assert drawn[:2] == drawn[2:]


def test_loader_processes_have_as_many_batches_ready_as_the_recipe_says() -> None:
    class Counted(TensorSamples):
        def __getitems__(self, indices: torch.Tensor | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            with made.get_lock():
                made.value += 1
            return super().__getitems__(indices)

    made = multiprocessing.Value("i", 0)
    samples = Counted(torch.zeros(100), torch.zeros(100))
    loader = Loader(samples, Sampler(num_samples=100, global_batch_size=4, seed=0), loader_workers=1, prefetch=5)
    next(loader.take(1))  # and the next one takes its place
    deadline_s = time.monotonic() + 10
    while made.value < 6 and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert made.value == 6
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_wait_in_page_locked_memory(workers: int) -> None:
    sampler = Sampler(num_samples=10, global_batch_size=4, seed=0)
    samples = TensorSamples(torch.arange(10.0), torch.arange(10))
    loader = Loader(samples, sampler, loader_workers=workers, pin_memory=True)
    assert all(tensor.is_pinned() for batch in loader.take(2) for tensor in batch)
    loader.close()
