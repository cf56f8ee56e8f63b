from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.sampler import Sampler, Share, derive_seed, permutation

worlds = st.sampled_from([1, 2, 3, 4])
accumulations = st.sampled_from([1, 2, 5])


def samplers(num_samples: int, micro: int, accumulate: int, world: int, seed: int) -> list[Sampler]:
    batch = 120 * micro  # divides by every world x accumulate above
    return [
        Sampler(num_samples=num_samples, global_batch_size=batch, seed=seed, accumulate=accumulate, rank=rank,
                world_size=world)
        for rank in range(world)
    ]  # fmt: skip


def walk(ranks: list[Sampler], samples_seen: int, steps: int) -> list[list[Share]]:
    shares = []
    for _ in range(steps):
        shares.append([sampler.share(samples_seen) for sampler in ranks])
        samples_seen += shares[-1][0].global_count
    return shares


def indices(share: Share) -> list[int]:
    return torch.cat(share.micro_batches[: share.counted]).tolist() if share.counted else []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 2), accumulations, worlds, st.integers(0, 5))
def test_every_sample_comes_once_per_epoch(n: int, micro: int, accumulate: int, world: int, seed: int) -> None:
    ranks = samplers(n, micro, accumulate, world, seed)
    for epoch in (0, 1):
        seen: list[int] = []
        for shares in walk(ranks, epoch * n, ranks[0].steps_per_epoch):
            assert {share.epoch for share in shares} == {epoch}
            assert sum(share.local_count for share in shares) == shares[0].global_count
            for share in shares:
                assert len(indices(share)) == share.local_count
                seen += indices(share)
        assert sorted(seen) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), accumulations, worlds, st.integers(0, 1000))
def test_a_batch_does_not_depend_on_ranks_or_accumulation(n: int, accumulate: int, world: int, step: int) -> None:
    """So a resume with another number of ranks trains on the same batches."""
    reference = samplers(n, 1, 1, 1, seed=3)
    seen = sum(shares[0].global_count for shares in walk(reference, 0, step % 20))
    together = [index for sampler in samplers(n, 1, accumulate, world, 3) for index in indices(sampler.share(seen))]
    assert sorted(together) == sorted(indices(reference[0].share(seen)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 12))
def test_a_resume_goes_on_as_if_nothing_had_happened(n: int, kept: int) -> None:
    sampler = samplers(n, 1, 2, 1, seed=1)
    whole = [indices(shares[0]) for shares in walk(sampler, 0, kept + 6)]
    samples_seen = sum(len(batch) for batch in whole[:kept])
    assert [indices(shares[0]) for shares in walk(samplers(n, 1, 2, 1, seed=1), samples_seen, 6)] == whole[kept:]


def test_the_order_differs_per_epoch_and_seed() -> None:
    """F007."""
    orders = [permutation(1000, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6


def test_the_tail_counts_right() -> None:
    """F089: five micro-batches with an accumulation of four are two steps, of four and of one."""
    sampler = Sampler(num_samples=40, global_batch_size=32, seed=0, accumulate=4)
    first, second = sampler.share(0), sampler.share(32)
    assert [len(batch) for batch in first.micro_batches] == [8, 8, 8, 8]
    assert [len(batch) for batch in second.micro_batches] == [8]
    assert (second.global_count, second.local_count) == (8, 8)


def test_a_rank_without_samples_still_has_a_batch_that_counts_nothing() -> None:
    last = [Sampler(num_samples=9, global_batch_size=8, seed=0, rank=r, world_size=2).share(8) for r in (0, 1)]
    assert [share.local_count for share in last] == [1, 0]
    assert [len(share.micro_batches) for share in last] == [1, 1]


def test_a_batch_that_does_not_divide_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"10 does not divide by 6 \(data-parallel ranks 3 x train.accumulate 2\)"):
        Sampler(num_samples=50, global_batch_size=10, seed=0, accumulate=2, world_size=3)


def test_seeds_of_neighbours_and_purposes_differ() -> None:
    seeds = {derive_seed(purpose, seed, step) for purpose in ("order", "step") for seed in (0, 1) for step in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40))
def test_the_smallest_micro_batch_is_known_before(n: int, micro: int, accumulate: int, world: int, steps: int) -> None:
    batch = micro * accumulate * world
    ranks = [
        Sampler(num_samples=n, global_batch_size=batch, seed=0, accumulate=accumulate, rank=rank, world_size=world)
        for rank in range(world)
    ]
    steps = min(steps, ranks[0].steps_per_epoch)
    shares = [rank.share(step * batch) for rank in ranks for step in range(steps)]
    assert ranks[0].smallest_micro_batch(steps) == min(len(each) for share in shares for each in share.micro_batches)
