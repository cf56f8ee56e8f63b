"""Profiles: where a run goes and how things are done there, below the recipe. And the user's default place.

A profile is a file like a recipe, with the sections of it that belong to a site. `--on` names one by its path or by
its name: NAME.yaml in ./profiles, in the user's folder, or among the shipped ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from launcher import shipped
from launcher.errors import Problem, RecipeError
from launcher.recipe.checks_script import NOT_OF_A_SCRIPT, check_env, check_python, check_secret_names
from launcher.recipe.checks_secrets import check_secrets
from launcher.recipe.explain import explain, show
from launcher.recipe.files import read_tree, shown
from launcher.recipe.hints import did_you_mean, unknown_key_hint
from launcher.recipe.nodes import (
    Entry,
    Findings,
    Items,
    Keys,
    Layer,
    Scalar,
    Table,
    dotted,
    present,
    section_at,
    walk,
    without,
)
from launcher.recipe.paths import expanded, is_file
from launcher.recipe.schema import ExecutorName, Profile, Recipe
from launcher.recipe.typed import annotation_at, fields_of, section_of, typed
from launcher.recipe.whereto import user_folder

OWN_KEYS = ("executor", "description")
"""What a profile has and a recipe has not."""
NOT_IN_PROFILES: dict[Keys, str] = {
    ("resources", "nodes"): "the recipe says how many nodes, or --nodes",
    ("slurm", "after"): "a launch says after which run it comes: --after RUN",
}
"""Keys of sections that a profile has, which belong to a recipe or a launch all the same."""
JOINED = ("setup", "prepare")
"""Lists of which a recipe adds to what its profile says; any other list replaces it."""

_OF_SCRIPTS: dict[Keys, str] = {
    ("python",): "the built-in training program is run by the launcher's own interpreter",
    ("slurm", "container"): "the built-in training program runs in the launcher's own environment",
}
_OF_JOBS: dict[Keys, str] = {
    ("network", "timeout"): "a script sets the timeout of its collectives itself",
    **{("faults", key): why for key, why in NOT_OF_A_SCRIPT.items()},
}


@dataclass(frozen=True)
class ProfileFile:
    """A profile as it was read. What is wrong with it is told together with what is wrong with the recipe."""

    name: str
    path: Path
    executor: str
    """Empty where the file does not name one that there is."""
    description: str
    tree: Table | None
    """The layer: without what only a profile has."""
    findings: Findings = field(repr=False)


def find_profile(name: str, place: str, executors: Collection[str]) -> ProfileFile:
    """The profile of a path or a name, said at `place`. Raises RecipeError for a name that there is not."""
    if is_path(name):
        return read_profile(expanded(name))
    path = next((path for folder in folders() if is_file(path := folder / f"{name}.yaml")), None)
    if path is None:
        raise RecipeError([_unknown(name, place, executors)])
    return read_profile(path)


def is_path(name: str) -> bool:
    """Whether `--on` names a file, and not one of the profiles by its name."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def folders() -> tuple[Path, ...]:
    """Where profiles are looked for: the project's, the user's, the shipped ones. The first one of a name counts."""
    return Path("profiles"), user_folder() / "profiles", shipped.PROFILES


def all_profiles() -> Iterator[ProfileFile]:
    """Every profile that a name finds, in the order in which they are looked for."""
    seen: set[str] = set()
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            if path.stem not in seen:
                seen.add(path.stem)
                yield read_profile(path)


def default_place(path: Path) -> tuple[str, str] | None:
    """What the user's settings say of where to run (`on: NAME`), and where they say it. Raises RecipeError."""
    findings = Findings()
    _, tree = read_tree(path, Layer.PROFILE, findings, kind="config")
    said: tuple[str, str] | None = None
    for key, entry in tree.entries.items() if isinstance(tree, Table) else ():
        if key != "on":
            findings.add(entry.key, f"unknown key {key!r}", did_you_mean(key, ["on"]) or "its one key is `on`")
        elif not isinstance(entry.value, Scalar) or not entry.value.text:
            findings.add(entry.place, f"on: {show(entry.value)} is not the name of a place", "as in `on: slurm`")
        elif not entry.value.null:
            name = entry.value.text
            said = str(entry.place.folder / expanded(name)) if is_path(name) else name, str(entry.place)
    findings.raise_if_any()
    return said


def read_profile(path: Path) -> ProfileFile:
    """Read a profile and check it by itself: what a recipe would cover is still a mistake."""
    findings = Findings()
    path = path.resolve() if path.is_relative_to(shipped.PROFILES) else path
    _, tree = read_tree(path, Layer.PROFILE, findings, kind="profile")
    if not isinstance(tree, Table):
        return ProfileFile(path.stem, path, "", "", None, findings)
    executor, description = _own(tree, findings)
    layer = _allowed(tree, findings)
    _check(layer, findings)
    return ProfileFile(path.stem, path, executor, description, layer, findings)


