"""Who takes part: the nodes of a run as the head knows them, and with which of them an attempt may start. Pure.

A run of a fixed size starts with all of its nodes. An elastic one (`--nodes MIN:MAX`) goes on with those that are
there, after a short wait for one whose agent is being replaced; node 0, whose agent is the head, is always one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SILENCE_S = 12.0
"""An agent that says nothing for this long is lost (they say something every second, the head agent too)."""
RETURN_S = 3.0
"""How long others wait for a lost node: if only its agent was killed, another takes its place in milliseconds."""
FROZEN_S = 3.0
"""After a gap like this between two of our own looks, which come at least every second, we were stopped ourselves,
perhaps with all the others (a suspended job)."""
FIRST_S = 30.0
"""At the beginning of an elastic run: how long those that are there wait for the others."""
_NAMED = 4
"""So many ranks are named; of more than that, how many."""


@dataclass
class Node:
    """One node of the plan."""

    host: str = "?"
    joined: bool = False
    ready: bool = False
    """It has no workers (any more), and waits for orders."""
    heard_at_s: float = -math.inf
    done: dict[int, int] | None = None
    """The exit codes of its workers by rank, once all have ended by themselves."""


@dataclass
class Members:
    """The nodes of a run, and those of the newest attempt."""

    nodes: dict[int, Node]
    workers_per_node: int = 1
    minimum: int | None = None
    """With how few of them the run goes on. None: it needs all."""
    present: int | None = None
    """How many can come at all, where that is known: an allocation may have fewer than was asked for."""
    taking_part: tuple[int, ...] = ()
    """In the newest attempt, in the order of their ranks. Empty before the first: all."""

    @classmethod
    def of(cls, node_count: int, hosts: Mapping[int, str], **fields: Any) -> Members:
        """Nobody has joined yet."""
        return cls({index: Node(host=hosts.get(index, "?")) for index in range(node_count)}, **fields)

    @property
    def attempt(self) -> tuple[int, ...]:
        """The nodes of the newest attempt, in the order of their ranks."""
        return self.taking_part or tuple(self.nodes)

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer."""
        return self.minimum is not None

    @property
    def of_attempt(self) -> list[Node]:
        """What is known of the nodes of the newest attempt."""
        return [self.nodes[index] for index in self.attempt]

    @property
    def newcomers(self) -> list[int]:
        """Nodes that are ready, and not in the newest attempt."""
        return [index for index, node in self.nodes.items() if node.ready and index not in self.attempt]

    def expected(self) -> list[int]:
        """Nodes that can come at all."""
        return [index for index in self.nodes if self.present is None or index < self.present]

    def missing(self) -> dict[int, str]:
        """Hosts of those that can come and are not ready, by node."""
        return {index: self.nodes[index].host for index in self.expected() if not self.nodes[index].ready}

    @property
    def enough(self) -> bool:
        """Whether as many are there as an attempt needs, ready or not."""
        there = [index for index in self.expected() if self.nodes[index].joined]
        return 0 in there and len(there) >= (len(self.nodes) if self.minimum is None else self.minimum)

    def to_start(self, now_s: float, *, waited_s: float, first: bool) -> tuple[int, ...] | None:
        """The nodes with which an attempt may start now; None: not yet.

        waited_s: since the head began to wait. first: it has not started anything yet.
        """
        ready = tuple(index for index, node in self.nodes.items() if node.ready)
        missing = self.missing()
        if not missing:
            return ready
        if self.minimum is None or 0 not in ready or len(ready) < self.minimum:
            return None
        if any(self.nodes[index].joined for index in missing):
            return None  # its workers are being killed: it is ready in a moment, or it is lost
        if first:
            return ready if waited_s >= FIRST_S else None
        return ready if all(now_s - self.nodes[index].heard_at_s >= RETURN_S for index in missing) else None

    def frozen(self, gap_s: float) -> None:
        """We were stopped ourselves for so long, perhaps with all the others: that was nobody's silence."""
        for node in self.nodes.values():
            node.heard_at_s += gap_s

    def start(self, nodes: Sequence[int]) -> None:
        """An attempt begins with these nodes."""
        self.taking_part = tuple(nodes)
        for node in self.nodes.values():
            node.done = None
        for index in nodes:
            self.nodes[index].ready = False

    def node_of(self, rank: int) -> int:
        """On which node a rank of the newest attempt runs."""
        return self.attempt[rank // self.workers_per_node]

    def named(self, ranks: Sequence[int]) -> str:
        """`rank 5 on node 1 (n2), rank 6 on node 1 (n2) and 3 more`."""
        names = [f"rank {rank} on node {self.node_of(rank)} ({self.host(rank)})" for rank in ranks[:_NAMED]]
        return ", ".join(names) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")

    def host(self, rank: int) -> str:
        """Of the node of a rank."""
        return self.nodes[self.node_of(rank)].host

    @property
    def ranks(self) -> range:
        """Of the newest attempt."""
        return range(len(self.attempt) * self.workers_per_node)


def listed(nodes: Mapping[int, str]) -> str:
    """`node 1 (n2), node 3 (n4)`."""
    return ", ".join(f"node {index} ({host})" for index, host in nodes.items())
