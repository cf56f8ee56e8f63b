"""How long a run may go on without progress before it hangs: as asked for, or learned from what was seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.agent.clocks import Clock
from launcher.runs.clock import Phase

UNKNOWN_S = 600.0
"""The limit of what was not seen yet: the first steps, the first evaluation."""
FACTOR = 5.0
"""A limit that was learned is so many times the longest that was seen."""
FLOOR_S: Mapping[Phase, float] = {
    Phase.START: 1800.0,
    Phase.STEP: 30.0,
    Phase.EVAL: 60.0,
    Phase.SAVE: 1800.0,
    Phase.END: 3600.0,
}
"""No limit that was learned is below these. A step may wait half a minute for a file system or for a machine that is
busy, without being lost; weights may be many, and a save may take long on a day when the storage is slow; at the end
what was tracked is uploaded, which has a limit of its own."""
SCRIPT_FLOOR_S = 1800.0
"""Of a script, which marks its steps alone: an evaluation or a save of its own looks like a long step. As long as torch
itself waits by default."""
LEARN_STEPS = 100
"""So many steps of an attempt are looked at before their limit counts as learned."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of the plan, for hangs."""

    timeout_s: float | None = None
    """Asked for, exactly, for steps. None with `learns`: learned; None without: nothing is watched."""
    learns: bool = False
    restarts: bool = False
    """Whether a hang ends the attempt; else it is only said."""
    restarts_with_clock: bool = False
    """Whether it does so where the workers have marked a step."""
    has_phases: bool = True
    """Whether the workers are the built-in job, which marks more than its steps."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to do."""
        return self.learns or self.timeout_s is not None


@dataclass(kw_only=True)
class Patience:
    """Of one attempt: take every clock that comes, then ask for the limit of a phase."""

    limits: Limits
    _first_step: dict[int, int] = field(default_factory=dict)
    _learned: set[Phase] = field(default_factory=set)
    _longest_s: dict[Phase, float] = field(default_factory=dict)

    def take(self, rank: int, clock: Clock) -> None:
        """Learn from the clock of a rank."""
        for phase in Phase:
            longest_s = clock.longest_s[phase]
            self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), longest_s)
            if longest_s > 0 and phase not in (clock.phase, Phase.STEP):
                self._learned.add(phase)  # it has been there, and left it
        if clock.phase is not Phase.STEP:
            return
        first = self._first_step.setdefault(rank, clock.step)
        if clock.step - first >= LEARN_STEPS:
            self._learned.add(Phase.STEP)

    def limit(self, phase: Phase, *, is_silent: bool = False) -> tuple[float, str] | None:
        """How long no rank may mark anything while one is at this, and where that limit comes from. None: for ever.

        is_silent: a script that has not printed anything yet; it may be reading its weights.
        """
        asked_s = self.limits.timeout_s
        if phase is Phase.NOTHING:  # the built-in job prepares its data, and names those that it waits for
            if asked_s is None or self.limits.has_phases:
                return None
            may_restart = self.limits.restarts or self.limits.restarts_with_clock
            starts = is_silent and may_restart and asked_s < UNKNOWN_S
            return (UNKNOWN_S, _FIRST[Phase.START]) if starts else (asked_s, _ASKED)
        if phase is Phase.STEP and asked_s is not None:
            return asked_s, _ASKED
        floor_s = FLOOR_S[phase] if self.limits.has_phases else max(FLOOR_S[phase], SCRIPT_FLOOR_S)
        if phase in self._learned:
            learned_s = max(floor_s, FACTOR * self._longest_s.get(phase, 0.0))
            return max(learned_s, asked_s or 0.0), "learned"
        return max(UNKNOWN_S, floor_s, asked_s or 0.0), _FIRST[phase]


_ASKED = "faults.hang_timeout"
_FIRST = {
    Phase.START: "for the start",
    Phase.STEP: "for the first steps",
    Phase.EVAL: "for the first evaluation",
    Phase.SAVE: "for a save",
    Phase.END: "for the end",
}
"""What a limit is said to be for while nothing was learned."""
