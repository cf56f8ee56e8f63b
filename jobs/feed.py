"""The batches of a step, on the device, and how long the training waits for them.

On a GPU the next batch is made and copied while this one computes: the work of this one has been given to the device by
then, and the copy runs on a stream of its own. On a CPU there is nothing to copy, and a batch that is made ahead takes
the same CPU from the one that computes: it is made when it is asked for.

Batches are functions of their place in the order of the data, so what is made ahead changes none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from jobs.data.base import Batch
from jobs.loader import Loader
from jobs.marks import Marks


class Beside(Protocol):
    """A queue of the device beside the one that computes."""

    def copying(self) -> AbstractContextManager[Any]:
        """Copies that are begun within go into this queue."""

    def hand_over(self, batch: Batch) -> None:
        """What is computed from now on may read this batch, which was copied here."""

    def is_idle(self) -> bool:
        """Whether the device has computed all that it was given: it waits."""


class SideStream:
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[Any]:
        """Copies that are begun within go into this stream."""
        return torch.cuda.stream(self._stream)

    def hand_over(self, batch: Batch) -> None:
        """The computing stream waits for the copies; and their memory is not given away before it has read them."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in batch:
            tensor.record_stream(computing)

    def is_idle(self) -> bool:
        """Whether the computing stream has nothing left to do."""
        return torch.cuda.current_stream(self._device).query()


def beside(device: torch.device) -> Beside | None:
    """For a device that copies while it computes; None for a CPU."""
    return SideStream(device) if device.type == "cuda" else None


class Feed:
    """Takes the micro-batches of a rank from its loader and brings each to the device."""

    def __init__(
        self, loader: Loader, place: Callable[[Batch], Batch], marks: Marks, stream: Beside | None = None
    ) -> None:
        """`place`: brings a batch to the device. `stream`: where that may run beside the computing; None: nowhere."""
        self._loader, self._place, self._marks, self._beside = loader, place, marks, stream
        self._ahead: Batch | None = None
        self._steps = self._lap_steps = 0
        self._wait_ns = self._lap_ns = 0

    @property
    def wait_s(self) -> float:
        """How long the steps have waited for their batches, all but the first one, which loader processes start with.

        On a GPU a batch that is made ahead counts where the device has run out of work meanwhile.
        """
        return self._wait_ns / 1e9

    def lap(self) -> float:
        """Seconds that a step has waited for its batches, in the mean over the steps since the last lap."""
        mean_s = (self._wait_ns - self._lap_ns) / 1e9 / max(1, self._steps - self._lap_steps)
        self._lap_ns, self._lap_steps = self._wait_ns, self._steps
        return mean_s

    def peek(self) -> Batch:
        """The first micro-batch, without taking it."""
        return self._place(self._loader.peek())

    def take(self, count: int) -> Iterator[Batch]:
        """The next `count` micro-batches, those of one step, each when it is asked for."""
        self._steps += 1
        for _ in range(count):
            batch = self._await() if self._ahead is None else self._ahead
            self._ahead = None
            if self._beside is not None:
                self._beside.hand_over(batch)
            yield batch
            if self._beside is not None:  # whoever asks for more has given the work of this one to the device
                self._make_ahead(self._beside)

    def _await(self) -> Batch:
        begun_ns = time.perf_counter_ns()
        batch = self._make()
        if self._steps > 1:
            self._wait_ns += time.perf_counter_ns() - begun_ns
        return batch

    def _make_ahead(self, stream: Beside) -> None:
        begun_ns = time.perf_counter_ns()
        self._marks.work()
        self._ahead = self._make()
        self._marks.rest()
        if stream.is_idle():
            self._wait_ns += time.perf_counter_ns() - begun_ns

    def _make(self) -> Batch:
        batch = self._loader.next()
        if self._beside is None:
            return self._place(batch)
        with self._beside.copying():
            return self._place(batch)
