"""Whether the data goes with the model, and with what the checkpoint was trained on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from jobs import registry
from jobs.data.base import Data
from jobs.loader import Fetch
from jobs.registry import OptionError
from jobs.tasks.base import Task
from jobs.tasks.classification import Classification
from jobs.tasks.language_modelling import LanguageModelling
from launcher.recipe.fit import Samples, misfits
from launcher.recipe.schema import ModelSection

_TASKS = {Classification: "classification", LanguageModelling: "language_modelling"}
SAMPLES = "samples"
"""In the record of a checkpoint: how many there were to train on."""


def check_fit(section: ModelSection, data: Data, task: Task) -> None:
    """Raise OptionError where a model of ours is for other samples than the data has, or for fewer classes or tokens.

    Without this the run ends somewhere in torch: with shapes that cannot be multiplied, with an index out of range, on
    a GPU with an assertion of a kernel.
    """
    if section.target is not None:
        return
    inputs, _ = Fetch(data.train, seed=0)[0, torch.tensor([0])]
    samples = Samples(
        shape=tuple(inputs.shape[1:]),
        are_tokens=not inputs.is_floating_point(),
        classes=data.classes,
        task=next((name for kind, name in _TASKS.items() if isinstance(task, kind)), ""),
    )
    if problems := [message for _, message in misfits(_with_defaults(section), samples)]:
        raise OptionError("\n".join(problems))


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
