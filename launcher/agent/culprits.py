"""For whom the others wait: from the places of all ranks of a run that hangs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.agent.clocks import STATES
from launcher.runs.stacks import Frame, Thread, place_of, waits_for_others


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank is."""

    step: int | None = None
    frames: tuple[Frame, ...] = ()
    """Of its main thread, from the innermost call to the first that is the user's own."""
    line: str = ""
    """The text of the innermost line, where it could be read."""
    state: str = ""
    """A letter of `STATES`."""
    trouble: str = ""
    """Why its stack is not known."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, or in the store."""
        return not self.state and bool(self.frames) and waits_for_others(self.frames, self.line)

    @property
    def where(self) -> str:
        """`sleep at train.py:41 in step`; empty where it is not known."""
        return place_of(Thread(name="", main=True, running=None, frames=self.frames)) if self.frames else ""

    @property
    def words(self) -> str:
        """What it does, after `rank 3 on node 1`."""
        if self.state:
            word = f"is {STATES[self.state]} (state {self.state})"
            word += ": its disk or its network file system does not answer" if self.state == "D" else ""
            return word + (f", {located(self.where)}" if self.where else "")
        return f"is {located(self.where)}" if self.frames else f"gives no answer: {self.trouble}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Who is to blame, as far as it can be told."""

    culprits: tuple[int, ...]
    """Ranks; empty where all do the same."""
    waiting: tuple[int, ...]
    """Those that wait for others."""
    waiting_at: str
    """Where most of them wait."""
    note: str = ""
    """What is to be said besides, where all wait."""
    mismatched: bool = False
    """All wait, for different things."""


def find_culprits(places: Mapping[int, Place]) -> Finding:
    """Those that do not wait for others; where all wait, those that wait for something else than the others do.

    A rank that is stopped, or whose node does not answer, is not waiting.
    """
    waiting = tuple(rank for rank, place in sorted(places.items()) if place.waits)
    others = tuple(rank for rank in sorted(places) if rank not in waiting)
    still = tuple(rank for rank in others if places[rank].state)
    at = _most([places[rank].where for rank in waiting])
    if others:
        return Finding(culprits=still or others, waiting=waiting, waiting_at=at)
    apart = _apart(places)
    if apart:
        note = "they wait in different collectives: one of them was left out, or called in another order"
        rest = tuple(rank for rank in waiting if rank not in apart)
        return Finding(
            culprits=apart, waiting=rest, waiting_at=_most([places[r].where for r in rest]), note=note, mismatched=True
        )
    note = "all ranks wait in the same collective: the network between them, or a message that was lost"
    return Finding(culprits=(), waiting=waiting, waiting_at=at, note=note)


def _apart(places: Mapping[int, Place]) -> tuple[int, ...]:
    """Of ranks that all wait: who is not where most are; of two, or two halves, who has gone on further.

    Whoever leaves out a collective is ahead of the others.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault((place.step, place.where), []).append(rank)
    if len(groups) == 1:
        return ()
    sizes = sorted((len(ranks) for ranks in groups.values()), reverse=True)
    if sizes[0] > sizes[1]:
        largest = max(groups.values(), key=len)
        return tuple(rank for rank in sorted(places) if rank not in largest)
    steps = [place.step for place in places.values() if place.step is not None]
    ahead = tuple(rank for rank, place in sorted(places.items()) if steps and place.step == max(steps))
    return ahead if len(ahead) < len(places) else tuple(sorted(places))


def located(where: str) -> str:
    """`in all_reduce at train.py:41 in step`, or `at train.py:41 in step` for a line of the user's own."""
    return f"{'in' if ' at ' in where else 'at'} {where}"


def _most(words: Sequence[str]) -> str:
    return Counter(words).most_common(1)[0][0] if words else ""
