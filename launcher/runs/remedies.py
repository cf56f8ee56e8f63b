"""What to change before a run goes on: a key that its recipe has, with a value that is likely to help. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.runs.states import Cause

if TYPE_CHECKING:
    from launcher.planning.plan import Plan

_BATCH_ARGS = (
    "per_device_train_batch_size",
    "per_device_batch_size",
    "micro_batch_size",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "batch_size",
)
"""Names that scripts give the batch of one rank, the more certain first."""


def changed_value(cause: Cause | None, plan: Plan) -> str | None:
    """`KEY=VALUE` for `launch resume`; None where the recipe has no such key, or nothing would follow from it."""
    if cause in (Cause.OOM, Cause.OOM_HOST):
        return _smaller_batch(plan)
    if cause is Cause.OOM_KILLED:
        return _fewer_loaders(plan) or _smaller_batch(plan)
    if cause is Cause.NAN:
        lr = _section(_section(plan.recipe, "train"), "optimizer").get("lr")
        return f"train.optimizer.lr={lr / 10:g}" if isinstance(lr, float) and lr > 0 else None
    return None


def _smaller_batch(plan: Plan) -> str | None:
    if plan.worker.kind == "script":
        args = {name.lower().replace("-", "_"): name for name in _section(plan.recipe, "args")}
        for known in _BATCH_ARGS:
            value = _section(plan.recipe, "args").get(args.get(known, ""))
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return f"args.{args[known]}={value // 2}"
        return None
    accumulate = _section(plan.recipe, "train").get("accumulate", 1)
    batch = _section(plan.recipe, "data").get("global_batch_size")
    if not isinstance(accumulate, int) or not isinstance(batch, int):
        return None
    return None if batch % (plan.world_size * accumulate * 2) else f"train.accumulate={accumulate * 2}"


def _fewer_loaders(plan: Plan) -> str | None:
    loaders = _section(plan.recipe, "data").get("loader_workers")
    return f"data.loader_workers={loaders // 2}" if isinstance(loaders, int) and loaders > 0 else None


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}
