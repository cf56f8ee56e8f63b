"""pydantic's errors as sentences: the place, the full path of the key, what was given, what is wanted, a hint."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from launcher.recipe.hints import WITHOUT_KEY, did_you_mean, unknown_key_hint
from launcher.recipe.nodes import Findings, Items, Keys, Node, Place, Scalar, Table, dotted
from launcher.recipe.scalars import plain_value
from launcher.recipe.schema import NamedSection, Recipe
from launcher.recipe.typed import annotation_at, describe, fields_of, literals, members, section_of
from launcher.recipe.units import UnfitError


def show(node: Node) -> str:
    """A value in a message, as it was written."""
    if isinstance(node, Table):
        return "a section"
    if isinstance(node, Items):
        return "a list"
    if node.null:
        return "null"
    if not node.plain:
        return f'the text "{node.text}"'
    return repr(node.text) if isinstance(plain_value(node.text), str) else node.text


def explain(
    errors: Iterable[ErrorDetails],
    root: Table,
    failed: set[Keys],
    options: Mapping[Keys, Iterable[str]],
    findings: Findings,
) -> None:
    """Add one finding for each key that pydantic complains about."""
    by_key: dict[Keys, list[ErrorDetails]] = {}
    for error in errors:
        by_key.setdefault(_keys(error, root), []).append(error)
    inner = {keys[:length] for keys in by_key for length in range(len(keys))}
    for keys, found in by_key.items():
        # where something inside is wrong, that the whole is no member of a union of another kind says nothing
        if keys not in failed and not (keys in inner and not isinstance(_node(keys, root), Scalar)):
            findings.add(*_sentence(keys, found, root, options))


def _keys(error: ErrorDetails, root: Table) -> Keys:
    """The path of the error in what was written; pydantic's own ends in the names of union members."""
    node: Node = root
    keys: list[str] = []
    last = len(error["loc"]) - 1
    for number, step in enumerate(error["loc"]):
        if isinstance(node, Table) and step in node.entries:
            node = node.entries[str(step)].value
        elif isinstance(node, Items) and isinstance(step, int):
            node = node.values[step]
        elif isinstance(node, Table) and error["type"] == "missing" and number == last:
            return (*keys, str(step))
        elif isinstance(node, Scalar):
            break
        else:
            continue  # the name of a union member
        keys.append(str(step))
    return tuple(keys)


def _sentence(
    keys: Keys, errors: list[ErrorDetails], root: Table, options: Mapping[Keys, Iterable[str]]
) -> tuple[Place, str, str]:
    path, error, wanted = dotted(keys), errors[0], annotation_at(Recipe, keys)
    if error["type"] == "missing":
        return _place(keys[:-1], root), f"{path} is missing", documentation(keys) or f"it is {describe(wanted)}"
    if error["type"] == "extra_forbidden":
        section = section_of(annotation_at(Recipe, keys[:-1])) or Recipe
        within = f" in {dotted(keys[:-1])}" if keys[1:] else ""
        hint = unknown_key_hint(keys[-1], keys[:-1], fields_of(section), options)
        program = root.entries.get("script") or root.entries.get("module")
        if program is not None and not keys[1:] and (_OF_A_JOB.search(hint) or hint in WITHOUT_KEY.values()):
            hint = _argument_hint(keys[0], program.value)
        return _key_place(keys, root), f"unknown key {keys[-1]!r}{within}", hint
    node = _node(keys, root)
    if (meant := _own_words(errors)) is not None:
        message, _, hint = str(meant).partition("; ")
        return _place(keys, root), f"{path}: {message}", hint
    if error["type"] == "string_pattern_mismatch":
        return _place(keys, root), f"{path}: {show(node)} does not fit", documentation(keys)
    kind = describe(wanted) if section_of(wanted) is None or literals(wanted) else "a section"
    return _place(keys, root), f"{path}: {show(node)} is not {kind}", _hint(keys, node, wanted)


