"""Whether a run gets on, seen from outside its workers: their clocks in, verdicts out. Pure.

A rank that is frozen, or busy without letting go of the interpreter, cannot watch itself; and the others, which wait
for it, stand still as well. So a run hangs once no rank has marked anything for longer than the limit of what they are
at. Then all ranks are asked where they are, and whoever does not wait for the others is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.agent.causes import Failure
from launcher.agent.clocks import Clock
from launcher.agent.culprits import Finding, Place, find_culprits, located
from launcher.agent.effects import Effect, Record, Say, Send
from launcher.agent.members import FROZEN_S
from launcher.agent.patience import Limits, Patience
from launcher.agent.stragglers import Stragglers
from launcher.runs.clock import Phase
from launcher.runs.stacks import Frame
from launcher.runs.stalls import straggler_text
from launcher.runs.states import Cause
from launcher.wording import count, duration, ranges

ANSWER_S = 4.0
"""How long the agents have to say where their workers are; less where all have said it."""
HANG = "hang"
"""Stands for the class of an exception in the failure: the same hang at the same step and place is a repeated one."""
_SAME_S = 0.5
"""A mark whose age was told twice may seem to have moved by so much, by the time that the messages took."""
_NAMED = 3
"""So many culprits are named with their places."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Where a rank of the attempt runs."""

    node: int
    host: str
    log: str
    """Of its output, relative to the run directory."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """No progress for longer than the limit."""

    phase: Phase
    step: int | None
    waited_s: float
    limit_s: float
    how: str
    """Where the limit comes from."""


@dataclass(kw_only=True)
class _Hang:
    """One that is being looked into, or that was said."""

    stall: Stall
    since_s: float
    """When the last progress was made."""
    asked_s: float | None = None
    said_s: float | None = None
    """How long it had lasted when it was said last."""
    awaited: set[int] = field(default_factory=set)
    """Nodes that have not answered."""


@dataclass(kw_only=True)
class Watch:
    """Of one run; `begin` for each attempt. Times are of the head agent's clock."""

    limits: Limits
    shown: Callable[[str], str] = lambda place: place
    """A place as it is shown: without the folder that the code is in."""
    trace: str = ""
    """Where NCCL's flight recorder leaves its traces, where there is one."""
    attempt: int = 0
    mismatched: bool = False
    """The ranks wait in different collectives: what they have exchanged lately may be of different steps."""
    places: dict[int, Place] = field(default_factory=dict)
    """Where each rank was when it was asked last."""
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _clocks: dict[int, Clock] = field(default_factory=dict)
    _heard_s: dict[int, float] = field(default_factory=dict)
    _since_s: float = 0.0
    """Nothing before this counts as standing still."""
    _looked_s: float = 0.0
    _hang: _Hang | None = None
    _patience: Patience = field(init=False)
    _stragglers: Stragglers = field(default_factory=lambda: Stragglers(begun_s=0.0))

    def __post_init__(self) -> None:
        self._patience = Patience(limits=self.limits)

    def begin(self, attempt: int, ranks: Mapping[int, Rank], now_s: float) -> None:
        """An attempt has started."""
        self.attempt, self._ranks = attempt, dict(ranks)
        self._since_s = self._looked_s = now_s
        self._hang, self.mismatched = None, False
        self._stragglers = Stragglers(begun_s=now_s)
        self._patience = Patience(limits=self.limits)
        self._clocks, self._heard_s, self.places = {}, {}, {}

    def hear(self, node: int, attempt: int, clocks: Mapping[str, Sequence[Any]], now_s: float) -> None:
        """What an agent says of its workers, with a heartbeat. Of those that have ended it says nothing."""
        if attempt != self.attempt:
            return
        for rank in [rank for rank in self._clocks if self._ranks[rank].node == node and str(rank) not in clocks]:
            del self._clocks[rank], self._heard_s[rank]
        for key, message in clocks.items():
            if (rank := int(key)) in self._ranks:
                self._clocks[rank], self._heard_s[rank] = Clock.from_message(message), now_s
                self._patience.take(rank, self._clocks[rank])

    def answer(self, node: int, attempt: int, ranks: Mapping[str, Mapping[str, Any]]) -> None:
        """Where the workers of a node are."""
        if attempt != self.attempt:
            return
        for key, said in ranks.items():
            clock = self._clocks.get(int(key))
            self.places[int(key)] = Place(
                step=clock.step if clock else None,
                frames=tuple(Frame(function=name, file=file, line=line) for name, file, line in said["frames"]),
                line=said["line"],
                state=said["state"],
                trouble=said["trouble"],
            )
        if self._hang is not None:
            self._hang.awaited.discard(node)

    def tick(self, now_s: float) -> tuple[list[Effect], Failure | None]:
        """Look, while the attempt runs. A failure ends the attempt."""
        if now_s - self._looked_s > FROZEN_S:
            self._since_s = now_s
        self._looked_s = now_s
        slow = list(self._name_stragglers(now_s))
        if not self.limits.watches or not self._clocks:
            return slow, None
        told, failure = self._look(now_s)
        return [*slow, *told], failure

    def _look(self, now_s: float) -> tuple[list[Effect], Failure | None]:
        stall, hang = self._stall(now_s), self._hang
        if hang is None:
            if stall is None:
                return [], None
            self._hang = hang = _Hang(stall=stall, since_s=self._progress_s(now_s))
            return self._ask(hang, now_s), None
        if self._progress_s(now_s) > hang.since_s + _SAME_S:
            return list(self._goes_on(hang, now_s)), None
        if hang.asked_s is None:
            waited_s = now_s - hang.since_s
            again = stall is not None and hang.said_s is not None and waited_s > 2 * hang.said_s
            return self._ask(hang, now_s) if again else [], None
        if hang.awaited and now_s - hang.asked_s < ANSWER_S:
            return [], None
        return self._judge(hang, now_s)

    def found(self, ranks: Sequence[int]) -> str:
        """Where some ranks were when they were asked, to follow their names; empty where they have not said it."""
        known = [rank for rank in ranks[:_NAMED] if rank in self.places and self.places[rank].where]
        return "; ".join(f"{'it' if len(ranks) == 1 else f'rank {rank}'} {self._words(rank)}" for rank in known)

    # ---------------------------------------------------------------- hangs

    def _marking(self) -> dict[int, Clock]:
        """The clocks that count: those that were ever marked; of a script without a step clock, when it printed."""
        marked = {rank: clock for rank, clock in self._clocks.items() if clock.phase is not Phase.NOTHING}
        return marked or self._clocks

    def _progress_s(self, now_s: float) -> float:
        """When a rank has got on last."""
        last_s = max(self._heard_s[rank] - clock.age_s for rank, clock in self._marking().items())
        return min(now_s, max(last_s, self._since_s))

    def _stall(self, now_s: float) -> Stall | None:
        clocks = self._marking()
        limits = [(self._patience.limit(clock.phase, is_silent=clock.is_silent), clock) for clock in clocks.values()]
        if any(limit is None for limit, _ in limits):
            return None
        (limit_s, how), slowest = max(
            ((limit, clock) for limit, clock in limits if limit is not None), key=lambda each: each[0][0]
        )
        # As of the oldest report: what a rank does between two of them is not known, and one that gives none is lost.
        waited_s = min(self._heard_s[rank] for rank in clocks) - self._progress_s(now_s)
        if waited_s <= limit_s:
            return None
        has_steps = slowest.phase is not Phase.NOTHING
        step = max(clock.step for clock in clocks.values()) if has_steps else None
        return Stall(phase=slowest.phase, step=step, waited_s=waited_s, limit_s=limit_s, how=how)

    def _ask(self, hang: _Hang, now_s: float) -> list[Effect]:
        hang.asked_s, hang.awaited = now_s, {self._ranks[rank].node for rank in self._clocks}
        self.places.clear()
        orders = [Send({"type": "stacks", "attempt": self.attempt}, node) for node in sorted(hang.awaited)]
        return [Record("stacks_requested", {"attempt": self.attempt}), *orders]

    def _goes_on(self, hang: _Hang, now_s: float) -> Iterator[Effect]:
        """Progress again."""
        self._hang = None
        if hang.said_s is not None:
            waited_s = round(self._progress_s(now_s) - hang.since_s, 1)
            step = max(clock.step for clock in self._clocks.values())
            yield Record("hang_over", {"attempt": self.attempt, "step": step, "waited_s": waited_s})
            yield Say(f"it goes on, after {duration(waited_s)} without progress")

    def _judge(self, hang: _Hang, now_s: float) -> tuple[list[Effect], Failure | None]:
        """All have answered, or had the time to."""
        hang.asked_s = None
        hang.said_s = waited_s = now_s - hang.since_s
        stall = hang.stall
        places = {rank: self.places.get(rank) or self._silent(rank) for rank in self._clocks}
        found = find_culprits(places)
        self.mismatched = found.mismatched
        has_clock = stall.phase is not Phase.NOTHING
        restarts = self.limits.restarts or (self.limits.restarts_with_clock and has_clock)
        action = "restart" if restarts else "report"
        sentence = f"{self._standing(stall, waited_s)}: {self._blame(found, places)}"
        if self.trace:
            sentence += f"; where NCCL has timed out too, its flight recorder: {self.trace}"
        fields = {
            "attempt": self.attempt,
            "phase": stall.phase.name.lower(),
            "step": stall.step,
            "waited_s": round(waited_s, 1),
            "limit_s": round(stall.limit_s, 1),
            "limit": stall.how,
            "culprits": [{**self._where(rank), "place": self._words(rank, places)} for rank in found.culprits],
            "waiting": {"place": self.shown(found.waiting_at), "ranks": list(found.waiting)},
            "action": action,
            "message": sentence,
        }
        effects: list[Effect] = [Record("hang", fields)]
        if not restarts:
            logs = f"logs/attempt-{self.attempt}/node-*/rank-*.log"
            told = f"hang: {sentence}; the stacks of all ranks are in {logs}; nothing is restarted (faults.on_hang)"
            return [*effects, Say(told)], None
        return effects, self._failure(found, places, sentence, stall)

    def _failure(self, found: Finding, places: Mapping[int, Place], sentence: str, stall: Stall) -> Failure:
        rank = (found.culprits or found.waiting or tuple(sorted(places)))[0]
        at = self._ranks[rank]
        own = places[rank].frames[-1:]
        return Failure(
            attempt=self.attempt,
            node=at.node,
            rank=rank,
            pid=-1,
            exit_code=1,
            cause=Cause.HANG,
            message=sentence,
            place=str(own[0]) if own else "",
            log=at.log,
            exception=HANG,
            step=None if stall.phase is Phase.NOTHING else stall.step,
        )

    def _silent(self, rank: int) -> Place:
        step = self._clocks[rank].step
        return Place(step=step, trouble=f"its agent has not answered within {ANSWER_S:g} s")

    # ---------------------------------------------------------------- words

    def _standing(self, stall: Stall, waited_s: float) -> str:
        what = (
            "no step" if stall.phase is Phase.STEP else "no output" if stall.phase is Phase.NOTHING else "no progress"
        )
        at = {Phase.START: " before the first step", Phase.EVAL: " in an evaluation", Phase.SAVE: " in a save"}
        step = "" if stall.step is None or stall.phase is Phase.START else f" at step {stall.step:,}"
        limit = f"(limit {duration(stall.limit_s)}, {stall.how})"
        return f"{what} for {duration(waited_s)} {limit}{at.get(stall.phase, '')}{step}"

    def _blame(self, found: Finding, places: Mapping[int, Place]) -> str:
        parts = []
        if found.culprits:
            shown = found.culprits[:_NAMED]
            named = [f"{self._name(rank)} {self._words(rank, places)}" for rank in shown]
            more = len(found.culprits) - len(shown)
            parts.append(" and ".join(named) + (f" and {more} more" if more > 0 else ""))
        rest = sorted(set(places) - set(found.culprits) - set(found.waiting))
        if found.waiting:
            whole = len(found.waiting) == len(places)
            rest_of = "the other" if len(places) == 2 else count(len(found.waiting), "other")
            who = f"all {count(len(places), 'rank')}" if whole else rest_of
            verb = "wait" if len(found.waiting) > 1 else "waits"
            parts.append(f"{who} {verb} {self.shown(located(found.waiting_at))}")
        if rest:
            parts.append(f"rank{'s' * (len(rest) > 1)} {ranges(rest, ', ')} {self._words(rest[0], places)}")
        return ", ".join(parts) + (f" ({found.note})" if found.note else "")

    def _words(self, rank: int, places: Mapping[int, Place] | None = None) -> str:
        return self.shown((self.places if places is None else places)[rank].words)

    def _name(self, rank: int) -> str:
        at = self._ranks[rank]
        return f"rank {rank} on node {at.node} ({at.host})"

    def _where(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "node": self._ranks[rank].node, "host": self._ranks[rank].host}

    # ---------------------------------------------------------------- stragglers

    def _name_stragglers(self, now_s: float) -> Iterator[Effect]:
        for found in self._stragglers.look(self._clocks, now_s):
            own_ms, others_ms = round(found.own_ms, 1), round(found.others_ms, 1)
            fields = {"attempt": self.attempt, **self._where(found.rank), "own_ms": own_ms, "others_ms": others_ms}
            yield Record("straggler", fields)
            yield Say(f"straggler: {straggler_text(fields)}")


def places_below(*roots: str) -> Callable[[str], str]:
    """A `Watch.shown`: files without these folders in front."""
    cuts = [f"{Path(root)}/" for root in roots if root]

    def shown(text: str) -> str:
        for cut in cuts:
            text = text.replace(cut, "")
        return text

    return shown
