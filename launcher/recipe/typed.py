"""Text becomes values by what the schema wants at each key: numbers are numbers by schema, text stays text."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.recipe.nodes import Items, Keys, Node, Scalar
from launcher.recipe.scalars import as_bool, as_float, as_int, plain_value
from launcher.recipe.units import Duration, Length, NodeRange


@dataclass(frozen=True)
class Wanted:
    """One member of what a key may hold: a type, and its range."""

    type: Any
    constraints: tuple[Any, ...] = ()

    def bound(self, name: str) -> Any:
        """`ge`, `gt`, `le` or `lt`, or None."""
        found = (getattr(constraint, name, None) for constraint in self.constraints)
        return next((value for value in found if value is not None), None)


def annotation_of(field: FieldInfo) -> Any:
    """The whole annotation of a field; pydantic keeps the outermost constraints apart."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section under the names that users write."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def members(annotation: Any, constraints: tuple[Any, ...] = ()) -> Iterator[Wanted]:
    """The members of a union, each with its constraints; of anything else the one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        yield from members(inner, (*constraints, *flat))
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            yield from members(member, constraints)
    else:
        yield Wanted(annotation, constraints)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, if it holds one."""
    for wanted in members(annotation):
        if isinstance(wanted.type, type) and issubclass(wanted.type, BaseModel):
            return wanted.type
    return None


def annotation_at(section: type[BaseModel], keys: Keys) -> Any:
    """What the schema wants at a path below a section; `Any` where it says nothing."""
    annotation: Any = section
    for key in keys:
        inner = section_of(annotation)
        if inner is not None:
            field = fields_of(inner).get(key)
            annotation = Any if field is None else annotation_of(field)
        else:
            annotation = _inner_at(key, [wanted for wanted in members(annotation) if _has_inner(wanted)])
    return annotation


def _has_inner(wanted: Wanted) -> bool:
    return get_origin(wanted.type) in (dict, list, tuple)


def _inner_at(key: str, choices: Sequence[Wanted]) -> Any:
    """What stands at a key of a dict, or at a number of a list where there is a choice."""
    fitting = (wanted for wanted in choices if (get_origin(wanted.type) is dict) != key.isdecimal())
    chosen = next(fitting, choices[0] if choices else None)
    return Any if chosen is None else _inner(chosen)


def _inner(wanted: Wanted) -> Any:
    """What the values of a dict or the items of a list are."""
    arguments = get_args(wanted.type)
    return arguments[1] if get_origin(wanted.type) is dict else arguments[0]


def typed(node: Node, annotation: Any) -> Any:
    """The value of a node, of the wanted type where it can be; else as it stands, for the validation to refuse."""
    if isinstance(node, Scalar):
        return _scalar(node, annotation)
    if isinstance(node, Items):
        return _items(node, annotation)
    section = section_of(annotation)
    if section is not None:
        known = fields_of(section)
        return {
            key: typed(entry.value, annotation_of(known[key]) if key in known else Any)
            for key, entry in node.entries.items()
        }
    inner = next((get_args(w.type)[1] for w in members(annotation) if get_origin(w.type) is dict), Any)
    return {key: typed(entry.value, inner) for key, entry in node.entries.items()}


_READERS: tuple[tuple[type, Callable[[str], Any]], ...] = ((bool, as_bool), (int, as_int), (float, as_float))


def _scalar(node: Scalar, annotation: Any) -> Any:
    if node.null:
        return None
    if not node.plain or node.text in literals(annotation):
        return node.text
    wanted = {w.type for w in members(annotation)}
    if Any in wanted:
        return plain_value(node.text)
    values = (read(node.text) for kind, read in _READERS if kind in wanted)
    value = next((value for value in values if value is not None), node.text)
    # where text will do as well, `0x6a` and `1_000` stay as they were written
    return node.text if str in wanted and str(value) not in (node.text, "True", "False") else value


def _items(node: Items, annotation: Any) -> Any:
    wanted = next((w.type for w in members(annotation) if get_origin(w.type) in (tuple, list)), None)
    inner = [arg for arg in get_args(wanted) if arg is not Ellipsis]
    if not inner:
        return [typed(value, Any) for value in node.values]
    each = [inner[min(i, len(inner) - 1)] for i in range(len(node.values))]
    values = [typed(value, annotation) for value, annotation in zip(node.values, each, strict=True)]
    return tuple(values) if get_origin(wanted) is tuple else values


def literals(annotation: Any) -> list[Any]:
    """The words that are allowed, where only certain words are."""
    return [word for w in members(annotation) if get_origin(w.type) is Literal for word in get_args(w.type)]


def fits(value: Any, annotation: Any) -> bool:
    """Whether a typed value is what an option of `jobs/` wants. Lists stand for tuples, whole numbers for floats."""
    return any(_fits(value, wanted.type) for wanted in members(annotation))


def _fits(value: Any, wanted: Any) -> bool:
    origin = get_origin(wanted)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(wanted))
    if origin in (tuple, list):
        return isinstance(value, (list, tuple)) and _items_fit(value, wanted)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, get_args(wanted)[1]) for item in value.values())
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    return wanted is Any or isinstance(value, type(None) if wanted is None else wanted)


def _items_fit(values: Sequence[Any], wanted: Any) -> bool:
    inner = [arg for arg in get_args(wanted) if arg is not Ellipsis]
    if get_origin(wanted) is list or Ellipsis in get_args(wanted):
        return all(fits(item, inner[0]) for item in values)
    return len(values) == len(inner) and all(map(fits, values, inner))


_ANY_SCALAR = frozenset({"text", "a whole number", "a number"})


def describe(annotation: Any) -> str:
    """What is wanted, in words: `a whole number >= 1 or auto`."""
    words = literals(annotation)
    parts = [_describe(w) for w in members(annotation) if get_origin(w.type) is not Literal]
    if set(parts) >= _ANY_SCALAR:
        parts = ["a single value", *(part for part in parts if part not in (*_ANY_SCALAR, "true or false"))]
    if words:
        parts.append(str(words[0]) if len(words) == 1 else f"one of {', '.join(map(str, words))}")
    return " or ".join(dict.fromkeys(parts))


_NAMES: dict[Any, str] = {
    bool: "true or false",
    str: "text",
    None: "null",
    type(None): "null",
    Duration: "a duration (`30s`, `10m`, `1h30m`)",
    Length: "a length (`500 steps`, `10k steps`, `8 epochs`)",
    NodeRange: "a range `MIN:MAX`",
    Any: "anything",
}


def _describe(wanted: Wanted) -> str:
    if wanted.type in (int, float):
        return ("a whole number" if wanted.type is int else "a number") + _range(wanted)
    if wanted.type in _NAMES:
        return _NAMES[wanted.type]
    if get_origin(wanted.type) in (tuple, list):
        inner = get_args(wanted.type)
        fixed = get_origin(wanted.type) is tuple and Ellipsis not in inner
        return f"a list of {len(inner)}: {', '.join(map(describe, inner))}" if fixed else "a list `[a, b]`"
    return "a section"


def _range(wanted: Wanted) -> str:
    low, high = wanted.bound("ge"), wanted.bound("le")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    above, below = wanted.bound("gt"), wanted.bound("lt")
    bounds = ((" >= ", low), (" <= ", high), (" > ", above), (" < ", below))
    return "".join(f"{sign}{bound}" for sign, bound in bounds if bound is not None)
