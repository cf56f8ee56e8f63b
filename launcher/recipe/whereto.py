"""What `--on` means, as far as it can be told without reading a profile: that costs the head start of a local run."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.recipe.paths import expanded, is_file

if TYPE_CHECKING:
    from launcher.recipe.loader import LoadedRecipe
    from launcher.recipe.profiles import ProfileFile


@dataclass(frozen=True)
class Whereto:
    """Where a run goes, and who said so."""

    name: str
    """As it was said: of an executor, or of a profile."""
    executor: str
    """Empty for a profile that does not name one that there is."""
    origin: str
    """`flag --on`, a place in the user's settings, or `default`."""
    profile: ProfileFile | None = None

    @property
    def is_default(self) -> bool:
        """Whether nobody said anything."""
        return self.origin == "default"


def find_place(where: str | None, executors: Collection[str]) -> Whereto:
    """The executor, and the profile, of `--on WHERE`; for None those of the user's settings, else this machine.

    Raises RecipeError for a name that there is not, and for a mistake in the settings. Mistakes of a profile are in
    its `findings`.
    """
    name, origin, place = where, "flag --on", "--on"
    if name is None:
        said = _default_place()
        if said is None:
            return Whereto("local", "local", "default")
        name, place = said
        origin = place
    if name in executors:
        return Whereto(name, name, origin)
    from launcher.recipe.profiles import find_profile

    profile = find_profile(name, place, executors)
    return Whereto(name, profile.executor, origin, profile)


def said_where(loaded: LoadedRecipe, place: Whereto) -> LoadedRecipe:
    """The recipe with the place where it runs, if somebody said one."""
    return loaded if place.is_default else replace(loaded, on=(place.name, place.origin))


def user_folder() -> Path:
    """Where the user's own settings and profiles are."""
    return expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "launcher"


def settings_file() -> Path:
    """The user's own settings. Its one key is `on: NAME`."""
    return user_folder() / "config.yaml"


def _default_place() -> tuple[str, str] | None:
    if not is_file(settings_file()):
        return None
    from launcher.recipe.profiles import default_place

    return default_place(settings_file())
