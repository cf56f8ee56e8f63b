"""The layers of a model: sizes that divide, and what is done to them against what it is made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.planning.topology import Finding
from launcher.recipe.catalog import catalog

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe

WHOLE = ("single", "ddp")
"""Strategies that call a model as a whole, where it is not divided: there a plain row of layers can be taken as one."""
_OF_BLOCKS = ("compile", "activation_checkpointing")


def check_layers(recipe: Recipe) -> Iterator[Finding]:
    """Sizes that do not divide; options of `train` that this model, or the strategy, has no layers for.

    Of a `target` the worker says it.
    """
    if recipe.train is None or recipe.model is None:
        return
    train, section = recipe.train, recipe.parallelism
    keys = [key for key in _OF_BLOCKS if getattr(train, key)]
    if section.name == "data_parallel":
        for key in keys:
            yield Finding(
                f"train.{key}", f"train.{key}: true does not go with strategy data_parallel", "strategy: ddp, or single"
            )
        keys = []
    entry = catalog("models").get(recipe.model.name)
    if entry is None:
        return
    options = {option.name: option.default for option in entry.options} | recipe.model.options
    for name, of in entry.divides.items():
        if options[of] % options[name]:
            message = f"model.{of}: {options[of]} does not divide by model.{name}, which is {options[name]}"
            fit = -(-options[of] // options[name]) * options[name]
            yield Finding(f"model.{of}", message, f"the next that does: {fit}")
    if entry.made_of is None:
        return
    if train.channels_last and "convolutions" not in entry.made_of:
        message = f"train.channels_last: true, and `{entry.name}` has no convolution over images"
        hint = f"channels_last: false; models that have: {_with('convolutions')}"
        yield Finding("train.channels_last", message, hint)
    if "blocks" in entry.made_of:
        return
    is_cut = section.tp * section.pp > 1
    for key in keys if is_cut or section.name not in WHOLE else []:
        which = f"tp {section.tp}, pp {section.pp}" if is_cut else f"strategy {section.name}"
        message = f"train.{key}: true works on blocks, and `{entry.name}` is a plain row of layers, divided by {which}"
        hint = f"{key}: false; a model with blocks ({_with('blocks')}); or ddp without tp and pp"
        yield Finding(f"train.{key}", message, hint)
    if len(keys) > 1:
        message = (
            f"train.compile and train.activation_checkpointing: `{entry.name}` is a plain row of layers, which is "
            "compiled as a whole or computed again in runs"
        )
        yield Finding("train.compile", message, "keep one of the two")


def _with(part: str) -> str:
    return ", ".join(name for name, each in catalog("models").items() if part in (each.made_of or ()))
