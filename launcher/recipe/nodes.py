"""What was written, before it means anything: a tree of text with the place of every key and value.

Text stays text here (`1e-3`, `no`, `1e10`), since only the schema knows whether a number or a word is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.recipe.masks import masked

Keys = tuple[str, ...]


class Layer(IntEnum):
    """Who said it, in the order in which problems are listed."""

    RECIPE = 0
    EXTENDS = 1
    PROFILE = 2
    OVERRIDE = 3
    FLAG = 4


_ORIGIN = {
    Layer.RECIPE: "",
    Layer.EXTENDS: "extends ",
    Layer.PROFILE: "profile ",
    Layer.OVERRIDE: "override ",
    Layer.FLAG: "flag ",
}


@dataclass(frozen=True)
class Place:
    """Where something was written: a point in a file, an override as typed, or a flag."""

    source: str
    layer: Layer
    folder: Path
    """What a relative path that was written here is relative to."""
    line: int = 0
    """From 1; 0 = not in a file."""
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    @property
    def origin(self) -> str:
        """The place with its layer, as a dry run shows it: `extends recipes/base.yaml:3:1`."""
        return f"{_ORIGIN[self.layer]}{self}"

    def at(self, line: int, column: int) -> Place:
        """A point of the same file; an override or a flag has no points."""
        return replace(self, line=line, column=column) if self.line else self


@dataclass(frozen=True)
class Scalar:
    """A single value."""

    text: str
    place: Place
    plain: bool = True
    """Not quoted, so the schema decides what it is. Quoted is always text."""
    null: bool = False
    literal: bool = False
    """Never interpolated: arguments given after `--`."""


@dataclass(frozen=True)
class Items:
    """A list."""

    values: tuple[Node, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """One key of a section and its value."""

    key: Place
    value: Node

    @property
    def place(self) -> Place:
        """The value's place; for a section or list the place of its key."""
        return self.value.place if isinstance(self.value, Scalar) else self.key


@dataclass(frozen=True)
class Table:
    """A section."""

    entries: dict[str, Entry]
    place: Place


Node = Scalar | Items | Table


@dataclass
class Findings:
    """Everything that is wrong so far."""

    _found: list[tuple[Place, str, str]] = field(default_factory=list)

    def add(self, place: Place, message: str, hint: str = "") -> None:
        """Note one mistake. What has the form of a secret key is not repeated."""
        self._found.append((place, masked(message), hint))

    def extend(self, others: Findings) -> None:
        """Note what was found elsewhere."""
        self._found += others._found

    def raise_if_any(self) -> None:
        """Raise RecipeError with all of them, by file and line, each once."""
        if not self._found:
            return
        ordered = sorted(self._found, key=lambda found: (found[0].layer, found[0].line, found[0].column))
        hints: dict[tuple[Place, str], str] = {}
        for place, text, hint in ordered:
            hints.setdefault((place, text), hint)
        raise RecipeError([Problem(where=str(place), message=text, hint=hint) for (place, text), hint in hints.items()])

    def __bool__(self) -> bool:
        return bool(self._found)


def origin_of(entry: Entry) -> str:
    """Who set a value; of a list that a profile has begun and a recipe goes on, both."""
    values = entry.value.values if isinstance(entry.value, Items) else ()
    first = [value for value in values if value.place.layer is Layer.PROFILE]
    if not first or entry.place.layer is Layer.PROFILE:
        return entry.place.origin
    return f"{first[0].place.origin}, first {len(first)} of {len(values)}; {entry.place.origin}"


def dotted(keys: Keys) -> str:
    """The full path of a key, as in an override: `train.optimizer.lr`."""
    return ".".join(keys)


def present(table: Table, key: str) -> bool:
    """Whether a key is there with something other than null."""
    entry = table.entries.get(key)
    return entry is not None and not (isinstance(entry.value, Scalar) and entry.value.null)


def child(table: Table, key: str) -> Table | None:
    """A section of a section, if it is there and is one."""
    entry = table.entries.get(key)
    return entry.value if entry is not None and isinstance(entry.value, Table) else None


def section_at(root: Table, keys: Keys) -> Table | None:
    """The section at a path, if it was written."""
    table: Table | None = root
    for key in keys:
        table = None if table is None else child(table, key)
    return table


def merge(base: Table, over: Table) -> Table:
    """`over` on top of `base`: sections key by key, everything else replaced."""
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        if below is not None and isinstance(below.value, Table) and isinstance(entry.value, Table):
            entries[key] = Entry(entry.key, merge(below.value, entry.value))
        else:
            entries[key] = entry
    return Table(entries, over.place)


def list_on_the_way(tree: Table, keys: Keys) -> Keys | None:
    """The first part of a path that is a list."""
    node: Node = tree
    for length, key in enumerate(keys[:-1], start=1):
        entry = node.entries.get(key) if isinstance(node, Table) else None
        if entry is None:
            return None
        if isinstance(entry.value, Items):
            return keys[:length]
        node = entry.value
    return None


def put(table: Table, keys: Keys, value: Node, place: Place) -> Table:
    """The same tree with one value set; sections on the way are made where they are missing."""
    first, rest = keys[0], keys[1:]
    below = table.entries.get(first)
    if not rest:
        entry = Entry(place, value)
    else:
        inner = below.value if below is not None and isinstance(below.value, Table) else Table({}, place)
        key_place = below.key if below is not None and inner is below.value else place
        entry = Entry(key_place, put(inner, rest, value, place))
    return Table({**table.entries, first: entry}, table.place)


def without(table: Table, keys: Keys, first: int = 0) -> Table:
    """The same tree without a value, if it has it; with `first`, without that many first items of the list there.

    A section that has nothing else in it goes, too.
    """
    entry = table.entries.get(keys[0])
    if entry is None:
        return table
    kept: Node | None = None
    if keys[1:]:
        kept = without(entry.value, keys[1:], first) if isinstance(entry.value, Table) else entry.value
        if isinstance(kept, Table) and not kept.entries:
            kept = None
    elif first and isinstance(entry.value, Items):
        kept = replace(entry.value, values=entry.value.values[first:])
    others = {key: other for key, other in table.entries.items() if key != keys[0]}
    return Table(others if kept is None else {**others, keys[0]: Entry(entry.key, kept)}, table.place)


def from_python(value: object, place: Place) -> Node:
    """A tree of plain Python values, as flags and interpolation give them. Text is typed by the schema, as if bare."""
    if isinstance(value, Mapping):
        return Table({str(key): Entry(place, from_python(item, place)) for key, item in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Items(tuple(from_python(item, place) for item in value), place)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), place)
    return Scalar("null" if value is None else str(value), place, null=value is None)


def walk(node: Node, keys: Keys = ()) -> Iterator[tuple[Keys, Entry]]:
    """Every key below a section with its full path, sections before what is in them."""
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield (*keys, key), entry
            yield from walk(entry.value, (*keys, key))
