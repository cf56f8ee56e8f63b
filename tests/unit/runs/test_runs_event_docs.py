"""The list of events in `launcher.runs.events` is what the program writes: a reader of a record can rely on it."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from launcher.agent.adapters.ledger import Saved
from launcher.agent.causes import Failure
from launcher.runs import events

ROOT = Path(__file__).parents[3]
SOURCES = [*(ROOT / "launcher").rglob("*.py"), *(ROOT / "jobs").rglob("*.py"), ROOT / "launch_client.py"]
NAME_AT = {"write": 0, "event": 0, "Record": 0, "record_event": 1}
"""Where a call that writes an event has its name."""
NAMED = re.compile(r"(?:^|[\s·])(\w+) \{((?:[^{}]|\{[^{}]*\})*)\}")


def documented() -> dict[str, set[str]]:
    """Event -> the fields that it may have."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in NAMED.findall(events.__doc__ or ""):
        flat = re.sub(r"[\[{].*?[\]}]+", "", text, flags=re.DOTALL)
        found[name] |= {field.split(":")[0].strip() for field in flat.split(",")}
    return found


def places() -> Iterator[tuple[str, set[str]]]:
    """Each place that writes an event: its name, and the fields that stand there by name."""
    for call in (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))):
        if isinstance(call, ast.Dict):
            keys = [key.value for key in call.keys if isinstance(key, ast.Constant)]
            if keys[:3] == ["time", "writer", "event"] and isinstance(call.values[2], ast.Constant):
                yield str(call.values[2].value), set()
        elif isinstance(call, ast.Call):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            name = call.args[NAME_AT[called]] if len(call.args) > NAME_AT.get(called, len(call.args)) else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and re.fullmatch(r"[a-z_]+", name.value):
                given = [each.keys for each in call.args if isinstance(each, ast.Dict)]
                keys = {str(key.value) for each in given for key in each if isinstance(key, ast.Constant)}
                yield name.value, keys | {each.arg for each in call.keywords if each.arg is not None}


@functools.cache
def written() -> list[tuple[str, set[str]]]:
    return list(places())


def test_every_event_that_is_written_is_listed_and_every_one_that_is_listed_is_written() -> None:
    assert {name for name, _ in written()} == set(documented())


def test_fields_of_events_are_listed() -> None:
    listed = documented()
    assert [(name, extra) for name, given in written() if (extra := given - listed[name])] == []
    assert {field.name for field in fields(Failure)} == listed["failure"]
    assert {field.name for field in fields(Saved)} <= listed["checkpoint_saved"]
