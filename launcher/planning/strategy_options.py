"""Options of a strategy that do not go with the training, or with anything, wherever it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.planning.topology import Finding

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe

LEAST = {"bucket_cap_mb": 1, "powersgd_rank": 1, "powersgd_start": 2, "devices": 0}
"""Option -> its least value. PyTorch takes less of some of them, and does something else then."""


def check_strategy(recipe: Recipe) -> Iterator[Finding]:
    """What is wrong with the options of the strategy, all of it."""
    options = recipe.parallelism.options
    for name, least in LEAST.items():
        value = options.get(name)
        if isinstance(value, int) and value < least:
            yield Finding(
                f"parallelism.{name}", f"parallelism.{name}: {value} is less than {least}", f"{name}: {least} or more"
            )
    if options.get("comm") == "powersgd":
        yield from _of_powersgd(recipe)


def _of_powersgd(recipe: Recipe) -> Iterator[Finding]:
    """It adds what it left out of a step to a later one: a gradient that is not finite would stay for ever."""
    why = "and parallelism.comm is powersgd, in whose memory a gradient that is not finite would stay"
    if recipe.train is not None and recipe.train.precision == "fp16":
        yield Finding("train.precision", f"train.precision: fp16, {why}", "precision: bf16; or comm: fp16 or bf16")
    if (on_nan := recipe.faults.on_nan) != "stop":
        yield Finding("faults.on_nan", f"faults.on_nan: {on_nan}, {why}", "on_nan: stop; or comm: fp16 or bf16")
