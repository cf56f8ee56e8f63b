"""Agreement over a process group of its own, for a thread beside the training: as `Meeting` is over the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from jobs.state import CheckpointError

T = TypeVar("T")


class CircleError(RuntimeError):
    """Some rank could not do its part; says which one and why. Raised on all ranks."""


class Circle:
    """The ranks of a group. None = all ranks, over the group of the training."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, function: Callable[[], T]) -> list[T]:
        """Call the function on every rank and return all results (JSON values), in the order of the ranks.

        An OSError or a CheckpointError on any of them is a CircleError on all. Any other exception is a fault of the
        program: the rank that has it raises it, and the others miss that rank.
        """
        outcome: dict[str, Any]
        try:
            outcome = {"value": function()}
        except (OSError, CheckpointError) as error:
            outcome = {"error": str(error)}
        outcomes = self._exchange(outcome)
        if reasons := [f"rank {rank}: {other['error']}" for rank, other in enumerate(outcomes) if "error" in other]:
            raise CircleError("; ".join(reasons))
        return [other["value"] for other in outcomes]

    def from_first(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 and return its result (a JSON value) on every rank; errors as in `gather`."""
        first: T = self.gather(function if self.rank == 0 else _nothing)[0]
        return first

    def _exchange(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(outcome).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=self._group)
        longest = max(int(size) for size in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, own, group=self._group)
        return [json.loads(bytes(text[: int(size)].tolist()).decode()) for size, text in zip(sizes, texts, strict=True)]


def _nothing() -> Any:
    return None
