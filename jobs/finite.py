"""Numbers gone wrong: whether a step may change the weights, and what has been left out where it may not.

Whether all is finite is known to every rank before any of them runs its optimizer, and every rank finds the same: the
losses travel with the agreement of the step; of the gradients see `jobs.clip`.

What is left out is part of the progress, and so of every checkpoint. A step that is left out counts as one: the order
of the data, the schedule and the end of the training stay what they are without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobs.private_torch import buffers_of, copy_each


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The steps whose batches count for nothing in the weights."""

    ranges: tuple[tuple[int, int], ...] = ()
    """(first, last), in order, with steps between them that counted."""
    rollbacks: int = 0
    """How often the training has gone back since the newest checkpoint that it wrote after a step that counted."""

    def with_steps(self, first: int, last: int) -> LeftOut:
        """These steps too; they follow all that are known, or take their place."""
        before = tuple((one, min(other, first - 1)) for one, other in self.ranges if one < first)
        if before and before[-1][1] == first - 1:
            first, before = before[-1][0], before[:-1]
        return replace(self, ranges=(*before, (first, last)))

    def in_a_row(self, step: int) -> int:
        """How many steps were left out one after the other, up to this one."""
        return next((last - first + 1 for first, last in self.ranges if last == step), 0)

    @property
    def count(self) -> int:
        """How many steps in all."""
        return sum(last - first + 1 for first, last in self.ranges)

    def to_record(self) -> dict[str, Any]:
        """For state.json; `read_left_out` reads it."""
        return {"ranges": [list(each) for each in self.ranges], "rollbacks": self.rollbacks}


def read_left_out(record: Any) -> LeftOut:
    """What a state.json says. A checkpoint without it has left nothing out."""
    if record is None:
        return LeftOut()
    ranges = tuple((int(first), int(last)) for first, last in record["ranges"])
    return LeftOut(ranges=ranges, rollbacks=int(record["rollbacks"]))


def loss_message(total: float, samples: int, rank: int) -> tuple[float, ...]:
    """What a rank tells the others of its loss; the sums over all ranks are for `loss_problem`."""
    bad = not math.isfinite(total)
    return total, samples, float(bad), float(rank if bad else 0)


def loss_problem(sums: Sequence[float], *, ranks: int) -> str:
    """What is wrong with the loss of a step; empty where nothing is. ranks: how many there are."""
    loss = sums[0] / sums[1]
    if math.isfinite(loss):
        return ""
    where = f" on rank {sums[3]:.0f} alone" if sums[2] == 1 and ranks > 1 else ""
    return f"loss is {loss}{where}"


def bad_weights(net: nn.Module, agree: Callable[[bool], bool] | None) -> str:
    """Which weights or buffers are not finite, for people; empty where all are.

    agree: tells all ranks of a finding and returns whether any of them has one, where the ranks hold different parts
    of the network, and every rank calls it; None where all hold the same.
    """
    problem = ""
    for name, tensor in net.state_dict().items():
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if here.is_floating_point() and not _is_finite(here):
            problem = f"weights of {name} are not finite"
            break
    if agree is not None and agree(bool(problem)):
        return problem or "weights on another rank are not finite"
    return problem


def _is_finite(tensor: Tensor) -> bool:
    """Whether all of it is. What is not shows in the sum, which is ten times as fast to make; so may an overflow."""
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


class KeptBuffers:
    """The buffers of a network as they were at some moment: the statistics of a batch norm, which a forward changes."""

    def __init__(self, net: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}" if path else name, buffers_of(module), name)
            for path, module in net.named_modules(remove_duplicate=False)
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        ]
        self._kept = [buffer.detach().clone() for buffer in self._now()]

    def keep(self) -> None:
        """Note what they are now."""
        for index, buffer in enumerate(self._now()):
            if buffer.shape != self._kept[index].shape or buffer.dtype != self._kept[index].dtype:
                self._kept[index] = torch.empty_like(buffer)
        copy_each(self._kept, self._now())

    def restore(self) -> None:
        """Put back what was noted."""
        for (_, buffers, name), kept in zip(self._places, self._kept, strict=True):
            if buffers[name] is None or buffers[name].shape != kept.shape:
                buffers[name] = torch.empty_like(kept)
            buffers[name].copy_(kept)

    def named(self) -> dict[str, Tensor]:
        """What was noted, by the names of the buffers in the network."""
        return {name: kept for (name, _, _), kept in zip(self._places, self._kept, strict=True)}

    def _now(self) -> list[Tensor]:
        """Where a forward puts another tensor in the place of a buffer, that one."""
        return [buffers[name] for _, buffers, name in self._places]
