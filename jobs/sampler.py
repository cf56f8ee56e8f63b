"""Which samples, in which order, on which rank: pure functions of (seed, samples_seen), so nothing has to be saved.

Epoch e is a permutation of all samples from (seed, e). A step takes the next `global_batch_size` of them; the last
one of an epoch takes what is left. Rank r of R takes every R-th sample of the batch, from the r-th on, and splits its
share into micro-batches. So a batch is the same for every number of ranks and any accumulation, and every sample comes
once per epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from jobs.batches import check_divides


def derive_seed(purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose, independent of every other purpose and of neighbouring numbers."""
    text = "/".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=2)
def permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(derive_seed("order", seed, epoch)))


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank does in one step."""

    epoch: int
    global_count: int
    """Samples of this step over all ranks; smaller at the end of an epoch."""
    local_count: int
    """Samples of this rank. May be 0."""
    micro_batches: tuple[Tensor, ...]
    """Indices of samples; at least one micro-batch, and equally many on all ranks: a forward may need the others."""
    counted: int
    """How many of them count, from the first on. One that does not is there so that this rank does not sit out."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The order of a whole training, for one rank."""

    num_samples: int
    global_batch_size: int
    seed: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("data: there is no sample to train on")
        check_divides(self.global_batch_size, world_size=self.world_size, accumulate=self.accumulate)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last may be a smaller one."""
        return -(-self.num_samples // self.global_batch_size)

    @property
    def micro_batch_size(self) -> int:
        """Samples that one rank computes at once."""
        return self.global_batch_size // (self.world_size * self.accumulate)

    def smallest_micro_batch(self, total_steps: int) -> int:
        """Samples of the smallest micro-batch that any rank computes in so many steps."""
        last = self.num_samples % self.global_batch_size
        counts = [self.global_batch_size] * (self.num_samples >= self.global_batch_size)
        counts += [last] * (last > 0 and total_steps >= self.steps_per_epoch)
        return min(self._smallest_of(count) for count in counts or [last])

    def _smallest_of(self, global_count: int) -> int:
        least = global_count // self.world_size  # of the last rank
        most = -(-global_count // self.world_size)
        count = -(-most // self.micro_batch_size)
        sizes = [size // min(count, size) for size in (least, most) if size]
        return min(sizes + [min(2, global_count)] * (least < count))  # a rank with fewer samples computes idle ones

    def batch(self, samples_seen: int) -> Tensor:
        """Indices of the samples that follow, over all ranks."""
        epoch, start = divmod(samples_seen, self.num_samples)
        return permutation(self.num_samples, self.seed, epoch)[start : start + self.global_batch_size]

    def share(self, samples_seen: int) -> Share:
        """The part of this rank in the step that follows."""
        return _share(self, samples_seen)


@lru_cache(maxsize=4)
def _share(sampler: Sampler, samples_seen: int) -> Share:
    """Kept: the loader asks for it, and the trainer."""
    batch = sampler.batch(samples_seen)
    mine = batch[sampler.rank :: sampler.world_size]
    most = -(-len(batch) // sampler.world_size)  # rank 0 has so many samples
    count = -(-most // sampler.micro_batch_size)
    parts = min(count, len(mine))
    own = torch.tensor_split(mine, parts) if parts > 1 else (mine,) * parts  # evenly: none is left with one sample
    idle = (batch[:2],) * (count - len(own))  # a batch norm wants two
    return Share(
        epoch=samples_seen // sampler.num_samples,
        global_count=len(batch),
        local_count=len(mine),
        micro_batches=(*own, *idle),
        counted=len(own),
    )
