"""What all ranks must know at the same step: the loss, and whether to stop. One small all-reduce per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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


CARRIED = 8
"""Numbers that a carrier has room for: the four of every message, and as many of its own."""
_MANY = 1 << 20
"""The unit of a large count, where numbers have 24 bits."""
_HEAD = 4


class Agreement:
    """An all-reduce that is sent before the work of a step and received after it, so that nobody waits for it.

    With a carrier the one of a step is none of its own: what is in there (fp32, CARRIED numbers) is summed with the
    gradients, by whoever sums those.
    """

    def __init__(
        self,
        stop: StopRequest,
        written: Callable[[], int] = int,
        has_trouble: Callable[[], bool] = bool,
        carrier: Tensor | None = None,
    ) -> None:
        self._stop, self._written, self._has_trouble = stop, written, has_trouble
        self._carrier, self._carried = carrier, 0
        self.trouble = False
        """Whether some rank has said that it has trouble with a save; stays until it is settled."""
        self._message = torch.zeros(0)
        self._work: dist.Work | None = None

    def send_with_gradients(self, *values: float) -> None:
        """The same as `send`, where the gradients of this step are still to be summed: with them, if they carry it."""
        if self._carrier is None:
            self.send(*values)
            return
        self._carried = _HEAD + len(values)
        message = [*self._head(), *values, *[0.0] * (CARRIED - self._carried)]
        self._carrier.copy_(torch.tensor(message))

    def send(self, *values: float) -> None:
        """Contribute numbers of this rank, its request to stop if it has one, and whether it has trouble."""
        assert self._work is None, "the last message was not received"
        assert not self._carried, "one travels with the gradients, and was not received"
        self._message = torch.tensor([*self._head(), *values], dtype=torch.float64)
        self._work = dist.all_reduce(self._message, async_op=True)

    def receive(self) -> Agreed:
        """Wait for all ranks. With a carrier: they have been waited for."""
        if self._carrier is not None and self._carried:
            message, self._carried = self._carrier.tolist()[: self._carried], 0
        else:
            assert self._work is not None, "nothing was sent"
            self._work.wait()
            self._work = None
            message = self._message.tolist()
        stop, trouble, many, few, *sums = message
        self.trouble |= trouble > 0
        return Agreed(stop > 0, tuple(sums), int(many) * _MANY + int(few))

    def now(self, *values: float) -> Agreed:
        """Send and receive, outside a step."""
        self.send(*values)
        return self.receive()

    def _head(self) -> tuple[float, ...]:
        many, few = divmod(self._written(), _MANY)
        return float(self._stop.requested), float(self._has_trouble()), float(many), float(few)
