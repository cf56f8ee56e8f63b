"""From which state a training goes on, of those on the disk and those in memory, and what is said of that choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.folders import step_of
from jobs.memory import InMemory


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A checkpoint that is not used, and why."""

    name: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """From which checkpoint a training goes on."""

    name: str | None
    """None: there is none."""
    rejected: tuple[Rejected, ...] = ()
    """Newer ones that are not used."""
    memory: InMemory | None = None
    """Where it is, if it is not on the disk."""
    newest_on_disk: int = field(default=0, compare=False)
    """The step of the newest checkpoint there; 0: there is none."""
    state: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Its state.json."""

    @classmethod
    def of(
        cls, chosen: str | InMemory, rejected: Sequence[Rejected], names: Sequence[str], state: Mapping[str, Any]
    ) -> Choice:
        """This one, with what its state.json says. `names`: what there is on the disk."""
        memory = chosen if isinstance(chosen, InMemory) else None
        name = chosen.name if isinstance(chosen, InMemory) else chosen
        of_use = set(names) - {other.name for other in rejected}
        newest = max(map(step_of, of_use), default=0)
        return cls(name=name, rejected=tuple(rejected), memory=memory, newest_on_disk=newest, state=state)

    def sentence(self) -> str:
        """For people: `resumes from step-300; step-400 is broken: ...`."""
        first = f"resumes from {self.name}" if self.name else "there is no checkpoint to resume from"
        first += f", {self.memory.place}" if self.memory else ""
        return "; ".join([first, *(f"{other.name} {other.problem}" for other in self.rejected)])


def newest_first(names: Sequence[str], in_memory: Sequence[InMemory]) -> list[str | InMemory]:
    """In which order they are tried; of the same step the one on the disk first, which nobody has to write again."""
    keyed: list[tuple[tuple[int, int], str | InMemory]] = [((-step_of(name), 0), name) for name in names]
    keyed += [((-each.step, 1), each) for each in in_memory]
    return [candidate for _, candidate in sorted(keyed, key=lambda pair: pair[0])]
