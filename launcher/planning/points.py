"""The plans of a sweep's points, as lines of a file: the first one whole, of the others what is different.

A thousand plans are made in the time of a few, and a point's plan is put together where it is needed, which may be a
compute node. Where a key has a say in more than the recipe's own values, the line holds the whole plan.
Pure; standard library only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.planning.plan import leaves

Line = dict[str, Any]
"""`{index, set: {key: text}, plan}`, or `{index, set, recipe: {section: ...}, values: {section: [...]}}`."""

_COPIED = frozenset({"model", "train", "checkpoint"})
"""Sections that planning copies into the plan and does not look at, but for the following."""
_LOOKED_AT = frozenset(
    {
        *("train.accumulate", "train.compile", "train.deterministic", "train.precision"),
        *("checkpoint.init_from", "checkpoint.memory_every"),
    }
)


def point_id(sweep_id: str, index: int) -> str:
    """The run id of a point."""
    return f"{sweep_id}.{index}"


def split_point_id(run_id: str) -> tuple[str, int] | None:
    """The sweep and the index of what may be the run id of a point."""
    sweep_id, dot, index = run_id.rpartition(".")
    return (sweep_id, int(index)) if dot and sweep_id and index.isdecimal() and index.isascii() else None


def folders_of_sweep(run_dir: str) -> tuple[str, ...]:
    """What the run directory of a point has links into: the folder of its sweep. Nothing for another run."""
    folder, _, run_id = run_dir.rpartition("/")
    parts = split_point_id(run_id)
    return () if parts is None else (f"{folder}/{parts[0]}",)


def only_values_differ(settings: Mapping[str, str], *, divided: bool = False) -> bool:
    """Whether plans that differ in these keys of the recipe differ in nothing else than the recipe and the words of it.

    Words that a shell would not take as they are stand in a plan in more than one spelling. divided: the ranks share
    the layers of the model, which asks something of its options.
    """
    return all(
        key.partition(".")[0] in _COPIED
        and key not in _LOOKED_AT
        and not (divided and key.startswith("model."))
        and shlex.quote(f"{key}={text}") == f"{key}={text}"
        for key, text in settings.items()
    )


def whole_line(index: int, settings: Mapping[str, str], plan: Mapping[str, Any]) -> Line:
    """A point with a plan of its own."""
    return {"index": index, "set": dict(settings), "plan": plan}


def section_values(name: str, section: Mapping[str, Any], origins: Mapping[str, str]) -> list[dict[str, Any]]:
    """The part of `Plan.values` that a section of the recipe is."""
    return [
        {"key": key, "value": value, "origin": origins.get(key, "default")}
        for key, value in leaves(section, f"{name}.")
    ]


def plan_of(base: str, first: Line, line: Line) -> dict[str, Any]:
    """The plan of a point as a document. `base` is that of the `first` one, as JSON."""
    if "plan" in line:
        whole: dict[str, Any] = line["plan"]
        return whole
    before = str(json.loads(base)["run_id"])
    sweep_id, _ = split_point_id(before) or (before, 0)
    plan: dict[str, Any] = json.loads(base.replace(before, point_id(sweep_id, line["index"])))
    plan["recipe"] = {**plan["recipe"], **line["recipe"]}
    plan["values"] = _values(plan["values"], line["values"])
    before_words, words = ([f"{key}={text}" for key, text in each["set"].items()] for each in (first, line))
    plan["torchrun"] = [_with_words(text, before=before_words, after=words) for text in plan["torchrun"]]
    plan["overrides"] = [*plan["overrides"][: -len(before_words) or None], *words]
    return plan


def _values(values: Sequence[dict[str, Any]], sections: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The values with those of whole sections replaced, each where it was."""
    made: list[dict[str, Any]] = []
    done: set[str] = set()
    for value in values:
        section = str(value["key"]).partition(".")[0]
        if section not in sections:
            made.append(value)
        elif section not in done:
            done.add(section)
            made += sections[section]
    return made


def _with_words(text: str, *, before: Sequence[str], after: Sequence[str]) -> str:
    """A line of a shell with the words of another point. None of them needs quotes."""
    return text.replace(f" {' '.join(before)}", f" {' '.join(after)}")
