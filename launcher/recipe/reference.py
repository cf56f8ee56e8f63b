"""docs/recipes.md: every section, key, type, default and text of a recipe, and all that it may name.

python -m launcher.recipe.reference        writes it, in a checkout
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.recipe.catalog import Option, catalog
from launcher.recipe.checks import NAMED, NamedKind
from launcher.recipe.explain import field_docs
from launcher.recipe.nodes import Keys, dotted
from launcher.recipe.scalars import plain_value
from launcher.recipe.schema import TARGET, Recipe
from launcher.recipe.typed import annotation_of, describe, fields_of, literals, section_of
from launcher.recipe.units import Duration, Length

PATH = Path(__file__).parents[2] / "docs" / "recipes.md"

_INTRO = """\
# Every key of a recipe

<!-- Written by `make schema` from launcher/recipe/schema.py and the files in jobs/; a test compares. Do not edit. -->

How a recipe is written, and how values are read, is in [recipes/README.md](../recipes/README.md); what the keys for
GPUs bring, in [training.md](training.md). `launch check RECIPE` finds every mistake, with its line;
`launch RECIPE --dry-run` shows where each value comes from. A key that is left out has its default.
"""
_OF_NAMED = {
    ("model",): "Options of each model. `launch list models` shows the same.",
    ("data",): "Options of each dataset. `launch list datasets` shows the same.",
    ("train", "task"): "Options of each task. A dataset says which one belongs to it.",
    ("train", "optimizer"): "Options of each optimizer.",
    ("train", "schedule"): "Options of each schedule: the learning rate over the steps, as a factor.",
    ("parallelism",): "Options of each strategy.",
}


def make_reference() -> str:
    """The whole page."""
    sections = list(_sections(Recipe, ()))
    links = [f"[{dotted(keys)}](#{_anchor(keys)})" for keys, _ in sections]
    lines = [_INTRO, f"Sections: [top level](#top-level), {', '.join(links)}.", "", "## Top level", ""]
    lines += _keys_table(Recipe, ())
    for keys, section in sections:
        lines += ["", f"## {dotted(keys)}", "", _doc(section), "", *_keys_table(section, keys)]
        named = next((named for named in NAMED if named.keys == keys), None)
        if named is not None:
            lines += _names(named)
    return "\n".join(lines) + "\n"


def _sections(section: type[BaseModel], keys: Keys) -> Iterator[tuple[Keys, type[BaseModel]]]:
    """All sections below one, in the order of the schema."""
    for key, field in fields_of(section).items():
        inner = section_of(annotation_of(field))
        if inner is not None:
            yield (*keys, key), inner
            yield from _sections(inner, (*keys, key))


def _keys_table(section: type[BaseModel], keys: Keys) -> list[str]:
    docs = field_docs(section)
    rows = []
    for key, field in fields_of(section).items():
        inner, path = section_of(annotation_of(field)), (*keys, key)
        text = docs.get(key) or ("" if inner is None else _doc(inner))
        if (named := next((named for named in NAMED if path == (*named.keys, named.key)), None)) is not None:
            rows.append(
                [f"`{key}`", f"one of the {named.kind} below", _default(field), text or _name_doc(section, named)]
            )
        elif inner is None:
            rows.append([f"`{key}`", describe(annotation_of(field)), _default(field), text])
        else:
            words = [*map(str, literals(annotation_of(field))), f"[section](#{_anchor(path)})"]
            rows.append([f"`{key}`", " or ".join(words), "", text])
    return _table(("key", "type", "default", "what it is"), rows)


def _name_doc(section: type[BaseModel], named: NamedKind) -> str:
    other = f", or `{TARGET}`" if TARGET in fields_of(section) else ""
    return f"Which {named.word}{other}."


def _names(named: NamedKind) -> Iterator[str]:
    """Each thing that the section may name: those without options in one table, the others with one each."""
    entries = catalog(named.kind)
    yield from ("", _OF_NAMED[named.keys])
    for name, entry in entries.items():
        yield from ("", f"**`{named.key}: {name}`** {entry.description}", "")
        options = [[f"`{option.name}`", *_option(option)] for option in entry.options]
        yield from _table(("option", "type", "default", "what it is"), options) if options else ("No options.",)


def _option(option: Option) -> tuple[str, str, str]:
    default = "**required**" if option.required else f"`{_yaml(option.default)}`"
    return describe(option.annotation), default, option.doc


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True)
    return "" if default == TARGET else f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    """A default as a recipe has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    if isinstance(value, str) and (not value or not isinstance(plain_value(value), str)):
        return f'"{value}"'
    return str(value) if isinstance(value, Duration | Length | str) else repr(value)


def _doc(section: type[BaseModel]) -> str:
    """The docstring of a section, without its own name in front."""
    text = " ".join(inspect.cleandoc(section.__doc__ or "").split())
    return re.sub(r"^`[\w.]+:` (.)", lambda found: found[1].upper(), text)


def _anchor(keys: Keys) -> str:
    """As GitHub makes them of headings."""
    return "".join(keys).lower()


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [
        titles,
        ["---"] * len(titles),
        *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    """Write the file."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(make_reference(), "utf-8")
    print(PATH)


if __name__ == "__main__":
    main()
