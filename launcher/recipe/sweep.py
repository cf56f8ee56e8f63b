"""The points of a sweep: one recipe, many sets of values. Pure.

grid     every combination, the last key the fastest
zip      the first values together, then the second ones
list     the points themselves
Where several are given: all pairs, in this order. Every point is checked as a recipe of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from launcher.recipe.masks import shown_override
from launcher.recipe.nodes import (
    Findings,
    Items,
    Keys,
    Layer,
    Node,
    Place,
    Scalar,
    Table,
    child,
    dotted,
    list_on_the_way,
    put,
)
from launcher.recipe.scalars import is_null, plain_value
from launcher.recipe.schema import Recipe
from launcher.recipe.typed import annotation_of, fields_of, typed
from launcher.recipe.yamltext import parse_value

MAX_POINTS = 10_000
"""More were not meant: a grid grows by multiplication."""

_NOT_SWEPT = {
    "name": "the points of a sweep have its name and a number",
    "extends": "it is only read from the recipe file",
    "sweep": "a sweep has no sweep in it",
    "runs_dir": "the points of a sweep lie side by side",
    "slurm": "the points of a sweep are tasks of one array, which ask for the same",
    "prepare": "it is run once per launch",
    "extra": "it changes nothing",
}
"""First part of a key that all points share, and why."""

_APART = frozenset({"model", "data", "train", "checkpoint", "faults", "network", "limits", "tracking"})
"""Sections of which each is checked by itself, whatever the others say."""

Validate = Callable[[Table, Findings], Recipe | None]
"""Checks a whole recipe: the findings say what is wrong, and where."""


@dataclass(frozen=True)
class _Setting:
    """One key of a point and its value, each with its place in the sweep."""

    keys: Keys
    place: Place
    value: Node


_Point = tuple[_Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point: what it sets, and the recipe that comes of it."""

    index: int
    settings: Mapping[str, str]
    """Key -> value as it is written on the command line."""
    origins: Mapping[str, str]
    """Key -> `sweep` and where its value stands there."""
    recipe: Recipe
    """Without `sweep`."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as KEY=VALUE."""
        return tuple(f"{key}={text}" for key, text in self.settings.items())


def expand(root: Table, validate: Validate, findings: Findings) -> tuple[Point, ...]:
    """The points of the recipe's `sweep:`, or none with the reasons in `findings`.

    `root` is the whole recipe before interpolation. What has the wrong form is left to the schema to report.
    """
    section = child(root, "sweep")
    if section is None:
        return ()
    own = Findings()
    _check_lists(section, own)
    points = None if own else _points(section, own)
    if points is not None:
        _check_keys(points, own)
        _check_twice(points, own)
    findings.extend(own)
    return () if own or points is None else tuple(_validated(root, points, validate, findings))


