"""The step clock of one worker: a page of memory that it shares with its agent.

The worker marks where it is, which costs it no system call; the agent looks from outside, also when the worker is
frozen, busy without letting go of the interpreter, or dead. Times are of CLOCK_MONOTONIC, which all processes of a
machine share, and are compared on that machine only. Standard library only.

The page, little-endian, from its beginning: `format` (u32), `phase` (u32), `step` (u64: steps done), `marks` (u64: how
often something was marked), `marked_ns` (i64: when, the last time), `own_ns` (u64: time spent in own work, without
waiting for other ranks, over all steps), `own_steps` (u64: of how many steps that is the sum), and for each phase, in
the order of their numbers, the longest time that passed in it without a mark (u64, ns).

`launch_client` writes the same page without this module; a test compares the two.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

FORMAT = 1
FD_VARIABLE = "LAUNCH_CLOCK_FD"
"""Where a worker finds the descriptor of its page."""
_PAGE_BYTES = 4096
_LAYOUT = struct.Struct("<IIQQqQQ6Q")
_PROC_FD = "/proc/self/fd"
_NAME = "step-clock"


class Phase(IntEnum):
    """What a worker is at. The names are shown."""

    NOTHING = 0
    """It has not marked anything: a script, or it has only just begun."""
    START = 1
    """Before its first step: meeting the others, loading data and weights, rehearsing."""
    STEP = 2
    EVAL = 3
    SAVE = 4
    END = 5
    """All is done; what is left is leaving."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a page says."""

    phase: Phase
    step: int
    marks: int
    marked_ns: int
    own_ns: int
    own_steps: int
    longest_s: tuple[float, ...]
    """By the number of the phase: the longest time in it without a mark, so far."""

    def age_s(self, now_ns: int | None = None) -> float:
        """Since the last mark."""
        return max(0.0, ((time.monotonic_ns() if now_ns is None else now_ns) - self.marked_ns) / 1e9)


class StepPage:
    """One page. The agent makes it (`create`) and reads it; its worker opens it (`from_env`) and marks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, _PAGE_BYTES)
        self._marks = self._own_ns = self._own_steps = 0
        self._phase, self._marked_ns = Phase.NOTHING, time.monotonic_ns()
        self._longest_ns = [0] * len(Phase)

    @classmethod
    def create(cls) -> StepPage:
        """A new page, which nobody has marked."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        page = cls(fd)
        page._write(Phase.NOTHING, 0, page._marked_ns)
        return page

    @classmethod
    def from_env(cls) -> StepPage | None:
        """The page of this process; None outside a run, and in a child that has the variable but not the page."""
        fd = os.environ.get(FD_VARIABLE, "")
        return cls(int(fd)) if fd.isdigit() and _is_page(fd) else None

    def mark(self, phase: Phase, step: int) -> None:
        """This rank is here, now: it gets on."""
        now_ns = time.monotonic_ns()
        self._longest_ns[self._phase] = max(self._longest_ns[self._phase], now_ns - self._marked_ns)
        self._marks += 1
        self._phase, self._marked_ns = phase, now_ns
        self._write(phase, step, now_ns)

    def add_own(self, time_ns: int) -> None:
        """One more step took this rank so long, without its waits for others. Shown with the next mark."""
        self._own_ns += time_ns
        self._own_steps += 1

    def read(self) -> Reading:
        """What it says now."""
        _, phase, step, marks, marked_ns, own_ns, own_steps, *longest_ns = _LAYOUT.unpack_from(self._page)
        return Reading(
            phase=Phase(phase) if phase < len(Phase) else Phase.NOTHING,  # a script may write what it likes
            step=step,
            marks=marks,
            marked_ns=marked_ns,
            own_ns=own_ns,
            own_steps=own_steps,
            longest_s=tuple(each / 1e9 for each in longest_ns),
        )

    def close(self) -> None:
        """Give the page back."""
        self._page.close()
        os.close(self.fd)

    def _write(self, phase: Phase, step: int, now_ns: int) -> None:
        fields = (FORMAT, phase, step, self._marks, now_ns, self._own_ns, self._own_steps, *self._longest_ns)
        _LAYOUT.pack_into(self._page, 0, *fields)


def _is_page(fd: str) -> bool:
    try:
        return str(Path(_PROC_FD, fd).readlink()).startswith(f"/memfd:{_NAME}")
    except OSError:
        return False
