"""What an agent tells of the step clocks of its workers with each heartbeat. Standard library only.

Ages travel, not moments: no clock of one node is compared with that of another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.clock import Phase, Reading

_PROC = Path("/proc")
_LOOK_AFTER_S = 1.0
"""Of a worker whose last mark is older than this, the state of its process is told too."""
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "in an uninterruptible wait", "Z": "dead"}
"""States of a process in which it does nothing, in words."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The step clock of one rank."""

    phase: Phase
    step: int
    age_s: float
    """Since it marked something; of a worker that has not marked anything yet, since its last output."""
    own_ms: float = 0.0
    """Its own work over all of `own_steps`."""
    own_steps: int = 0
    longest_s: tuple[float, ...] = (0.0,) * len(Phase)
    """By the number of the phase: the longest time in it without a mark."""
    state: str = ""
    """A letter of `STATES`; empty for a process that runs, or sleeps."""
    is_silent: bool = False
    """It has not marked, and not printed, anything yet."""

    def to_message(self) -> list[Any]:
        """As JSON."""
        longest = [round(each, 3) for each in self.longest_s]
        age_s, own_ms = round(self.age_s, 3), round(self.own_ms, 3)
        return [int(self.phase), self.step, age_s, own_ms, self.own_steps, longest, self.state, self.is_silent]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Clock:
        """What `to_message` has made."""
        phase, step, age_s, own_ms, own_steps, longest, state, is_silent = message
        return cls(
            phase=Phase(phase),
            step=step,
            age_s=age_s,
            own_ms=own_ms,
            own_steps=own_steps,
            longest_s=tuple(longest),
            state=state,
            is_silent=is_silent,
        )


def clock_of(reading: Reading, pid: int, *, started_s: float, output_s: float | None) -> Clock:
    """What a page and its process say; when it was started, and has printed something last (CLOCK_MONOTONIC)."""
    now_s = time.monotonic()
    quiet_s = max(0.0, now_s - (started_s if output_s is None else output_s))
    age_s = quiet_s if reading.phase is Phase.NOTHING else reading.age_s(int(now_s * 1e9))
    return Clock(
        phase=reading.phase,
        step=reading.step,
        age_s=age_s,
        own_ms=reading.own_ns / 1e6,
        own_steps=reading.own_steps,
        longest_s=reading.longest_s,
        state=idle_state(pid) if age_s > _LOOK_AFTER_S else "",
        is_silent=reading.phase is Phase.NOTHING and output_s is None,
    )


def idle_state(pid: int, proc: Path = _PROC) -> str:
    """A letter of `STATES` where the process is in one of them, else empty; Z for one that is gone."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
    letter = stat.rpartition(")")[2].split()[0]  # its name, in parentheses, may hold anything
    return letter if letter in STATES else ""
