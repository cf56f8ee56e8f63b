"""What all ranks must know at the same step: the loss, and whether to stop. One small all-reduce per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from jobs.stop import StopRequest


@dataclass(frozen=True)
class Agreed:
    """The same on every rank."""

    stop: bool
    """Some rank was told to stop."""
    sums: tuple[float, ...]
    """Sums over all ranks of what each one sent."""


class Agreement:
    """An all-reduce that is sent before the work of a step and received after it, so that nobody waits for it."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._message = torch.zeros(0)
        self._work: dist.Work | None = None

    def send(self, *values: float) -> None:
        """Contribute numbers of this rank, and its request to stop if it has one."""
        assert self._work is None, "the last message was not received"
        self._message = torch.tensor([float(self._stop.requested), *values], dtype=torch.float64)
        self._work = dist.all_reduce(self._message, async_op=True)

    def receive(self) -> Agreed:
        """Wait for all ranks."""
        assert self._work is not None, "nothing was sent"
        self._work.wait()
        self._work = None
        stop, *sums = self._message.tolist()
        return Agreed(stop > 0, tuple(sums))

    def now(self, *values: float) -> Agreed:
        """Send and receive."""
        self.send(*values)
        return self.receive()
