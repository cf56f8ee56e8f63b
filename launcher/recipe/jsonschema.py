"""The JSON Schemas of a recipe and of a profile, for completion and checks in editors.

python -m launcher.recipe.jsonschema        writes both, which ship with the package
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from launcher import shipped
from launcher.recipe.catalog import Entry, Option, catalog
from launcher.recipe.checks import NAMED, NamedKind
from launcher.recipe.explain import field_docs
from launcher.recipe.profiles import NOT_IN_PROFILES
from launcher.recipe.schema import TARGET, Profile, Recipe
from launcher.recipe.typed import annotation_at, annotation_of, fields_of, members, section_of
from launcher.recipe.units import Duration, Length

PATH = Path(__file__).with_name("schema.json")
PROFILE_PATH = shipped.PROFILES / "schema.json"

_WORDS: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}


def make_schema() -> dict[str, Any]:
    """The schema: keys, types, ranges and documentation, and the names and options of the catalog."""
    schema = _documented(Recipe)
    for named in NAMED:
        section = section_of(annotation_at(Recipe, named.keys))
        assert section is not None, "every named section is one"
        _add_names(schema["$defs"][section.__name__], named)
    return schema


def make_profile_schema() -> dict[str, Any]:
    """The same of a profile: what belongs to a recipe only is left out."""
    schema = _documented(Profile)
    for keys in NOT_IN_PROFILES:
        section = section_of(annotation_at(Profile, keys[:-1]))
        assert section is not None, "what is left out is in a section"
        del schema["$defs"][section.__name__]["properties"][keys[-1]]
    return schema


def to_text(schema: dict[str, Any]) -> str:
    """The content of its file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _documented(root: type[BaseModel]) -> dict[str, Any]:
    schema: dict[str, Any] = root.model_json_schema(by_alias=True)
    for title, section in {root.__name__: root, **_sections(root)}.items():
        part = schema if section is root else schema["$defs"][title]
        for key, text in field_docs(section).items():
            part["properties"][key]["description"] = text
        for key, field in fields_of(section).items():
            default = field.get_default()
            if isinstance(default, (Duration, Length)):
                part["properties"][key]["default"] = str(default)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _sections(section: Any) -> dict[str, Any]:
    """Every section below one, by the name of its class."""
    found: dict[str, Any] = {}
    for field in fields_of(section).values():
        inner = section_of(annotation_of(field))
        if inner is not None:
            found |= {inner.__name__: inner, **_sections(inner)}
    return found


def _add_names(part: dict[str, Any], named: NamedKind) -> None:
    """The names that the section may hold, and for each the options that come with it."""
    entries = catalog(named.kind)
    part["properties"][named.key]["enum"] = list(entries)
    if TARGET in part["properties"]:
        del part["properties"][named.key]["default"]  # what is there beside a target; nobody writes it
        part["anyOf"] = [{"required": [key]} for key in (named.key, TARGET)]
    part["allOf"] = [
        {
            "if": {"properties": {named.key: {"const": name}}, **_required(named)},
            "then": {"properties": {option.name: _option(option) for option in entry.options}},
        }
        for name, entry in entries.items()
        if entry.options
    ]
    part["properties"][named.key]["description"] = _names_doc(entries)


def _required(named: NamedKind) -> dict[str, Any]:
    return {} if named.default else {"required": [named.key]}


def _names_doc(entries: dict[str, Entry]) -> str:
    return "\n".join(f"{name}: {entry.description}" for name, entry in entries.items())


def _option(option: Option) -> dict[str, Any]:
    default = {} if option.required else {"default": option.default}
    described = {"description": option.doc} if option.doc else {}
    return {**_type(option.annotation), **default, **described}


def _type(annotation: Any) -> dict[str, Any]:
    found = [wanted.type for wanted in members(annotation)]
    literals = [word for kind in found if get_origin(kind) is Literal for word in get_args(kind)]
    if literals:
        return {"enum": [*literals, *([None] if type(None) in found else [])]}
    words = [_WORDS.get(kind, "array" if get_origin(kind) in (tuple, list) else "") for kind in found]
    if not all(words):
        return {}
    return {"type": words[0] if len(words) == 1 else words}


def main() -> None:
    """Write both files."""
    for path, schema in {PATH: make_schema(), PROFILE_PATH: make_profile_schema()}.items():
        path.write_text(to_text(schema), "utf-8")
        print(path.resolve())


if __name__ == "__main__":
    main()
