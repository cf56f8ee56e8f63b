"""Batches in the order of the sampler, from this process or from loader processes."""

from __future__ import annotations

import ctypes
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import _run_finalizers, get_temp_dir  # type: ignore[attr-defined]
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from jobs.data.base import Batch, Samples
from jobs.sampler import Sampler, Share, derive_seed
from jobs.shared_memory import check_shared_memory, size_bytes

_Item = tuple[int, Tensor | list[int]]
"""An epoch, and indices of samples."""
_PR_SET_PDEATHSIG = 1


class Loader:
    """The micro-batches of one rank from `samples_seen` on, without end.

    Random draws of a dataset (python, numpy, torch) are seeded for each sample from (seed, epoch, index), or for each
    micro-batch where it is taken at once: the same whoever loads it, different in each epoch, and after a resume too.
    """

    def __init__(
        self,
        samples: Samples,
        sampler: Sampler,
        *,
        samples_seen: int = 0,
        loader_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """`pin_memory`: batches lie in page-locked memory; needs CUDA. Loader processes start with the first batch."""
        self._fetch = Fetch(samples, sampler.seed)
        self._items = _Items(sampler, samples_seen, as_lists=loader_workers > 0)  # tensors travel by descriptor: slow
        self._sampler, self._workers, self._prefetch, self._pin = sampler, loader_workers, prefetch, pin_memory
        self._peeked: Batch | None = None
        self._batches: Iterator[Batch] | None = None
        self._is_closed = False

    @property
    def loader_workers(self) -> int:
        """How many loader processes there are."""
        return self._workers

    def check_room(self, ranks: int) -> None:
        """Raise SharedMemoryError where the batches of the loader processes of so many ranks have no room here."""
        if self._workers:
            size = size_bytes(self.peek())
            check_shared_memory(size, loader_workers=self._workers, prefetch=self._prefetch, ranks=ranks)

    def peek(self) -> Batch:
        """The first micro-batch, without taking it."""
        if self._peeked is None:
            self._peeked = self._fetch.alone(next(iter(self._items)))
        return self._peeked

    def read(self, share: Share) -> list[Batch]:
        """The micro-batches of a share, out of their turn; nothing is taken."""
        return [self._fetch.alone((share.epoch, indices)) for indices in share.micro_batches]

    def start(self) -> None:
        """Let loader processes begin, where there are some."""
        if self._batches is None:
            self._batches = self._in_processes() if self._workers else self._in_this_process()

    def next(self) -> Batch:
        """The next micro-batch."""
        assert not self._is_closed, "the loader is closed"
        self._peeked = None
        if self._batches is None:
            self.start()
            assert self._batches is not None
        return next(self._batches)

    def take(self, count: int) -> Iterator[Batch]:
        """The next `count` micro-batches, each when it is asked for."""
        for _ in range(count):
            yield self.next()

    def close(self) -> None:
        """End the loader processes."""
        self._is_closed, self._batches = True, None  # the iterator of a DataLoader ends them when it is collected
        if self._workers:
            _run_finalizers()  # removes that folder: under our agent no interpreter does it at the end

    def _in_this_process(self) -> Iterator[Batch]:
        batches = map(self._fetch.alone, self._items)
        return map(_pinned, batches) if self._pin else batches

    def _in_processes(self) -> Iterator[Batch]:
        get_temp_dir()  # made before them, the loader processes use ours and leave none of their own behind
        dataloader: DataLoader[Batch] = DataLoader(
            self._fetch,
            batch_size=None,  # an item is a whole micro-batch
            sampler=self._items,
            num_workers=self._workers,
            prefetch_factor=self._prefetch,
            pin_memory=self._pin,
            generator=torch.Generator(),  # it would draw from the one of the training, for seeds that nobody uses
            worker_init_fn=_StartWorker(self._sampler.seed, self._sampler.rank),
        )
        return map(_as_pair, dataloader)


def _pinned(batch: Batch) -> Batch:
    return batch[0].pin_memory(), batch[1].pin_memory()


def _as_pair(batch: Sequence[Tensor]) -> Batch:
    """The thread that pins makes a list of a tuple."""
    inputs, targets = batch
    return inputs, targets


class Fetch(Dataset[Batch]):
    """Makes a micro-batch of indices, with the random draws of its samples seeded."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._drawn: Callable[[Tensor, int], Batch] | None = getattr(samples, "drawn", None)
        self._at_once: Callable[[Tensor], Batch] | None = getattr(samples, "__getitems__", None)
        self._draws: bool = getattr(samples, "draws", True)

    def __getitem__(self, item: _Item) -> Batch:
        epoch, indices = item[0], torch.as_tensor(item[1])
        if self._drawn is not None:
            return self._drawn(indices, derive_seed("sample", self._seed, epoch))
        if self._at_once is not None:
            if self._draws:
                self._seed_sample(epoch, int(indices[0]))
            return self._at_once(indices)
        return self._collate([self._sample(epoch, index) for index in indices.tolist()])

    def alone(self, item: _Item) -> Batch:
        """In the process that trains: what its network draws does not depend on what its samples have drawn."""
        if not self._draws:
            return self[item]
        state = torch.default_generator.get_state()
        batch = self[item]
        torch.default_generator.set_state(state)
        return batch

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
