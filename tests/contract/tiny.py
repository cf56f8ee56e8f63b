"""The smallest training that is one: what tests of the built-in job train."""

from __future__ import annotations

from typing import Any


def tiny(**sections: Any) -> dict[str, Any]:
    """A recipe that trains in a second: 96 samples, 6 steps per epoch."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "model": {"name": "mlp", "in_features": 20, "hidden": 16, "classes": 4, "dropout": 0.1},
        "data": {"name": "synthetic", "samples": 90, "eval_samples": 33, "shape": "20", "classes": 4,
                 "global_batch_size": 16},
        "train": {"until": "40 epochs", "optimizer": {"name": "adamw", "lr": 0.01}, "eval_every": "10 epochs"},
        "checkpoint": {"every": "20 steps", "keep": 2},
        "tracking": {"wandb": {"mode": "disabled"}},
    }  # fmt: skip
    for name, section in sections.items():
        both_dicts = isinstance(section, dict) and isinstance(recipe.get(name), dict)
        recipe[name] = {**recipe[name], **section} if both_dicts else section
    return recipe
