"""Whether a model of ours is for the samples that the data has. Pure.

`launch check` asks with what the file of a data set says of its samples (`HAS`), a worker with the samples themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.recipe.catalog import Entry, catalog
from launcher.recipe.nodes import Findings, Scalar, Table, section_at
from launcher.recipe.typed import fits, typed

_CLASSES, _TOKENS = ("classes", "outputs"), ("vocabulary", "outputs")
"""Options of models that say how many classes or tokens they know."""
_COUNTED = {"classification": ("classes", _CLASSES), "language_modelling": ("tokens", _TOKENS)}
"""Task -> the word for what is told apart, and the options of models that say how many there are."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What the samples of a data set are."""

    shape: tuple[int, ...]
    """Of one."""
    are_tokens: bool
    classes: int | None
    """How many different targets there may be."""
    task: str
    """What the model learns of them."""


def misfits(options: Mapping[str, Any], samples: Samples) -> Iterator[tuple[str, str]]:
    """(option of the model, what is wrong with it and what to make of it), where it is for other samples.

    options: all of them, with their defaults.
    """
    if problem := _kind_problem(options, samples):
        yield problem
    else:
        yield from _size_problems(options, samples)
    yield from _count_problems(options, samples)


def _kind_problem(options: Mapping[str, Any], samples: Samples) -> tuple[str, str] | None:
    """Of a model that reads tokens where there are numbers, or the other way round, or images where there are none."""
    data = f"and a sample of the data is {_written(samples.shape)}"
    reads_tokens = bool(options.get("vocabulary"))
    if reads_tokens and not samples.are_tokens:
        return "vocabulary", f"model.vocabulary: {options['vocabulary']}: it reads tokens, {data} numbers"
    if samples.are_tokens and not reads_tokens:
        key = "model.vocabulary: 0" if "vocabulary" in options else "model"
        return "vocabulary", f"{key}: it takes numbers, {data} tokens; gpt and lstm read them"
    if "in_channels" in options and len(samples.shape) != 3:
        return "in_channels", f"model.in_channels: it takes channels x height x width, {data}"
    return None


def _size_problems(options: Mapping[str, Any], samples: Samples) -> Iterator[tuple[str, str]]:
    shape = samples.shape
    if samples.are_tokens and "context" in options and options["context"] < shape[0]:
        yield "context", f"model.context: {options['context']} tokens, and the data has sequences of {shape[0]}"
    has = {"in_features": math.prod(shape)}
    if len(shape) == 3:
        has |= {"in_channels": shape[0], "image_size": shape[1]}
    for key, size in has.items():
        if key in options and options[key] != size:
            text = f"model.{key}: {options[key]:,}, and a sample of the data is {_written(shape)}; make it {size}"
            yield key, text


def _count_problems(options: Mapping[str, Any], samples: Samples) -> Iterator[tuple[str, str]]:
    if samples.classes is None or samples.task not in _COUNTED:
        return
    word, keys = _COUNTED[samples.task]
    for key in keys:
        if key in options and options[key] < samples.classes:
            has = f"the data has {samples.classes:,} {word}"
            yield key, f"model.{key}: {options[key]:,}, and {has}; make it {samples.classes}"


def _written(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def check_fit(root: Table, findings: Findings) -> None:
    """What is wrong with the model for the data that a recipe names, as far as the two are ours and say it."""
    model, data = section_at(root, ("model",)), section_at(root, ("data",))
    if model is None or data is None:
        return
    its, of_data = _named(model, "models"), _named(data, "datasets")
    if its is None or of_data is None:
        return
    options, samples = _options(model, its), _samples(root, data, of_data)
    if options is None or samples is None:
        return
    for key, message in misfits(options, samples):
        written = model.entries.get(key)
        place = model.entries["name"].place if written is None else written.place
        findings.add(place, message, f"the data is {of_data.name} ({data.entries['name'].place})")


def _named(section: Table, kind: str) -> Entry | None:
    name = section.entries.get("name")
    return None if name is None or not isinstance(name.value, Scalar) else catalog(kind).get(name.value.text)


def _options(section: Table, entry: Entry) -> dict[str, Any] | None:
    """All options of what a section names; None where one is wrong, which is said elsewhere."""
    found = {}
    for option in entry.options:
        written = section.entries.get(option.name)
        value = option.default if written is None else typed(written.value, option.annotation)
        if written is not None and not (fits(value, option.annotation) and option.allows(value)):
            return None
        found[option.name] = value
    return found


def _samples(root: Table, section: Table, entry: Entry) -> Samples | None:
    options = _options(section, entry)
    has = None if options is None else next((each for each in entry.has if _goes(each, options)), None)
    if has is None or options is None:
        return None
    sizes = _shape([_of(size, options) for size in has["shape"]])
    if sizes is None:
        return None
    task = section_at(root, ("train", "task"))
    name = None if task is None else task.entries.get("name")
    return Samples(
        shape=sizes,
        are_tokens=has["task"] == "language_modelling",
        classes=_of(has.get("classes"), options),
        task=has["task"] if name is None or not isinstance(name.value, Scalar) else name.value.text,
    )


def _goes(has: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    return all(options[key] == value for key, value in has.get("when", {}).items())


def _shape(sizes: list[Any]) -> tuple[int, ...] | None:
    """`1x28x28` and numbers; None for what is no shape."""
    parts = [part for size in sizes for part in str(size).split("x")]
    return tuple(map(int, parts)) if all(part.isascii() and part.isdecimal() for part in parts) else None


def _of(said: Any, options: Mapping[str, Any]) -> Any:
    """A value, or that of an option: `=classes`."""
    return options[said[1:]] if isinstance(said, str) and said.startswith("=") else said