def _own_words(errors: list[ErrorDetails]) -> ValueError | None:
    """What a unit of ours says: where nothing else complains, or where the text was meant for it."""
    found: list[ValueError] = [error["ctx"]["error"] for error in errors if error["type"] == "value_error"]
    if len(errors) == 1 and found:
        return found[0]
    return next((error for error in found if isinstance(error, UnfitError)), None)


_OF_A_JOB = re.compile(r"\b(model|data|train|parallelism|checkpoint)\b")


def _argument_hint(key: str, program: Node) -> str:
    """`lr`, where a script runs and nothing of ours is trained."""
    if isinstance(program, Scalar) and program.literal:  # a script without a recipe
        return f"arguments of the script stand after `--`: -- --{key} ..."
    return f"an argument of the script is args.{key}"


def _hint(keys: Keys, node: Node, wanted: Any) -> str:
    if isinstance(node, Scalar) and node.null:
        listed = keys[-1].isdecimal()
        return 'quote it where text is meant: "null"' if listed else "leave the key out for the default"
    section = section_of(wanted)
    if keys == ("parallelism", "fsdp") and isinstance(node, Scalar) and node.text == "true":
        return "strategy: fsdp; how many ranks share a copy, it finds itself"
    if isinstance(node, Scalar) and (near := did_you_mean(node.text, map(str, literals(wanted)))):
        return near
    if section is not None:
        return _section_hint(keys, node, section)
    if not isinstance(node, Scalar) and str in {member.type for member in members(wanted)}:
        return "quote it where text is meant"
    return (_scalar_hint(node, wanted) if isinstance(node, Scalar) else "") or documentation(keys)


def _section_hint(keys: Keys, node: Node, section: type[BaseModel]) -> str:
    names = list(fields_of(section))
    if isinstance(node, Scalar) and issubclass(section, NamedSection):
        return f"write `{keys[-1]}: {{{names[0]}: {node.text}}}`"
    return f"its keys: {', '.join(names)}"


def _scalar_hint(node: Scalar, wanted: Any) -> str:
    types = {member.type for member in members(wanted)}
    if not node.plain and types & {int, float, bool}:
        return "remove the quotes"
    if bool in types and node.text.lower() in ("yes", "no", "on", "off", "y", "n"):
        return "write true or false; in YAML 1.2 yes, no, on and off are text"
    return f"write [{node.text}]" if any(get_origin(kind) is tuple for kind in types) else ""


def _node(keys: Keys, root: Table) -> Node:
    node: Node = root
    for key in keys:
        node = node.entries[key].value if isinstance(node, Table) else _item(node, key)
    return node


def _item(node: Node, key: str) -> Node:
    assert isinstance(node, Items), "a path leads through sections and lists only"
    return node.values[int(key)]


def _place(keys: Keys, root: Table) -> Place:
    """Of a value; for a section or a list that of its key."""
    if not keys:
        return root.place
    parent = _node(keys[:-1], root)
    return parent.entries[keys[-1]].place if isinstance(parent, Table) else _item(parent, keys[-1]).place


def _key_place(keys: Keys, root: Table) -> Place:
    parent = _node(keys[:-1], root)
    return parent.entries[keys[-1]].key if isinstance(parent, Table) else _place(keys, root)


def documentation(keys: Keys) -> str:
    """The text under a field in the schema, for a full path; empty where there is none."""
    section = section_of(annotation_at(Recipe, keys[:-1]))
    return field_docs(section).get(keys[-1], "") if section is not None else ""


@cache
def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a section and of its bases, by the name that users write.

    Read from the source when somebody asks: pydantic would do so at every start, for a fifth of the time of a dry run.
    """
    docs: dict[str, str] = {}
    for base in reversed([base for base in section.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef), "the source of a class is a class"
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name), "fields are plain names"
                docs[field.target.id] = inspect.cleandoc(str(text.value.value))
    return {field.alias or name: docs[name] for name, field in section.model_fields.items() if name in docs}
