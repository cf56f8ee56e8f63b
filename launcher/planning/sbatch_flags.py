"""The flags of sbatch that a user may set: what is wrong with those of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from launcher.planning.topology import Finding
from launcher.recipe.sbatch_options import ALLOWED, PROTECTED


def sbatch_findings(given: Iterable[str]) -> Iterator[Finding]:
    """What is wrong with `slurm.sbatch`."""
    for name in given:
        key = f"slurm.sbatch.{name}"
        if name.startswith("-"):
            yield Finding(key, f"{key}: names stand here without dashes", f"write {name.lstrip('-')}")
        elif name in PROTECTED:
            message = f"{key}: --{name} is part of the plan and cannot be set here"
            yield Finding(key, message, PROTECTED[name] or "remove it")
        elif name not in ALLOWED:
            close = difflib.get_close_matches(name.replace("_", "-"), [*ALLOWED, *PROTECTED], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "the long names of `sbatch --help`, without dashes"
            yield Finding(key, f"{key}: sbatch has no option --{name}", hint)
