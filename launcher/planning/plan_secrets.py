"""No secret is in a plan: it is kept, shown and handed on as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.redact import Redactor

_SEEN_FIRST = ("values", "worker")
"""Where a user would look for it; the same value stands in other parts of the plan too."""


def secret_problems(plan: Plan, redactor: Redactor) -> list[Problem]:
    """The values of secrets that a plan holds, each at the first place where it stands. The values are not repeated."""
    if not redactor:
        return []
    document = dataclasses.asdict(plan)
    order = [*_SEEN_FIRST, *(name for name in document if name not in _SEEN_FIRST)]
    found: dict[str, str] = {}
    for place, text in (leaf for name in order for leaf in _leaves(document[name], name)):
        if (name := redactor.found_in(text)) is not None:
            found.setdefault(name, _user_place(plan, place))
    hint = "name it under `secrets:` and let the program read it from its environment: plans and commands can be read"
    return [
        Problem(where=redactor.text(place), message=f"this holds the value of {name}", hint=hint)
        for name, place in found.items()
    ]


def _user_place(plan: Plan, place: str) -> str:
    """`values.12.value` is a key of the recipe, at its line; `worker.argv.3` an argument."""
    section, _, rest = place.partition(".")
    number = rest.split(".")[0]
    if section == "values" and number.isdecimal():
        value = plan.values[int(number)]
        return f"{value.origin}: {value.key}" if value.origin != "default" else value.key
    return f"plan.{place}"


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with the way to it. Keys are text too."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield place, str(key)
            yield from _leaves(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}.{index}")
