"""`${...}` by OmegaConf, resolved once, here: everything after this sees plain values.

`${train.seed}` is another key (its default where it is not set), `${oc.env:HOME}` a variable of the environment that
`launch` was called in, `${oc.env:X,default}` the same with a default. `$HOME` and `{x}` are only text. A literal
`${x}` is written `\\${x}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.recipe.dump import escape
from launcher.recipe.hints import did_you_mean, key_paths
from launcher.recipe.nodes import Entry, Findings, Items, Keys, Node, Scalar, Table, dotted, from_python
from launcher.recipe.schema import Recipe
from launcher.recipe.typed import annotation_of, fields_of, section_of

if TYPE_CHECKING:
    from pydantic import BaseModel

_OPEN = "${"
_MISSING_VARIABLE = re.compile(r"Environment variable '(.*)' not found")
_MISSING_KEY = re.compile(r"Interpolation key '(.*)' not found")


def interpolate(root: Table, findings: Findings) -> tuple[Table, set[Keys]]:
    """The same tree with every `${...}` replaced, and the keys where that failed.

    Each failure is a finding that names the key and what is missing.
    """
    if not _any_interpolation(root):
        return root, set()  # the common case does not pay for importing OmegaConf
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    failed: set[Keys] = set()

    def fail(node: Scalar, keys: Keys, message: str, hint: str) -> Node:
        failed.add(keys)
        findings.add(node.place, f"{dotted(keys)}: {message}", hint)
        return replace(node, text="", plain=False)

    def check(node: Scalar, keys: Keys) -> Node:
        try:
            OmegaConf.create({"value": node.text})
        except OmegaConfBaseException as error:
            return fail(node, keys, f"{node.text!r} cannot be read: {_first_line(error)}", _ESCAPE)
        return node

    well_formed = _table(root, check)
    config = OmegaConf.create(_with_defaults(_plain(well_formed), Recipe))

    def resolve(node: Scalar, keys: Keys) -> Node:
        try:
            value = _select(config, keys)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            return fail(node, keys, *_explain(_first_line(error), node))
        return from_python(value, node.place)

    return _table(well_formed, resolve), failed


_ESCAPE = "write a literal `${` as `\\${`"


def _any_interpolation(node: Node) -> bool:
    if isinstance(node, Scalar):
        return _interpolated(node)
    values = node.values if isinstance(node, Items) else [entry.value for entry in node.entries.values()]
    return any(map(_any_interpolation, values))


def _interpolated(node: Scalar) -> bool:
    return _OPEN in node.text and not node.literal


def _table(table: Table, change: Callable[[Scalar, Keys], Node], keys: Keys = ()) -> Table:
    changed = {key: Entry(e.key, _node(e.value, change, (*keys, key))) for key, e in table.entries.items()}
    return Table(changed, table.place)


def _node(node: Node, change: Callable[[Scalar, Keys], Node], keys: Keys) -> Node:
    """The node with `change` applied to every interpolated scalar below it."""
    if isinstance(node, Table):
        return _table(node, change, keys)
    if isinstance(node, Items):
        return Items(tuple(_node(item, change, (*keys, str(i))) for i, item in enumerate(node.values)), node.place)
    return change(node, keys) if _interpolated(node) else node


def _plain(node: Node) -> Any:
    """The tree as OmegaConf takes it; text that is never interpolated is escaped."""
    if isinstance(node, Table):
        return {key: _plain(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [_plain(item) for item in node.values]
    if node.null:
        return None
    return escape(node.text) if node.literal else node.text


def _with_defaults(written: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """What was written, with the defaults of the keys that were not, so that these can be referred to."""
    filled = dict(written)
    for key, field in fields_of(section).items():
        inner = section_of(annotation_of(field))
        if inner is not None and isinstance(written.get(key), dict):
            filled[key] = _with_defaults(written[key], inner)
        elif key not in written and not field.is_required():
            default = field.get_default()
            filled[key] = _default(default) if inner is None or default is None else _with_defaults({}, inner)
    return filled


def _default(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def _select(config: Any, keys: Keys) -> Any:
    """The value at a path, resolved. Not `OmegaConf.select`, for which a dot in a key is a step."""
    for key in keys:
        config = config[key] if hasattr(config, "keys") else config[int(key)]
    return config


def _explain(error: str, node: Scalar) -> tuple[str, str]:
    if missing := _MISSING_VARIABLE.search(error):
        name = missing.group(1)
        return f"environment variable {name} is not set", f"set it, or give a default: ${{oc.env:{name},...}}"
    if missing := _MISSING_KEY.search(error):
        name = missing.group(1)
        return f"{node.text!r} refers to {name!r}, and there is no such key", did_you_mean(name, key_paths())
    return f"{node.text!r} cannot be resolved: {error}", _ESCAPE


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
