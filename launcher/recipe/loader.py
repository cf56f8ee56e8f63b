"""A recipe file, overrides and flags become a `Recipe`, or every mistake in them at once, each with its place.

read     YAML -> tree with places      yamltext
merge    profile < extends < recipe < KEY=VALUE < flags
resolve  ${...}                        interpolate
type     by schema and catalog         typed, checks
check    all of it, in one pass        explain, checks
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from launcher.recipe.checks import check_named, check_whole, options_of, typed_options, written_paths
from launcher.recipe.checks_secrets import check_secrets
from launcher.recipe.dump import dump_yaml
from launcher.recipe.explain import explain
from launcher.recipe.files import neighbours, read_tree, shown
from launcher.recipe.fit import check_fit
from launcher.recipe.interpolate import interpolate
from launcher.recipe.masks import shown_override
from launcher.recipe.nodes import (
    Entry,
    Findings,
    Items,
    Keys,
    Layer,
    Node,
    Place,
    Scalar,
    Table,
    dotted,
    from_python,
    list_on_the_way,
    merge,
    origin_of,
    put,
    walk,
    without,
)
from launcher.recipe.paths import expanded, is_file, real, real_but_name
from launcher.recipe.schema import Recipe
from launcher.recipe.sweep import Point, expand, with_sweep_flags
from launcher.recipe.typed import typed
from launcher.recipe.yamltext import parse_value

if TYPE_CHECKING:
    from launcher.recipe.profiles import ProfileFile

Flags = Mapping[str, tuple[str, object]]
"""Key path -> (flag as typed, value). A value of None was not given. `sweep` has the texts of all `--sweep`."""

NO_FLAGS: Flags = {}
NOTHING_UNSET: Mapping[str, int] = {}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that has no mistake in it, and where each part of it was said."""

    recipe: Recipe
    source: Path | None
    """Absolute path of the recipe file; None for a script without one."""
    overrides: tuple[str, ...]
    origins: dict[str, str]
    """Full path of every value that was set -> who set it: `recipes/a.yaml:14:3`, `extends recipes/base.yaml:3:1`,
    `profile lab.yaml:4:3`, `override train.until=2 epochs`, `flag --nodes`. What is not here is a default."""
    text: str
    """The recipe as it was written."""
    on: tuple[str, str] | None = None
    """Where to run, as it was said, and who said it. None = nobody."""
    places: dict[str, str] = field(default_factory=dict, repr=False)
    """Full path of every key that was set, sections included -> its place as an error shows it."""
    notes: tuple[str, ...] = ()
    """What a profile says and this recipe cannot have."""
    points: tuple[Point, ...] = ()
    """Of a recipe with a `sweep:`, in order."""

    def origin(self, key: str) -> str:
        """Who set the value at a key: as in `origins`, or `default`."""
        return self.origins.get(key, "default")

    def where(self, key: str) -> str:
        """The best place for an error about a key: its own, else that of the nearest section that was set."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return self.places[""]


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    flags: Flags = NO_FLAGS,
    profile: ProfileFile | None = None,
    unset: Mapping[str, int] = NOTHING_UNSET,
) -> LoadedRecipe:
    """Read a recipe. Raises RecipeError with every mistake of the file, the profile, the overrides and the flags.

    `unset`: keys of the file that count as not written; a number above 0: only that many first items of the list.
    """
    findings = Findings()
    if profile is not None:
        findings.extend(profile.findings)
    text, written = read_tree(path, Layer.RECIPE, findings)
    if not isinstance(written, Table):
        findings.raise_if_any()
        raise AssertionError("a file that cannot be read is a finding")
    tree = _extend(written, findings)
    for key, first in unset.items():
        tree = without(tree, tuple(key.split(".")), first)
    return _finish(tree, overrides, flags, profile, text=text, source=real(path), findings=findings)


def script_recipe(
    script: Path,
    args: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    flags: Flags = NO_FLAGS,
    profile: ProfileFile | None = None,
) -> LoadedRecipe:
    """The recipe of `launch train.py -- args`: the script by its absolute path, the arguments unchanged.

    Raises RecipeError for a script that is not there, and for every mistake of the profile, overrides and flags.
    """
    place = Place(shown(script), Layer.RECIPE, Path.cwd())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", script.stem).strip("-._")[:41] or "script"
    values = tuple(Scalar(arg, place, plain=False, literal=True) for arg in args)
    nodes: dict[str, Node] = {
        "name": Scalar(name, place, plain=False, literal=True),
        "script": Scalar(str(script), place, plain=False, literal=True),
    }
    if args:
        nodes["args"] = Items(values, place)
    tree = Table({key: Entry(place, node) for key, node in nodes.items()}, place)
    text = dump_yaml({"name": name, "script": str(real_but_name(script)), **({"args": list(args)} if args else {})})
    return _finish(tree, overrides, flags, profile, text=text, source=None, findings=Findings())


def _finish(
    tree: Table,
    overrides: Sequence[str],
    flags: Flags,
    profile: ProfileFile | None,
    *,
    text: str,
    source: Path | None,
    findings: Findings,
) -> LoadedRecipe:
    """Everything after reading: the same for a recipe and for a script."""
    notes: tuple[str, ...] = ()
    if profile is not None and profile.tree is not None:
        from launcher.recipe.profiles import over_profile

        tree, notes = over_profile(profile.tree, tree)
    tree = _with_overrides(tree, overrides, findings)
    tree = _with_flags(tree, flags, findings)
    points = expand(tree, _settled, findings)
    tree, failed = interpolate(tree, findings)
    recipe = _validate(tree, failed, findings)
    findings.raise_if_any()
    assert recipe is not None, "a recipe that does not validate is a finding"
    entries = [(dotted(keys), entry) for keys, entry in walk(tree)]
    return LoadedRecipe(
        recipe=recipe,
        source=source,
        overrides=tuple(overrides),
        origins={key: origin_of(entry) for key, entry in entries if not _has_keys(entry)},
        text=text,
        places={
            "": str(tree.place),
            **{f"{key}.{i}": str(item.place) for key, entry in entries for i, item in enumerate(_listed(entry))},
            **{key: str(entry.place) for key, entry in entries},
        },
        notes=notes,
        points=points,
    )


def _settled(tree: Table, findings: Findings) -> Recipe | None:
    """The recipe of a tree, where there is nothing to find."""
    tree, failed = interpolate(tree, findings)
    return _validate(tree, failed, findings)


def _validate(tree: Table, failed: set[Keys], findings: Findings) -> Recipe | None:
    data: dict[str, Any] = typed(tree, Recipe)
    for keys, value in typed_options(tree):
        _set(data, keys, value)
    for keys, path in written_paths(tree):
        _set(data, keys, str(path))
    recipe = None
    try:
        recipe = Recipe.model_validate(data, strict=True)
    except ValidationError as error:
        explain(error.errors(include_url=False), tree, failed, options_of(tree), findings)
    check_named(tree, failed, findings)
    check_fit(tree, findings)
    check_whole(tree, findings)
    check_secrets(tree, findings)
    return recipe


def _set(data: dict[str, Any], keys: Keys, value: object) -> None:
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = value


def _extend(tree: Table, findings: Findings) -> Table:
    """The recipe on top of the one it extends. One level, so that a reader has two files to look at and never more."""
    written = tree.entries.get("extends")
    if written is None or not isinstance(written.value, Scalar) or written.value.null:
        return tree
    path = written.value.place.folder / expanded(written.value.text)
    if not is_file(path):
        findings.add(written.place, f"extends: there is no such file: {shown(path)}", neighbours(path))
        findings.raise_if_any()
    _, base = read_tree(path, Layer.EXTENDS, findings)
    if not isinstance(base, Table):
        findings.raise_if_any()
        raise AssertionError("a file that cannot be read is a finding")
    if "extends" in base.entries:
        place = base.entries["extends"].key
        findings.add(place, "extends: a recipe that is extended may not extend another", "one level only")
    return merge(base, tree)


def _with_overrides(tree: Table, overrides: Sequence[str], findings: Findings) -> Table:
    for override in overrides:
        place = Place(shown_override(override), Layer.OVERRIDE, Path.cwd())
        key, separator, text = override.partition("=")
        keys = tuple(key.strip().split("."))
        if not separator or not all(keys):
            findings.add(place, "is not KEY=VALUE", "as in train.optimizer.lr=1e-3")
            continue
        if keys == ("extends",):
            findings.add(place, "extends: is only read from the recipe file")
            continue
        if (listed := list_on_the_way(tree, keys)) is not None:
            message = f"{dotted(listed)}: this is a list, which has no keys"
            findings.add(place, message, f"replace it as a whole: {dotted(listed)}=[...]")
            continue
        value = parse_value(text, place, findings)
        if value is not None:
            tree = put(tree, keys, value, place)
    return tree


def _with_flags(tree: Table, flags: Flags, findings: Findings) -> Table:
    for key, (flag, value) in flags.items():
        if key == "sweep":
            tree = with_sweep_flags(tree, value if isinstance(value, tuple) else (), findings)
        elif value is not None:
            place = Place(flag, Layer.FLAG, Path.cwd())
            tree = put(tree, tuple(key.split(".")), from_python(value, place), place)
    return tree


def _listed(entry: Entry) -> tuple[Node, ...]:
    return entry.value.values if isinstance(entry.value, Items) else ()


def _has_keys(entry: Entry) -> bool:
    return isinstance(entry.value, Table) and bool(entry.value.entries)
