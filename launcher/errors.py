"""What can go wrong before and around a run, and how it is said.

LaunchError                  a message for the user and an exit code; never shown with a traceback
|-- RecipeError     exit 2   the recipe or the command line is wrong; nothing was started
`-- Refused         exit 3   this place cannot run it; nothing was started
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `launch` that are ours. Any other is the exit code of the first failing worker."""

    DONE = 0
    FINDING = 1
    """`doctor` has found a problem, or a command could not do all that it was asked for."""
    USAGE = 2
    """Recipe or usage error; nothing started."""
    REFUSED = 3
    """Well-formed, but refused here; nothing started."""
    INTERNAL = 70
    """A fault of ours."""
    STOPPED = 75
    """Stopped on request, with a checkpoint saved."""
    INTERRUPTED = 130
    """Ended by a second Ctrl-C, or by one that came before anything could be saved."""
    TERMINATED = 143
    """Ended by a second TERM, or by one that came before anything could be saved."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: where, what, and what to do about it."""

    where: str
    """`file:line:column`, `--flag`, `key=value` as typed, or a host or component name."""
    message: str
    """What is wrong, starting with the full path of the key, with both values where two disagree."""
    hint: str = ""
    """What to do: "did you mean ...", the valid names, the range."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}"
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class LaunchError(Exception):
    """Problems to show to the user, all at once, and the exit code that goes with them."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class RecipeError(LaunchError):
    """The recipe, an override or a flag is wrong."""

    exit_code = ExitCode.USAGE


class Refused(LaunchError):  # noqa: N818 - reads as what happened: raise Refused(...)
    """The plan is well-formed but cannot run in this place."""

    exit_code = ExitCode.REFUSED
