"""What all ranks must know at the same step: the loss, and whether to stop. One small all-reduce per step."""

from __future__ import annotations

from collections.abc import Callable
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
    written: int = 0
    """How many lines of the metrics rank 0 has brought to the file."""


class Agreement:
    """An all-reduce that is sent before the work of a step and received after it, so that nobody waits for it."""

    def __init__(
        self, stop: StopRequest, written: Callable[[], int] = int, has_trouble: Callable[[], bool] = bool
    ) -> None:
        self._stop, self._written, self._has_trouble = stop, written, has_trouble
        self.trouble = False
        """Whether some rank has said that it has trouble with a save; stays until it is settled."""
        self._message = torch.zeros(0)
        self._work: dist.Work | None = None

    def send(self, *values: float) -> None:
        """Contribute numbers of this rank, its request to stop if it has one, and whether it has trouble."""
        assert self._work is None, "the last message was not received"
        self._message = torch.tensor(
            [float(self._stop.requested), float(self._has_trouble()), float(self._written()), *values],
            dtype=torch.float64,
        )
        self._work = dist.all_reduce(self._message, async_op=True)

    def receive(self) -> Agreed:
        """Wait for all ranks."""
        assert self._work is not None, "nothing was sent"
        self._work.wait()
        self._work = None
        stop, trouble, written, *sums = self._message.tolist()
        self.trouble |= trouble > 0
        return Agreed(stop > 0, tuple(sums), int(written))

    def now(self, *values: float) -> Agreed:
        """Send and receive."""
        self.send(*values)
        return self.receive()
