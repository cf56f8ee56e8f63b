"""`{run_dir}` and its like in the arguments of a script. Standard library only: the agent fills in what it alone knows.

Exactly the names below count; any other text in braces stays, JSON among it. `{{run_dir}}` is the text `{run_dir}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

PLAN_NAMES = ("run_dir", "checkpoint_dir", "nodes", "nproc")
"""Known when the plan is made."""
LATE_NAMES = ("attempt", "newest")
"""Known at the start of each attempt."""
NAMES = (*PLAN_NAMES, *LATE_NAMES)


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with the names of `values` filled in, each of which is in `NAMES`; all others stay, escapes included."""
    escaped, name = 1, 2
    return _pattern(values).sub(
        lambda found: f"{{{found[escaped]}}}" if found[escaped] is not None else values[found[name]], text
    )


def fill_plan(text: str, values: Mapping[str, str]) -> str:
    """The first of two steps: what is filled in survives the second one unchanged, whatever a path may look like."""
    return fill(text, {name: _pattern(LATE_NAMES).sub(r"{\g<0>}", value) for name, value in values.items()})


def attempt_argv(
    argv: Sequence[str], resume_argv: Sequence[str], *, attempt: int, newest: str | None
) -> tuple[str, ...]:
    """The second step: the arguments of one attempt, those of a resume among them where `newest` was found."""
    values = {"attempt": str(attempt), "newest": newest or ""}
    words = argv if newest is None else (*argv, *resume_argv)
    return tuple(fill(word, values) for word in words)


def names_in(text: str) -> set[str]:
    """The placeholders that a text has, without those that are escaped."""
    return {found[2] for found in _pattern(NAMES).finditer(text) if found[2] is not None}


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    some = "|".join(names) or "(?!)"
    return re.compile(rf"\{{\{{({some})\}}\}}|\{{({some})\}}")
