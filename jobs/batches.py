"""How a batch is divided among the ranks, and how that division goes on where their number changes.

The batch and the learning rate are those of the recipe on any number of ranks. On fewer ranks each makes more
micro-batches of its part, so that none grows: what fitted into memory before fits now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The division of one attempt."""

    global_batch_size: int
    world_size: int
    wanted: int
    """train.accumulate of the recipe."""
    accumulate: int
    """Micro-batches of a rank per step."""
    largest: int
    """The largest micro-batch that this training has had."""

    @property
    def micro_batch_size(self) -> int:
        """Samples that one rank computes at once."""
        return self.global_batch_size // (self.world_size * self.accumulate)

    def to_record(self) -> dict[str, int]:
        """For the checkpoints; `divide` reads it."""
        return asdict(self)

    def changes(self, before: Batches | None) -> str:
        """What is not as it was, for people; empty where nothing is."""
        if before is None or (before.world_size, before.accumulate) == (self.world_size, self.accumulate):
            return ""
        return (
            f"data-parallel ranks {before.world_size} -> {self.world_size}: "
            f"accumulate {before.accumulate} -> {self.accumulate}, "
            f"micro-batch {before.micro_batch_size} -> {self.micro_batch_size}; "
            f"global batch {before.global_batch_size} -> {self.global_batch_size}"
        )


def divide(global_batch_size: int, *, world_size: int, wanted: int, before: Batches | None) -> Batches:
    """The division for these ranks, after the one of the checkpoint that is gone on from.

    Another `train.accumulate` or batch than before was asked for by a person: then it is as he says. Raises ValueError
    where the batch does not divide.
    """
    check_divides(global_batch_size, world_size=world_size, accumulate=wanted)
    share = global_batch_size // world_size
    accumulate, largest = wanted, share // wanted
    if before is not None and (before.global_batch_size, before.wanted) == (global_batch_size, wanted):
        accumulate = next(k for k in range(wanted, share + 1) if share % k == 0 and share // k <= before.largest)
        largest = max(before.largest, share // accumulate)
    return Batches(
        global_batch_size=global_batch_size,
        world_size=world_size,
        wanted=wanted,
        accumulate=accumulate,
        largest=largest,
    )


def read_batches(state: Mapping[str, Any]) -> Batches:
    """The division that a checkpoint was made with, from its state.json."""
    return Batches(**state["batches"])


def check_divides(global_batch_size: int, *, world_size: int, accumulate: int) -> None:
    """Raise ValueError where a batch does not divide into equal micro-batches."""
    parts = world_size * accumulate
    if global_batch_size % parts:
        raise ValueError(
            f"data.global_batch_size: {global_batch_size} does not divide by {parts} "
            f"(data-parallel ranks {world_size} x train.accumulate {accumulate})"
        )
