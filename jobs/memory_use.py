"""How much memory this rank has in use, and whether it grows without end.

On a GPU it is what torch has taken of the device; on a CPU the resident memory of the process, with the pages that it
shares with the process it was forked from (torch itself: some 200 MiB).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from launcher.wording import size

SAMPLES = 12
"""So many times in a row memory has to grow to be called growing."""
STEADY = 0.75
"""Share of them in which it was more than before; it was never less."""
LEAST_BYTES = 32 << 20
LEAST_SHARE = 0.02
"""Growth that is worth a word: of what was there, and in bytes."""
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class Use:
    """In bytes."""

    now: int
    """Of tensors on a GPU; resident on a CPU."""
    peak: int
    """The most that it has been."""
    reserved: int | None = None
    """What torch holds of a GPU for tensors, in use or not, at its peak; None on a CPU."""

    def to_record(self) -> dict[str, int]:
        """By the names that the summary has, and the metrics with `memory/` before them."""
        values = {"used_bytes": self.now, "peak_bytes": self.peak}
        return values if self.reserved is None else {**values, "reserved_bytes": self.reserved}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory that has grown steadily."""

    from_step: int
    to_step: int
    from_bytes: int
    to_bytes: int

    @property
    def per_step_bytes(self) -> int:
        """In the mean."""
        return (self.to_bytes - self.from_bytes) // (self.to_step - self.from_step)

    def sentence(self) -> str:
        """For people."""
        return (
            f"memory grows steadily: {size(self.from_bytes)} at step {self.from_step:,}, {size(self.to_bytes)} at step "
            f"{self.to_step:,}, {size(self.per_step_bytes)} per step; something is kept from step to step"
        )


class MemoryUse:
    """Of one rank, looked at every so many steps."""

    def __init__(self, device: torch.device, *, measure: Callable[[], Use] | None = None) -> None:
        self._measure = measure or (lambda: measure_use(device))
        self._seen: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self._is_told = False
        self.growth: Growth | None = None
        """What `look` has found now; it finds it once."""

    def look(self, step: int) -> Use:
        """After a step, which is complete: what is in use is kept."""
        use = self._measure()
        self._seen.append((step, use.now))
        self.growth = None if self._is_told else grows(list(self._seen))
        self._is_told |= self.growth is not None
        return use


def measure_use(device: torch.device) -> Use:
    """Now. Counters of torch, or one small file of the kernel: no wait for the device."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return Use(
            now=stats["allocated_bytes.all.current"],
            peak=stats["allocated_bytes.all.peak"],
            reserved=stats["reserved_bytes.all.peak"],
        )
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    resident, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return Use(now=resident, peak=max(peak, resident))


def grows(seen: list[tuple[int, int]]) -> Growth | None:
    """Whether memory grows steadily, by pairs of step and bytes in use. Pure."""
    if len(seen) < SAMPLES:
        return None
    changes = [other - one for (_, one), (_, other) in pairwise(seen)]
    (from_step, before), (to_step, after) = seen[0], seen[-1]
    is_steady = min(changes) >= 0 and sum(change > 0 for change in changes) >= STEADY * len(changes)
    if not is_steady or after - before < max(LEAST_BYTES, LEAST_SHARE * before):
        return None
    return Growth(from_step=from_step, to_step=to_step, from_bytes=before, to_bytes=after)
