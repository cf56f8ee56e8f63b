"""Whether the data goes with the model, and with what the checkpoint was trained on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from jobs import registry
from jobs.data.base import Data
from jobs.loader import Fetch
from jobs.registry import OptionError
from jobs.tasks.base import Task
from jobs.tasks.classification import Classification
from jobs.tasks.language_modelling import LanguageModelling
from launcher.recipe.schema import ModelSection

_CLASSES, _TOKENS = ("classes", "outputs"), ("vocabulary", "outputs")
"""Options of models that say how many classes or tokens they know."""
SAMPLES = "samples"
"""In the record of a checkpoint: how many there were to train on."""


def check_fit(section: ModelSection, data: Data, task: Task) -> None:
    """Raise OptionError where a model of ours is for other samples than the data has, or for fewer classes or tokens.

    Without this the run ends somewhere in torch: with shapes that cannot be multiplied, with an index out of range, on
    a GPU with an assertion of a kernel.
    """
    if section.target is not None:
        return
    options = _with_defaults(section)
    if problems := [*_shape_problems(options, data), *_count_problems(options, data, task)]:
        raise OptionError("\n".join(problems))


def _shape_problems(options: Mapping[str, Any], data: Data) -> Iterator[str]:
    inputs, _ = Fetch(data.train, seed=0)[0, torch.tensor([0])]
    shape = tuple(inputs.shape[1:])
    written = " x ".join(map(str, shape)) or "one number"
    if problem := _kind_problem(options, inputs, written):
        yield problem
        return
    has = {"in_features": inputs.numel()}
    if len(shape) == 3:
        has |= {"in_channels": shape[0], "image_size": shape[1]}
    for key, size in has.items():
        if key in options and options[key] != size:
            yield f"model.{key}: {options[key]:,}, and a sample of the data is {written}; make it {size}"


def _kind_problem(options: Mapping[str, Any], inputs: Tensor, written: str) -> str:
    """Of a model that reads tokens where there are numbers, or the other way round, or images where there are none."""
    reads_tokens, has_tokens = bool(options.get("vocabulary")), not inputs.is_floating_point()
    data = f"and a sample of the data is {written}"
    if reads_tokens and not has_tokens:
        return f"model.vocabulary: {options['vocabulary']}: it reads tokens, {data} numbers"
    if has_tokens and not reads_tokens:
        key = "model.vocabulary: 0" if "vocabulary" in options else "model"
        return f"{key}: it takes numbers, {data} tokens; gpt and lstm read them"
    if "in_channels" in options and inputs.dim() != 4:
        return f"model.in_channels: it takes channels x height x width, {data}"
    return ""


def _count_problems(options: Mapping[str, Any], data: Data, task: Task) -> Iterator[str]:
    if data.classes is None or not isinstance(task, Classification | LanguageModelling):
        return
    is_text = isinstance(task, LanguageModelling)
    word = "tokens" if is_text else "classes"
    for key in _TOKENS if is_text else _CLASSES:
        if key in options and options[key] < data.classes:
            yield f"model.{key}: {options[key]:,}, and the data has {data.classes:,} {word}; make it {data.classes}"


def data_changes(state: Mapping[str, Any], data: Data) -> str:
    """What a run that goes on from a checkpoint with this state.json says of its data; empty where it is the same."""
    before, now = state.get(SAMPLES), len(data.train)
    if before is None or before == now:
        return ""
    return (
        f"THE DATA IS NOT THE SAME: {now:,} samples to train on, and the checkpoint was trained on {before:,}; "
        f"the order of the samples is another one from here on"
    )


def _with_defaults(section: ModelSection) -> dict[str, Any]:
    parameters = inspect.signature(registry.find("model", section.name)).parameters
    return {name: section.options.get(name, parameter.default) for name, parameter in parameters.items()}
