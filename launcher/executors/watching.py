"""What the watcher of a run on machines does about what it sees: which nodes are replaced, when all of them end, and
how the run has ended where no head agent could say it. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.agent.causes import STOPPED_EXIT_CODE
from launcher.agent.effects import Finish
from launcher.executors.places import NodeState
from launcher.runs.events import Event
from launcher.runs.states import Cause, RunState, is_signal
from launcher.runs.times import newest_submission
from launcher.wording import count, first_line, signal_name

BACKSTOP_S = 3.0
"""Beyond the grace time: what has not ended by then is killed."""
SILENT_S = 5.0
"""How long after that a machine that does not answer is waited for."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Replace:
    """Start another agent for a node that was killed."""

    node: int
    state: NodeState


@dataclass(frozen=True)
class Signal:
    """Pass a signal on to the agents of these nodes."""

    nodes: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Lost:
    """A node has ended and is not replaced."""

    node: int
    state: NodeState


Action = Replace | Signal | Lost


@dataclass(kw_only=True)
class Watching:
    """The nodes of one run. Times are of its clock."""

    nodes: tuple[int, ...]
    max_replaced: int
    """How many nodes are replaced in all: as many as restarts, and one more."""
    grace_s: float
    least: int | None = None
    """With how few nodes the run goes on; None: all."""
    replaced: int = 0
    stop_signum: int = 0
    """Of the first request to stop; 0: there was none."""
    ended: dict[int, NodeState] = field(default_factory=dict)
    lost: tuple[int, NodeState] | None = None
    """The first node that has ended badly and was not replaced."""
    silent: set[int] = field(default_factory=set)
    """Nodes whose machines did not answer when all others had ended."""
    _stop_by_s: float | None = None
    _over: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more."""
        return len(self.ended) == len(self.nodes)

    @property
    def is_stopping(self) -> bool:
        """Whether no node is replaced any more."""
        return self._stop_by_s is not None

    def stop(self, signum: int, now_s: float) -> list[Action]:
        """Somebody asks to stop: the first time the run saves and leaves, the agents count."""
        self.stop_signum = self.stop_signum or signum
        self._end_within(self.grace_s + BACKSTOP_S, now_s)
        return [Signal(self._left(), signum)]

    def look(
        self, states: Mapping[int, NodeState], *, has_result: bool, stop_asked: bool = False, now_s: float
    ) -> list[Action]:
        """What follows from what the nodes are now.

        has_result: the head agent has said how the run has ended. stop_asked: somebody has told an agent to stop.
        """
        if stop_asked and not self.is_stopping:
            self._end_within(self.grace_s + BACKSTOP_S, now_s)
        if has_result and not self._over:
            self._over = True
            self._end_within(BACKSTOP_S, now_s)
        actions: list[Action] = []
        for node, state in states.items():
            if state.alive is False and node not in self.ended:
                actions += self._has_ended(node, state, now_s)
        if self._stop_by_s is not None and now_s > self._stop_by_s + SILENT_S:
            # Nobody waits for a machine that does not answer: an agent there finds no head, and ends by itself.
            silent = {node: state for node, state in states.items() if state.alive is None}
            self.ended |= silent
            self.silent |= silent.keys()
        if self._stop_by_s is not None and now_s > self._stop_by_s and self._left():
            actions.append(Signal(self._left(), signal.SIGKILL))
        return actions

    def _has_ended(self, node: int, state: NodeState, now_s: float) -> list[Action]:
        if state.killed and not self.is_stopping and self.replaced < self.max_replaced:
            self.replaced += 1
            return [Replace(node, state)]
        self.ended[node] = state
        if self._over:
            return []
        if state.exit_code == 0:
            if node == 0:  # the head agent has left: nobody tells the others anything any more
                self._end_within(BACKSTOP_S, now_s)
            return []
        if self.lost is None and not self.is_stopping:
            self.lost = node, state
        if self.is_stopping and node:
            return [Lost(node, state)]  # the head agent has another node save what it holds, and ends the run
        if self.least is not None and node and len(self.nodes) - len(self.ended) >= self.least and not state.killed:
            return [Lost(node, state)]  # it goes on without this one
        self._end_within(self.grace_s + BACKSTOP_S if node else BACKSTOP_S, now_s)
        return [Lost(node, state), *([Signal(left, signal.SIGTERM)] if (left := self._left()) else [])]

    def _left(self) -> tuple[int, ...]:
        return tuple(node for node in self.nodes if node not in self.ended)

    def _end_within(self, limit_s: float, now_s: float) -> None:
        by_s = now_s + limit_s
        self._stop_by_s = by_s if self._stop_by_s is None else min(by_s, self._stop_by_s)


def earlier(events: Sequence[Event]) -> int:
    """How many nodes were replaced since the launch or the newest resume, by a watcher that is gone."""
    since = newest_submission(events) or events
    return sum(event["event"] == "node_replaced" for event in since)


def finish_of(events: Sequence[Event], watching: Watching, hosts: Mapping[int, str], words: str) -> Finish:
    """How a run has ended of which no head agent could say it. words: the last ones of the node that ended badly."""
    since = newest_submission(events) or events
    failed = next((event for event in since if event["event"] == "node_failed"), None)
    if failed is not None:
        known = str(failed.get("cause"))
        cause = Cause(known) if known in set(Cause) else Cause.RENDEZVOUS
        reason = f"node {failed.get('node')} ({failed.get('host')}): {failed.get('message')}"
        return Finish(RunState.FAILED, cause, _int(failed.get("exit_code"), 1), reason)
    if watching.stop_signum:
        reason = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP"}.get(
            signal.Signals(watching.stop_signum), signal_name(watching.stop_signum)
        )
        return Finish(RunState.CANCELLED, Cause.CANCELLED, 128 + watching.stop_signum, reason)
    if watching.lost is None:
        reason = "its agents have ended, and none has said how the run did"
        return Finish(RunState.FAILED, Cause.INTERNAL, 70, reason)
    node, state = watching.lost
    code = 1 if state.exit_code is None else state.exit_code
    where = f"node {node} ({hosts.get(node) or '?'})"
    if is_signal(code) and code - 128 in _STOPS:
        reason = f"{signal_name(code - 128)} to {where}, before it had begun"
        return Finish(RunState.CANCELLED, Cause.CANCELLED, code, reason)
    if state.killed:
        times = f", after {count(watching.replaced, 'replacement')}" if watching.replaced else ""
        return Finish(RunState.FAILED, Cause.NODE_LOST, 1, f"{where} was lost: {state.detail}{times}")
    last = first_line("\n".join(reversed(words.splitlines())))
    said = f": {last}" if last else ""
    return Finish(RunState.FAILED, Cause.INTERNAL, code, f"{where}: {state.detail or f'it ended with {code}'}{said}")


def saved_exit_code(events: Sequence[Event]) -> int | None:
    """75 where the newest attempt has saved a checkpoint after it was asked to stop."""
    asked = [index for index, event in enumerate(events) if event["event"] == "stop_requested"]
    saved = asked and any(event["event"] == "checkpoint_saved" for event in events[asked[-1] :])
    return STOPPED_EXIT_CODE if saved else None


def _int(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default
