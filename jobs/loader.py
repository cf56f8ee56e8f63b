"""Batches in the order of the sampler, from this process or from loader processes."""

from __future__ import annotations

import ctypes
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import _run_finalizers, get_temp_dir  # type: ignore[attr-defined]
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from jobs.data.base import Batch, Samples
from jobs.sampler import Sampler, derive_seed

_Item = tuple[int, Tensor | list[int]]
"""An epoch, and indices of samples."""
_PR_SET_PDEATHSIG = 1


class Loader:
    """The micro-batches of one rank from `samples_seen` on, without end.

    Random draws of a dataset (python, numpy, torch) are seeded for each sample from (seed, epoch, index), or for each
    micro-batch where it is taken at once: the same whoever loads it, different in each epoch, and after a resume too.
    """

    def __init__(self, samples: Samples, sampler: Sampler, *, samples_seen: int = 0, loader_workers: int = 0) -> None:
        self._fetch = Fetch(samples, sampler.seed)
        self._items = _Items(sampler, samples_seen, as_lists=loader_workers > 0)  # tensors travel by descriptor: slow
        self._in_processes = loader_workers > 0
        if loader_workers:
            get_temp_dir()  # made before them, the loader processes use ours and leave none of their own behind
            dataloader = _in_processes(self._fetch, self._items, sampler, loader_workers)
            self._batches: Iterator[Batch] | None = iter(dataloader)
        else:
            self._batches = map(self._fetch.__getitem__, self._items)

    def peek(self) -> Batch:
        """The first micro-batch, without taking it."""
        return self._fetch[next(iter(self._items))]

    def take(self, count: int) -> Iterator[Batch]:
        """The next `count` micro-batches, each when it is asked for."""
        assert self._batches is not None, "the loader is closed"
        for _ in range(count):
            yield next(self._batches)

    def close(self) -> None:
        """End the loader processes."""
        self._batches = None  # the iterator of a DataLoader ends its processes when it is collected
        if self._in_processes:
            _run_finalizers()  # removes that folder: under our agent no interpreter does it at the end


class Fetch(Dataset[Batch]):
    """Makes a micro-batch of indices, with the random draws of its samples seeded."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._at_once: Callable[[Tensor], Batch] | None = getattr(samples, "__getitems__", None)
        self._draws: bool = getattr(samples, "draws", True)

    def __getitem__(self, item: _Item) -> Batch:
        epoch, indices = item[0], torch.as_tensor(item[1])
        if self._at_once is not None:
            if self._draws:
                self._seed_sample(epoch, int(indices[0]))
            return self._at_once(indices)
        return self._collate([self._sample(epoch, index) for index in indices.tolist()])

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed_sample(epoch, index)
        return self._samples[index]

    def _seed_sample(self, epoch: int, index: int) -> None:
        seed_all(derive_seed("sample", self._seed, epoch, index))

    @staticmethod
    def _collate(samples: list[Any]) -> Batch:
        inputs, targets = default_collate(samples)
        return inputs, targets


def seed_all(seed: int) -> None:
    """Seed the generators that a dataset may draw from: python, numpy, torch (on CPU)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # the old global generator: the one that datasets draw from
    torch.default_generator.manual_seed(seed)


class _Items:
    """What is to be fetched, in order."""

    def __init__(self, sampler: Sampler, samples_seen: int, *, as_lists: bool) -> None:
        self._sampler, self._samples_seen, self._as_lists = sampler, samples_seen, as_lists

    def __iter__(self) -> Iterator[_Item]:
        seen = self._samples_seen
        while True:
            share = self._sampler.share(seen)
            for indices in share.micro_batches:
                yield share.epoch, indices.tolist() if self._as_lists else indices
            seen += share.global_count


def _in_processes(fetch: Fetch, items: Iterable[_Item], sampler: Sampler, loader_workers: int) -> DataLoader[Batch]:
    return DataLoader(
        fetch,
        batch_size=None,  # an item is a whole micro-batch
        sampler=items,
        num_workers=loader_workers,
        worker_init_fn=_StartWorker(sampler.seed, sampler.rank),
    )


class _StartWorker:
    """First thing in a loader process."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def __call__(self, worker: int) -> None:
        # A stop reaches the whole process group: the rank still needs its batches until all ranks leave together.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nothing is left behind where the rank is killed.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        assert get_worker_info() is not None
        seed_all(derive_seed("loader", self._seed, self._rank, worker))
