"""The workers of a node that outlive a peer: what they hold, and who of them is to keep it. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.agent import proc
from launcher.agent.control import ControlSocket, Message
from launcher.agent.loop import Loop
from launcher.agent.rescue import ANSWER_S, HOLDS_S, KEEP_S


class Survivors:
    """Speaks with the workers of one node about rescues, and about it with the head agent (`on_message`).

    `disk` is the folder of the run's checkpoints, for what shall not stay in memory, or cannot.
    """

    def __init__(self, loop: Loop, *, disk: str) -> None:
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_peer_lost: Callable[[int, str, int | None], None] = lambda rank, message, step: None
        self._loop, self._disk = loop, disk
        self._attempt = 0
        self._memory: str | None = None
        self._sockets: dict[int, ControlSocket] = {}
        self._report: _Report | None = None

    def begin(self, attempt: int, memory: str | None) -> None:
        """A new attempt, which keeps its states in this folder."""
        self._attempt, self._memory, self._report = attempt, memory, None
        for control in self._sockets.values():
            control.close()
        self._sockets = {}

    def add(self, rank: int) -> int:
        """A worker that is about to start; returns the descriptor that it gets."""
        control = ControlSocket(self._loop, lambda message: self._hear(rank, message))
        self._sockets[rank] = control
        return control.worker_fd

    def ended(self, rank: int) -> None:
        """A worker has ended: what it still said is heard first."""
        if rank in self._sockets:
            self._sockets[rank].close()
            del self._sockets[rank]
        if self._report is not None:
            self._report.gone(rank)

    def report(self, attempt: int, pids: Mapping[int, int]) -> None:
        """Ask the living workers (their pids by rank) what they hold, and tell the head agent."""
        asked = self._sockets.keys() & pids.keys() if attempt == self._attempt else set()
        for rank in asked:
            self._sockets[rank].send({"order": "report"})
        # One that is stopped would not answer.
        expected = {rank for rank in asked if not proc.is_stopped(pids[rank])}
        report = _Report(expected, lambda steps: self._tell_holds(attempt, steps))
        self._report = report
        self._loop.after(ANSWER_S, report.expire)

    def keep(self, attempt: int, rank: int, *, to_disk: bool = False) -> None:
        """Have one worker write its state."""
        if attempt != self._attempt or rank not in self._sockets:
            self._tell_kept(attempt, rank, error="it has ended")
            return
        folder = self._disk if to_disk or self._memory is None else self._memory
        self._sockets[rank].send({"order": "keep", "folder": folder})

    def keep_alone(self, attempt: int, pids: Mapping[int, int]) -> int | None:
        """Nobody is there to ask: have the newest state kept in memory here. Returns its step; None: there is none.

        The next attempt finds it, whenever the head agent is back, as long as this node stays.
        """
        told: list[Message] = []

        def answer(kind: str) -> Message | None:
            return next((message for message in told if message["type"] == kind), None)

        others, self.on_message = self.on_message, told.append
        try:
            self.report(attempt, pids)
            self._loop.run_until(lambda: answer("holds") is not None, timeout_s=HOLDS_S)
            held = (answer("holds") or {"steps": {}})["steps"]
            steps = {int(rank): step for rank, step in held.items() if step is not None}
            if not steps:
                return None
            rank = max(steps, key=lambda each: (steps[each], -each))
            self.keep(attempt, rank)
            self._loop.run_until(lambda: answer("kept") is not None, timeout_s=KEEP_S)
            kept = answer("kept")
            return steps[rank] if kept is not None and "error" not in kept else None
        finally:
            self.on_message = others

    def _hear(self, rank: int, message: Message) -> None:
        if "holds" in message:
            if self._report is not None:
                self._report.holds(rank, message["holds"])
        elif "kept" in message:
            self._tell_kept(self._attempt, rank, name=message["kept"])
        elif "not_kept" in message:
            self._tell_kept(self._attempt, rank, error=message["not_kept"])
        elif "peer_lost" in message:
            self.on_peer_lost(rank, message["peer_lost"], message.get("step"))
        elif "saved" in message:
            self.on_message({"type": "saved", "attempt": self._attempt, "step": message["saved"]})

    def _tell_holds(self, attempt: int, steps: Mapping[int, int | None]) -> None:
        by_rank = {str(rank): step for rank, step in steps.items()}
        self.on_message({"type": "holds", "attempt": attempt, "steps": by_rank})

    def _tell_kept(self, attempt: int, rank: int, **how: Any) -> None:
        self.on_message({"type": "kept", "attempt": attempt, "rank": rank, **how})


class _Report:
    """What the living workers of a node hold: complete when each has answered, has ended, or the time is over."""

    def __init__(self, ranks: set[int], tell: Callable[[Mapping[int, int | None]], None]) -> None:
        self._missing, self._tell, self._told = set(ranks), tell, False
        self._steps: dict[int, int | None] = {}
        self._look()

    def holds(self, rank: int, step: int | None) -> None:
        """A worker has answered."""
        if rank in self._missing:
            self._steps[rank] = step
            self._missing.discard(rank)
            self._look()

    def gone(self, rank: int) -> None:
        """A worker has ended, before or after its answer."""
        self._steps.pop(rank, None)
        self._missing.discard(rank)
        self._look()

    def expire(self) -> None:
        """No more waiting."""
        self._missing.clear()
        self._look()

    def _look(self) -> None:
        if not self._missing and not self._told:
            self._told = True
            self._tell(self._steps)