def with_sweep_flags(root: Table, texts: Sequence[str], findings: Findings) -> Table:
    """The recipe with every `--sweep key=a,b` in its `sweep.grid`, in place of what is there under that key.

    Commas inside quotes, brackets and braces belong to a value.
    """
    for text in texts:
        place = Place(f"--sweep {shown_override(text)}", Layer.FLAG, Path.cwd())
        key, separator, values = text.partition("=")
        if not separator or not all(key.strip().split(".")):
            findings.add(place, "is not KEY=VALUE,VALUE,...", "as in --sweep train.optimizer.lr=1e-3,1e-2")
            continue
        nodes = [parse_value(part, place, findings) for part in _split(values)]
        items = Items(tuple(node for node in nodes if node is not None), place)
        root = put(root, ("sweep", "grid", key.strip()), items, place)
    return root


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand in no quotes and no brackets."""
    depth, quote, start = 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not text[start:position].strip(" [{,:"):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            yield text[start:position]
            start = position + 1
    if text[start:].strip() or start:
        yield text[start:]


# ---------------------------------------------------------------- which points there are


def _points(section: Table, findings: Findings) -> list[_Point] | None:
    """None where there is something that the schema, or a finding, says is wrong."""
    parts = [_grid(section), _zip(section, findings), _list(section)]
    if findings or any(part is None for part in parts):
        return None
    given = [part for part in parts if part]
    if not given:
        findings.add(section.place, "sweep: there is no point", "grid: {train.optimizer.lr: [1e-3, 1e-2]}, or list")
        return None
    number = 1
    for part in given:
        number *= part.number if isinstance(part, _Grid) else len(part)
    if number > MAX_POINTS:
        findings.add(section.place, f"sweep: {number:,} points, and at most {MAX_POINTS:,} are meant to be launched")
        return None
    return [tuple(itertools.chain.from_iterable(picked)) for picked in itertools.product(*given)]


@dataclass(frozen=True)
class _Grid:
    """A product that is not worked out before it is known how large it is."""

    axes: tuple[_Point, ...]

    @property
    def number(self) -> int:
        number = 1
        for axis in self.axes:
            number *= len(axis)
        return number

    def __bool__(self) -> bool:
        return bool(self.axes)

    def __iter__(self) -> Iterator[_Point]:
        return iter(itertools.product(*self.axes))


def _axes(section: Table, key: str) -> tuple[_Point, ...] | None:
    """Of a mapping of keys to lists: the settings of each. None: it is no such mapping."""
    entry = section.entries.get(key)
    if entry is None:
        return ()
    if not isinstance(entry.value, Table):
        return None
    axes = []
    for name, written in entry.value.entries.items():
        if not isinstance(written.value, Items):
            return None
        keys = tuple(name.split("."))
        axes.append(tuple(_Setting(keys, written.key, value) for value in written.value.values))
    return tuple(axes)


def _grid(section: Table) -> _Grid | None:
    axes = _axes(section, "grid")
    return None if axes is None else _Grid(axes)


def _zip(section: Table, findings: Findings) -> tuple[_Point, ...] | None:
    axes = _axes(section, "zip")
    if axes is None:
        return None
    if len({len(axis) for axis in axes}) > 1:
        entry = section.entries["zip"]
        assert isinstance(entry.value, Table), "_axes has seen it"
        lengths = ", ".join(f"{name} has {len(axis)}" for name, axis in zip(entry.value.entries, axes, strict=True))
        findings.add(entry.key, f"sweep.zip: the lists are of one length, but {lengths}")
        return None
    return tuple(zip(*axes, strict=True))


def _list(section: Table) -> tuple[_Point, ...] | None:
    entry = section.entries.get("list")
    if entry is None:
        return ()
    if not isinstance(entry.value, Items) or not all(isinstance(item, Table) for item in entry.value.values):
        return None
    return tuple(
        tuple(_Setting(tuple(name.split(".")), written.key, written.value) for name, written in item.entries.items())
        for item in entry.value.values
        if isinstance(item, Table)
    )


def _check_lists(section: Table, findings: Findings) -> None:
    """A list of the sweep without a value would leave it without a point."""
    for kind in ("grid", "zip"):
        table = child(section, kind)
        for name, entry in {} if table is None else table.entries.items():
            if isinstance(entry.value, Items) and not entry.value.values:
                findings.add(entry.key, f"sweep.{kind}: {name} has no values")


def _check_keys(points: Sequence[_Point], findings: Findings) -> None:
    """Keys that may not differ, and keys of which one is, or holds, another one of the same point."""
    seen: set[tuple[Keys, Place]] = set()
    for point in points:
        for setting in point:
            if (setting.keys, setting.place) in seen:
                continue
            seen.add((setting.keys, setting.place))
            if not all(setting.keys):
                findings.add(setting.place, f"sweep: {dotted(setting.keys)!r} is not a key", "train.optimizer.lr")
            elif (why := _NOT_SWEPT.get(setting.keys[0])) is not None:
                findings.add(setting.place, f"sweep: {dotted(setting.keys)} is the same for all points: {why}")
            elif isinstance(setting.value, Table):
                findings.add(setting.place, f"sweep: {dotted(setting.keys)} is a section", "name the keys in it")
    for point in points:
        for one, other in itertools.combinations(point, 2):
            if one.keys == other.keys[: len(one.keys)] or other.keys == one.keys[: len(other.keys)]:
                both = dotted(one.keys) if one.keys == other.keys else f"{dotted(one.keys)} and {dotted(other.keys)}"
                findings.add(other.place, f"sweep: a point has {both} twice", f"the other one: {one.place}")


def _check_twice(points: Sequence[_Point], findings: Findings) -> None:
    """Two points that are the same would train the same."""
    first: dict[tuple[tuple[Keys, str], ...], int] = {}
    for index, point in enumerate(points):
        content = tuple(sorted((setting.keys, _text(setting.value)) for setting in point))
        before = first.setdefault(content, index)
        if before != index and point:
            pairs = zip(point, points[before], strict=False)
            differing = next((own for own, other in pairs if own.value is not other.value), point[-1])
            place = differing.value.place if isinstance(differing.value, Scalar) else differing.place
            values = ", ".join(f"{dotted(keys)}={text}" for keys, text in content)
            findings.add(place, f"sweep: the points {before} and {index} are the same: {values}")
            return


# ---------------------------------------------------------------- what each of them is


def _validated(root: Table, points: Sequence[_Point], validate: Validate, findings: Findings) -> Iterator[Point]:
    """Check every point. Sections that do not look at each other are checked once for each set of values of theirs."""
    base = Table({key: entry for key, entry in root.entries.items() if key != "sweep"}, root.place)
    checked: dict[tuple[tuple[Keys, int], ...], Recipe | None] = {}

    def recipe_of(settings: _Point) -> Recipe | None:
        name = tuple((setting.keys, id(setting.value)) for setting in settings)
        if name not in checked:
            checked[name] = validate(_tree(base, settings, findings), findings)
        return checked[name]

    bare = recipe_of(())
    apart = bare is not None and not _refers(root)
    for index, point in enumerate(points):
        groups: dict[str, list[_Setting]] = {}
        for setting in point:
            groups.setdefault(setting.keys[0], []).append(setting)
        if apart and bare is not None and groups.keys() <= _APART:
            update = {}
            for name, settings in groups.items():
                section = _with_numbers(getattr(bare, name), settings)
                if section is None and (whole := recipe_of(tuple(settings))) is not None:
                    section = getattr(whole, name)
                update[name] = section
            recipe = None if None in update.values() else bare.model_copy(update=update)
        else:
            recipe = recipe_of(point)
        if recipe is not None:
            yield Point(
                index=index,
                settings={dotted(setting.keys): _text(setting.value) for setting in point},
                origins={dotted(setting.keys): f"sweep {_place(setting)}" for setting in point},
                recipe=recipe,
            )


def _with_numbers(section: BaseModel | None, settings: Sequence[_Setting]) -> BaseModel | None:
    """A section with numbers of its own replaced; None where that is not all, or not right.

    They are what a long list is made of, and nothing but the schema has a say in them.
    """
    if section is None:
        return None
    known = fields_of(type(section))
    values = {name: getattr(section, name) for name in known}
    for setting in settings:
        key, node = setting.keys[-1], setting.value
        if len(setting.keys) != 2 or key not in known or not isinstance(node, Scalar) or not node.plain:
            return None
        if isinstance(plain_value(node.text), str):
            return None
        values[key] = typed(node, annotation_of(known[key]))
    try:
        return type(section).model_validate({**values, **(section.model_extra or {})}, strict=True)
    except ValidationError:
        return None  # the whole recipe is checked, which says what is wrong, and where


def _tree(base: Table, settings: Sequence[_Setting], findings: Findings) -> Table:
    tree = base
    for setting in settings:
        if (listed := list_on_the_way(tree, setting.keys)) is not None:
            findings.add(setting.place, f"sweep: {dotted(listed)} is a list, which has no keys")
            continue
        tree = put(tree, setting.keys, setting.value, setting.place)
    return tree


def _place(setting: _Setting) -> Place:
    return setting.value.place if isinstance(setting.value, Scalar) else setting.place


def _refers(node: Node) -> bool:
    """Whether a value may depend on another one, by `${...}`."""
    if isinstance(node, Scalar):
        return "${" in node.text
    values = node.values if isinstance(node, Items) else tuple(entry.value for entry in node.entries.values())
    return any(map(_refers, values))


def _text(node: Node) -> str:
    """A value as KEY=VALUE would have it: bare, quoted where bare would be something else, or a list in brackets."""
    if isinstance(node, Items):
        return "[" + ", ".join(_in_brackets(item) for item in node.values) + "]"
    if isinstance(node, Table):
        return "{" + ", ".join(f"{key}: {_in_brackets(entry.value)}" for key, entry in node.entries.items()) + "}"
    if node.null or (node.plain and not is_null(node.text)):
        return node.text
    return json.dumps(node.text, ensure_ascii=False)


def _in_brackets(node: Node) -> str:
    if isinstance(node, Scalar) and node.plain and set(node.text) & set(",[]{}:#\"' "):
        return json.dumps(node.text, ensure_ascii=False)
    return _text(node)
