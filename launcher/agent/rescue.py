"""A rescue: before a restart, the newest step that a surviving worker has completed is kept in memory. Pure.

The agents ask their living workers what they hold (`report`, `holds`), the worker with the newest step writes it where
the next attempt finds it (`keep`, `kept`). Each wait ends with what it waits for: who is gone falls out at once, and
who is silent when its time is over. At the end there is an outcome, whatever happened; without one that kept a state
the restart goes on from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.agent.effects import Record, Send
from launcher.agent.members import RETURN_S

ANSWER_S = 2.0
"""How long an agent waits for the answers of its workers: one that is frozen gives none."""
HOLDS_S = ANSWER_S + 1.0
"""How long the head waits for the answer of an agent."""
KEEP_S = 120.0
"""How long writing one state may take."""


@dataclass(kw_only=True)
class Rescue:
    """Of one attempt. Call the methods as things happen, then `advance`."""

    attempt: int
    began_s: float
    to_disk: bool = False
    """What is kept shall outlive the processes of the run, which may not start another attempt. Set it at any time."""
    step: int | None = None
    """The one that was kept."""
    on_disk: bool = False
    """Whether what was kept is there. Else it is in memory."""
    over: bool = False
    _awaited: dict[int, float] = field(default_factory=dict)
    """Nodes that have not said what their workers hold, with until when that is waited for."""
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step and node by rank, of those that have not been asked."""
    _keeping: tuple[int, int, int] | None = None
    """Rank, step and node of the one that was asked."""
    _to_disk_now: bool = False
    """Where it keeps it."""
    _in_memory: tuple[int, int, int] | None = None
    """As `_keeping`, of what was kept in memory before it was wanted on disk."""
    _keep_until_s: float = 0.0
    _problems: list[str] = field(default_factory=list)

    def begin(self, joined: Iterable[int], returning: Mapping[int, float]) -> list[Send]:
        """Ask the nodes that are there. returning: those that are not, with when they were heard for the last time."""
        for node, heard_at_s in returning.items():
            self.left(node, heard_at_s)
        return [send for node in joined for send in self.returned(node, self.began_s)]

    def awaits(self, node: int) -> bool:
        """Whether this node has something to say yet."""
        return node in self._awaited

    def returned(self, node: int, now_s: float) -> list[Send]:
        """A node is there, with its workers: ask it."""
        self._awaited[node] = now_s + HOLDS_S
        return [Send({"type": "report", "attempt": self.attempt}, node)]

    def holds(self, node: int, steps: Mapping[int, int | None]) -> None:
        """What the workers of a node hold; None: nothing that could be kept."""
        if self._awaited.pop(node, None) is not None:
            self._held |= {rank: (step, node) for rank, step in steps.items() if step is not None}

    def kept(self, rank: int, error: str | None) -> None:
        """A rank has written its state, or could not."""
        if self._keeping is None or self._keeping[0] != rank:
            return
        if error is None:
            self.step, self.on_disk = self._keeping[1], self._to_disk_now
        else:
            self._keeping = None
            self._problems.append(f"rank {rank}: {error}")

    def gone(self, rank: int) -> None:
        """A worker has ended."""
        self._held.pop(rank, None)
        if self._keeping is not None and self._keeping[0] == rank and self.step is None:
            self._keeping = None
            self._problems.append(f"rank {rank} ended while it wrote")

    def left(self, node: int, heard_at_s: float | None = None) -> None:
        """A node is lost. Without a time: with its workers; else they may live, if it is back soon after that."""
        self._awaited.pop(node, None)
        if heard_at_s is not None:
            self._awaited[node] = heard_at_s + RETURN_S
        for rank in [rank for rank, (_, its) in self._held.items() if its == node]:
            del self._held[rank]
        if self._keeping is not None and self._keeping[2] == node and self.step is None:
            self._problems.append(f"rank {self._keeping[0]} was lost while it wrote")
            self._keeping = None

    def advance(self, now_s: float) -> list[Send | Record]:
        """What follows; afterwards `over` says whether that was all."""
        if self.over:
            return []
        if self._keeping is not None:
            if self.step is not None and self.to_disk and not self.on_disk:
                self._in_memory, self.step = self._keeping, None
                return [self._order(self._keeping, now_s)]
            if self.step is not None:
                return self._kept(*self._keeping, took_s=round(now_s - self.began_s, 3))
            if now_s < self._keep_until_s:
                return []
            self._problems.append(f"rank {self._keeping[0]} did not write its state within {KEEP_S:g} s")
            self._keeping = None
        for node in [node for node, until_s in self._awaited.items() if now_s >= until_s]:
            del self._awaited[node]
            self._problems.append(f"node {node} did not say what its workers hold")
        return [] if self._awaited else self._ask_the_next(now_s)

    def _ask_the_next(self, now_s: float) -> list[Send | Record]:
        if not self._held and self._in_memory is not None:
            self.step = self._in_memory[1]
            return self._kept(*self._in_memory, took_s=round(now_s - self.began_s, 3))
        if not self._held:
            reason = "; ".join(self._problems) or "no worker is left that has completed a step"
            self.over = True
            return [Record("not_rescued", {"attempt": self.attempt, "reason": reason})]
        rank = min(self._held, key=lambda rank: (-self._held[rank][0], rank))
        step, node = self._held.pop(rank)
        return [self._order((rank, step, node), now_s)]

    def _order(self, keeping: tuple[int, int, int], now_s: float) -> Send:
        self._keeping, self._keep_until_s = keeping, now_s + KEEP_S
        self._to_disk_now = self.to_disk
        rank, _, node = keeping
        order = {"type": "keep", "attempt": self.attempt, "rank": rank}
        return Send({**order, "to_disk": True} if self.to_disk else order, node)

    def _kept(self, rank: int, step: int, node: int, *, took_s: float) -> list[Send | Record]:
        self.over = True
        fields = {"attempt": self.attempt, "step": step, "time_s": took_s}
        effects: list[Send | Record] = [Record("rescued", {**fields, "node": node, "rank": rank})]
        if self.on_disk:
            effects.append(Record("checkpoint_saved", {**fields, "path": f"checkpoints/step-{step}", "best": False}))
        return effects
