"""Which rank the others wait for, step after step: by the time that its own work takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from launcher.agent.clocks import Clock

WINDOW_S = 3.0
"""Own times are compared over windows at least so long,"""
WINDOW_STEPS = 5
"""with at least so many steps of every rank in them."""
IN_A_ROW = 3
"""So many windows in a row make a straggler: one slow window is a garbage collection, or somebody else's program."""
FACTOR = 1.5
"""Its own work takes so many times as long as the median of the others',"""
LEAST_MS = 5.0
"""and so much longer: below that it is noise, and nobody would notice."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    own_ms: float
    """Its own work per step, over the last windows."""
    others_ms: float
    """The median of the others'."""


@dataclass(kw_only=True)
class Stragglers:
    """Of one attempt. Each rank is named once."""

    begun_s: float
    _at_begin: dict[int, Clock] = field(default_factory=dict)
    _slow: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Own and others' time in each of the windows in a row in which a rank was slow."""
    _named: set[int] = field(default_factory=set)

    def look(self, clocks: Mapping[int, Clock], now_s: float) -> list[Straggler]:
        """Those that are found now. `clocks`: the newest of every rank that runs."""
        if now_s - self.begun_s < WINDOW_S or len(clocks) < 2:
            return []
        if self._at_begin.keys() != clocks.keys():
            self._begin(clocks, now_s)
            return []
        steps = {rank: clock.own_steps - self._at_begin[rank].own_steps for rank, clock in clocks.items()}
        if min(steps.values()) < WINDOW_STEPS:
            return []
        own = {rank: (clock.own_ms - self._at_begin[rank].own_ms) / steps[rank] for rank, clock in clocks.items()}
        self._begin(clocks, now_s)
        return [found for rank in own if (found := self._judge(rank, own)) is not None]

    def _begin(self, clocks: Mapping[int, Clock], now_s: float) -> None:
        self.begun_s, self._at_begin = now_s, dict(clocks)

    def _judge(self, rank: int, own: Mapping[int, float]) -> Straggler | None:
        others_ms = median(time_ms for other, time_ms in own.items() if other != rank)
        if own[rank] <= FACTOR * others_ms or own[rank] - others_ms <= LEAST_MS:
            self._slow.pop(rank, None)
            return None
        windows = self._slow.setdefault(rank, [])
        windows.append((own[rank], others_ms))
        if len(windows) < IN_A_ROW or rank in self._named:
            return None
        self._named.add(rank)
        means = [sum(each) / len(each) for each in zip(*windows, strict=True)]
        return Straggler(rank=rank, own_ms=means[0], others_ms=means[1])
