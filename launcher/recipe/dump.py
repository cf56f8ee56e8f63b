"""A recipe as YAML that `load_recipe` reads back to the same recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from launcher.recipe.scalars import is_null, plain_value

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def dump_yaml(recipe: Mapping[str, Any]) -> str:
    """The text of a recipe that was dumped by `Recipe.model_dump(mode="json", by_alias=True)`.

    Text stays text (`"1e10"` is quoted), and `${` is escaped, since everything in it is resolved already.
    """
    return str(yaml.dump(_escaped(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def escape(text: str) -> str:
    """The text that interpolation turns into this text."""
    return _INTERPOLATION.sub(lambda match: match.group(1) * 2 + "\\${", text)


def _escaped(value: Any) -> Any:
    """The same with every text escaped but keys, which are never interpolated."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reading, YAML 1.2 and `1e-3`, would take for something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    bare = text.isprintable() and not is_null(text) and isinstance(plain_value(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


def _represent_float(dumper: _Dumper, number: float) -> yaml.ScalarNode:
    """As Python writes it, and as it was written: an argument of a script is these very characters."""
    text = repr(number)
    kind = "float" if "." in text else "str"  # a bare `1e-05` is text to PyYAML, and would get a tag
    return dumper.represent_scalar(f"tag:yaml.org,2002:{kind}", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