def over_profile(profile: Table, recipe: Table) -> tuple[Table, tuple[str, ...]]:
    """The recipe on top of a profile, and what of the profile is left out, as sentences.

    Sections and mappings key by key; `setup` and `prepare` of both; anything else replaced. `auto` in a recipe says
    nothing, `null` takes the profile's value away. What only some recipes can have is left out for the others.
    """
    notes = []
    is_script = any(present(recipe, key) for key in ("script", "module"))
    for keys, why in _OF_JOBS.items() if is_script else _OF_SCRIPTS.items():
        section = section_at(profile, keys[:-1])
        if section is not None and present(section, keys[-1]):
            notes.append(f"{dotted(keys)} of the profile ({section.entries[keys[-1]].place}) does not count: {why}")
            profile = without(profile, keys)
    return _over(profile, recipe, ()), tuple(notes)


def _own(tree: Table, findings: Findings) -> tuple[str, str]:
    """The executor and the description."""
    known = get_args(ExecutorName)
    executor, description = tree.entries.get("executor"), tree.entries.get("description")
    name = executor.value.text if executor is not None and isinstance(executor.value, Scalar) else ""
    hint = f"one of: {', '.join(known)}"
    if executor is None:
        findings.add(tree.place, "executor is missing", hint)
    elif name not in known:
        near = did_you_mean(name, known)
        findings.add(executor.place, f"executor: {show(executor.value)} is not an executor", near or hint)
        name = ""
    if description is None:
        return name, ""
    if not isinstance(description.value, Scalar) or description.value.null:
        findings.add(description.place, f"description: {show(description.value)} is not text", "a line of text")
        return name, ""
    return name, description.value.text


def _allowed(tree: Table, findings: Findings) -> Table:
    """What of a profile is a layer of the recipe. What belongs elsewhere is a finding, and is left out."""
    entries = {}
    for key, entry in tree.entries.items():
        if key in OWN_KEYS:
            continue
        if key in Profile.model_fields:
            entries[key] = entry
        elif key in fields_of(Recipe):
            message = f"{key}: belongs to a recipe; a profile says where a run goes and how things are done there"
            findings.add(entry.key, message, f"its keys: {', '.join(Profile.model_fields)}")
        else:
            hint = unknown_key_hint(key, (), Profile.model_fields, {})
            findings.add(entry.key, f"unknown key {key!r}", hint)
    for keys, instead in NOT_IN_PROFILES.items():
        section = section_at(Table(entries, tree.place), keys[:-1])
        if section is not None and keys[-1] in section.entries:
            findings.add(section.entries[keys[-1]].key, f"{dotted(keys)}: does not belong to a profile", instead)
            kept = {key: entry for key, entry in section.entries.items() if key != keys[-1]}
            entries[keys[0]] = Entry(entries[keys[0]].key, Table(kept, section.place))
    return Table(entries, tree.place)


def _check(layer: Table, findings: Findings) -> None:
    failed = {keys for keys, entry in walk(layer) if isinstance(entry.value, Scalar) and "${" in entry.value.text}
    try:
        Profile.model_validate({"executor": "local", **typed(layer, Recipe)}, strict=True)
    except ValidationError as error:
        explain(error.errors(include_url=False), layer, failed, {}, findings)
    if ("python",) not in failed:
        check_python(layer, findings)
    check_env(layer, findings)
    check_secret_names(layer, findings)
    check_secrets(layer, findings)


def _over(base: Table, over: Table, keys: Keys) -> Table:
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below, path = entries.get(key), (*keys, key)
        if below is not None and isinstance(below.value, Table) and isinstance(entry.value, Table):
            entries[key] = Entry(entry.key, _over(below.value, entry.value, path))
        elif below is not None and key in JOINED and not keys and isinstance(below.value, Items):
            entries[key] = _joined(below.value, entry)
        elif below is None or not _says_nothing(path, entry):
            entries[key] = entry
    return Table(entries, over.place)


def _joined(first: Items, then: Entry) -> Entry:
    """The lines of a profile, then those of the recipe."""
    if not isinstance(then.value, Items):
        return then  # the schema says what is wrong with it
    return Entry(then.key, Items((*first.values, *then.value.values), then.value.place))


def _says_nothing(keys: Keys, entry: Entry) -> bool:
    """Whether a value is the `auto` that it would be anyway."""
    if not isinstance(entry.value, Scalar) or not entry.value.plain or entry.value.text != "auto":
        return False
    section = section_of(annotation_at(Recipe, keys[:-1])) if keys[1:] else Recipe
    found = None if section is None else fields_of(section).get(keys[-1])
    return found is not None and found.get_default() == "auto"


def _unknown(name: str, place: str, executors: Collection[str]) -> Problem:
    found: dict[str, str] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, shown(folder.resolve() if folder == shipped.PROFILES else folder))
    by_folder: dict[str, list[str]] = {}
    for profile, folder_name in found.items():
        by_folder.setdefault(folder_name, []).append(profile)
    known = "; ".join(f"{', '.join(names)} (in {folder_name})" for folder_name, names in by_folder.items())
    near = did_you_mean(name, [*executors, *found])
    parts = [f"{near} executors: {', '.join(executors)}".strip(), f"profiles: {known or 'none'}"]
    return Problem(
        where=place,
        message=f"{name!r} is not a place: no executor and no profile is called that",
        hint="; ".join([*parts, "`launch init-site` writes one for the cluster that you are on"]),
    )
