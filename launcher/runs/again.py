"""The recipe of a run, again: for a resume or a rerun, in the same place or another. With who set each value."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.recipe.loader import load_recipe
from launcher.recipe.paths import is_file
from launcher.recipe.schema import Profile
from launcher.recipe.whereto import Whereto, said_where

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.recipe.loader import Flags, LoadedRecipe
    from launcher.runs.rundir import RunDir

_BEGUN = re.compile(r"profile .*, first (\d+) of \d+; ")
"""Origin of a list that a profile has begun, and the recipe goes on with."""


def load_again(
    run: RunDir, plan: Plan, overrides: Sequence[str], flags: Flags, place: Whereto | None = None
) -> LoadedRecipe:
    """The recipe of a run as it was understood, changed. A script that is gone is the one of the run's copy.

    In another `place` the values of its profile count, and those of the profile before do not.
    """
    live = plan.live_script
    other = any(override.startswith("script=") for override in overrides)
    profile = None if place is None else place.profile
    unset = {} if place is None else not_carried_over(plan)
    copy = None if live is None or plan.code is None else run.code / os.path.relpath(live, plan.code.root)
    if live is None or copy is None or other or is_file(Path(live)) or not is_file(copy):
        loaded = load_recipe(run.resolved, overrides, flags=flags, profile=profile, unset=unset)
    else:
        flags = {**flags, "script": ("the copy of the code", str(copy))}
        loaded = load_recipe(run.resolved, overrides, flags=flags, profile=profile, unset=unset)
        loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"script": live}))
    loaded = _without_waits(_remembered(loaded, plan, elsewhere=place is not None), overrides)
    if place is not None:
        return said_where(loaded, place)
    said = next(((str(value.value), value.origin) for value in plan.values if value.key == "on"), None)
    return dataclasses.replace(loaded, on=None if said is None else (said[0], _earlier(said[1])))


def _without_waits(loaded: LoadedRecipe, overrides: Sequence[str]) -> LoadedRecipe:
    """What the first launch waited for, another one does not."""
    slurm, said = loaded.recipe.slurm, {override.partition("=")[0] for override in overrides}
    waits = {name: None for name in ("after", "begin") if f"slurm.{name}" not in said}
    recipe = loaded.recipe.model_copy(update={"slurm": slurm.model_copy(update=waits)})
    return dataclasses.replace(loaded, recipe=recipe)


def not_carried_over(plan: Plan) -> dict[str, int]:
    """What a run does not take along to another place: what its profile said, and the defaults of what one may say.

    As `load_recipe(unset=...)` takes it.
    """
    unset = {}
    for value in plan.values:
        begun = _BEGUN.match(value.origin)
        if begun:
            unset[value.key] = int(begun[1])
        elif value.origin.startswith("profile ") or (
            value.origin == "default" and value.key.partition(".")[0] in Profile.model_fields
        ):
            unset[value.key] = 0
    return unset


def _earlier(origin: str) -> str:
    return re.sub(r"^(flag|override) ", r"earlier \1 ", origin)


def _remembered(loaded: LoadedRecipe, plan: Plan, *, elsewhere: bool) -> LoadedRecipe:
    """Who set each value before it was written down: `resolved.yaml` has them all, defaults too.

    `elsewhere`: the profile of before has no part in it any more.
    """
    written_down = loaded.places[""].rsplit(":", 2)[0]  # path:line:column
    before = {value.key: _earlier(value.origin) for value in plan.values}
    if elsewhere:
        before = {key: _BEGUN.sub("", origin) for key, origin in before.items()}

    def remembered(key: str, origin: str) -> str:
        profile, separator, own = origin.rpartition("; ")
        if not own.startswith(f"{written_down}:"):
            return origin
        return profile + separator + before.get(key, "default")

    origins = {key: remembered(key, origin) for key, origin in loaded.origins.items()}
    return dataclasses.replace(loaded, origins=origins)
