"""Secrets in a recipe: found and refused, since a recipe is kept, shown and copied.

A secret is known by the name of its key (`env.HF_TOKEN`, `--api-key`) or by its own form (`hf_...`, `sk-...`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.recipe.masks import FORMS, names_secret
from launcher.recipe.nodes import Findings, Keys, Node, Scalar, Table, dotted
from launcher.recipe.scalars import plain_value

_HASH = re.compile(r"[0-9a-f]{40}")
"""A W&B key, under a name that says so; elsewhere a commit."""
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(?![$\"'`]*\$|[\"']?`)(\S+)")
"""In a line of bash; a value that the line looks up (`$(cat key)`) is not written down."""
_MIN_TOKEN = 8


def check_secrets(root: Table, findings: Findings) -> None:
    """Add one finding for each value that is a secret."""
    for keys, value, why in _secrets(root, ()):
        hint = "name its variable under `secrets:` and export it before `launch`: the workers inherit it"
        findings.add(value.place, f"{dotted(keys)}: {why}, and a recipe is kept and shown", hint)


def _secrets(node: Node, keys: Keys) -> Iterator[tuple[Keys, Scalar, str]]:
    if isinstance(node, Scalar):
        if why := _why_secret(keys, node):
            yield keys, node, why
    elif isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from _secrets(entry.value, (*keys, key))
    elif keys == ("args",):
        yield from _in_arguments(keys, node.values)
    else:
        for value in node.values:
            yield from _secrets(value, keys)


def _why_secret(keys: Keys, node: Scalar) -> str:
    """Why a value is a secret, as the middle of a sentence; empty where it is none."""
    name, text = keys[-1], node.text
    if FORMS.search(text):
        return "this has the form of a secret key"
    if "wandb" in dotted(keys).lower() and _HASH.fullmatch(text):
        return "this has the form of a W&B key"
    if keys[0] == "setup" and any(names_secret(variable) for variable, _ in _ASSIGNED.findall(text)):
        return "this line holds a secret"
    strict = keys[0] == "env"
    if not node.null and names_secret(name) and _may_be_secret(name, node, strict=strict):
        return f"the value of {name} is a secret"
    return ""


def _in_arguments(keys: Keys, values: Sequence[Node]) -> Iterator[tuple[Keys, Scalar, str]]:
    """`--api-key VALUE` and `--api-key=VALUE` among the words of a list."""
    before = ""
    for value in values:
        if not isinstance(value, Scalar):
            continue
        option, separator, text = value.text.partition("=")
        if option.startswith("-") and separator:
            found = Scalar(text, value.place, plain=False)
            why = _why_secret((*keys, option.lstrip("-")), found) or _why_secret(keys, value)
        else:
            # a word after an option is its value, under its name
            name = before.lstrip("-") if before.startswith("-") and not value.text.startswith("-") else "args"
            why = _why_secret((*keys, name), value)
        if why:
            yield keys, value, why
        before = value.text


def _may_be_secret(name: str, node: Scalar, *, strict: bool) -> bool:
    """Whether a value under such a name is the secret itself: no file that holds it, no switch, no special token."""
    text = node.text
    if not text or text.startswith(("/", "~", "./", "../", "{")):
        return False
    if strict:
        return True
    if node.plain and not isinstance(plain_value(text), str):
        return False
    if "TOKEN" not in name.upper():
        return True
    return len(text) >= _MIN_TOKEN and not re.search(r"[\s<>\[\]|]", text)
