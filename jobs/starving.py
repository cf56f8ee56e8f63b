"""Whether a training waits for its samples, and what to do about it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from jobs.feed import Feed
from jobs.world import World
from launcher.wording import count

THRESHOLD = 0.1
"""Share of the training time that is worth a word."""
LEAST_S = 1.0
"""A training that has waited less than this in all is not worth changing."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a rank loads its samples with."""

    loader_workers: int
    cpus: int
    """CPUs that the ranks of this node may use."""
    ranks: int
    """On this node."""
    threads: int
    """CPUs that a rank computes on: its threads; on a GPU the one that gives it its work."""

    @classmethod
    def here(cls, loader_workers: int, world: World, device: torch.device) -> Means:
        """Of this rank."""
        return cls(
            loader_workers=loader_workers,
            cpus=len(os.sched_getaffinity(os.getppid())),  # the agent's: a rank may have been given some of them alone
            ranks=world.local_size,
            threads=torch.get_num_threads() if device.type == "cpu" else 1,
        )


def advice(wait_s: float, train_s: float, means: Means) -> str:
    """`input-bound 38 %: try data.loader_workers=4`; empty where there is nothing to gain.

    wait_s: how long the steps of a training of train_s have waited for their batches.
    """
    share = min(1.0, wait_s / max(train_s, 1e-9))
    if share < THRESHOLD or wait_s < LEAST_S:
        return ""
    now = means.loader_workers
    spare = means.cpus // means.ranks - means.threads
    # So many processes make a batch in the time that a step takes without waiting; one more, since times vary.
    enough = math.ceil((now or share) / max(0.01, 1.0 - share) - 1e-6) + 1
    wanted = min(enough, spare)
    head = f"input-bound {100 * share:.0f} %"
    if wanted > now:
        return f"{head}: try data.loader_workers={wanted}"
    busy = f"the {count(means.cpus, 'CPU')} of {count(means.ranks, 'rank')} are all in use"
    if now == 0:
        return f"{head}: {busy}; data.loader_workers=1 helps where samples wait for a disk, else make them cheaper"
    return (
        f"{head} with data.loader_workers={now}: {busy}; more of them help where samples wait for a disk, "
        "else make samples cheaper, or give each rank more CPUs"
    )


class Starving:
    """Watches how long the steps of one rank wait for their samples."""

    def __init__(self, feed: Feed, means: Means) -> None:
        self._feed, self._means = feed, means
        self._is_said = False

    def news(self, train_s: float) -> str:
        """The advice, the first time that there is one; else empty. train_s: how long has been trained so far."""
        text = "" if self._is_said else advice(self._feed.wait_s, train_s, self._means)
        self._is_said |= bool(text)
        return text

    def to_record(self, train_s: float) -> dict[str, Any]:
        """For the summary of an attempt."""
        wait_s = self._feed.wait_s
        return {"wait_s": round(wait_s, 3), "advice": advice(wait_s, train_s, self._means)}
