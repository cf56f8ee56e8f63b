"""What to change before a run goes on: keys of its recipe, with values that are likely to help. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
_UNUSED = re.compile(r"(?P<unused>\d[\d.]* \w+) is reserved by PyTorch but unallocated")


@dataclass(frozen=True)
class Remedy:
    """One key to try."""

    change: str
    """`KEY=VALUE` for `launch resume`."""
    brings: str


def changed_value(cause: Cause | None, plan: Plan) -> str | None:
    """The first one to try; None where nothing is likely enough to help. Of a script only its arguments are."""
    found = remedies(cause, plan)
    return found[0].change if found and (plan.worker.kind == "job" or found[0].change.startswith("args.")) else None


def remedies(cause: Cause | None, plan: Plan, message: str = "") -> list[Remedy]:
    """What to try, one after the other: what changes least comes first. message: what was raised."""
    if cause is Cause.OOM:
        return [*_smaller_batch(plan), *_fewer_bytes(plan), *_allocator(plan, message)]
    if cause is Cause.OOM_HOST:
        return [*_smaller_batch(plan), *_of_the_host(plan)]
    if cause is Cause.OOM_KILLED:
        return [*_fewer_loaders(plan), *_smaller_batch(plan), *_of_the_host(plan)]
    if cause is Cause.NAN:
        lr = _section(_section(plan.recipe, "train"), "optimizer").get("lr")
        return [Remedy(f"train.optimizer.lr={lr / 10:g}", "a tenth")] if isinstance(lr, float) and lr > 0 else []
    return []


def _smaller_batch(plan: Plan) -> Iterator[Remedy]:
    if plan.worker.kind == "script":
        args = {name.lower().replace("-", "_"): name for name in _section(plan.recipe, "args")}
        for known in _BATCH_ARGS:
            value = _section(plan.recipe, "args").get(args.get(known, ""))
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                yield Remedy(f"args.{args[known]}={value // 2}", "half the samples at once")
                return
        return
    accumulate = _section(plan.recipe, "train").get("accumulate", 1)
    batch = _section(plan.recipe, "data").get("global_batch_size")
    if isinstance(accumulate, int) and isinstance(batch, int) and batch % (_shares(plan) * accumulate * 2) == 0:
        yield Remedy(f"train.accumulate={accumulate * 2}", "half the samples at once, the same training")


def _fewer_bytes(plan: Plan) -> Iterator[Remedy]:
    """What the built-in program can do without."""
    if plan.worker.kind == "script":
        return
    train, parallelism = _section(plan.recipe, "train"), _section(plan.recipe, "parallelism")
    if train.get("precision", "fp32") in ("fp32", "tf32"):
        yield Remedy("train.precision=bf16", "activations in 16 bits")
    strategy = parallelism.get("strategy", "ddp")
    if not train.get("activation_checkpointing") and strategy != "data_parallel":
        yield Remedy("train.activation_checkpointing=true", "activations of a layer are computed again, for time")
    if strategy == "ddp" and _shares(plan) > 1 and parallelism.get("dp", "auto") == "auto":
        yield Remedy(
            "parallelism.strategy=fsdp",
            f"parameters, gradients and optimizer are shared out over {_shares(plan)} ranks",
        )


def _allocator(plan: Plan, message: str) -> Iterator[Remedy]:
    """Blocks that are held and not in use."""
    if _section(plan.recipe, "resources").get("alloc", "default") == "default":
        unused = _UNUSED.search(message)
        lost = f": {unused['unused']} were held and not in use" if unused else ""
        yield Remedy("resources.alloc=expandable_segments", f"less is lost between blocks{lost}")


def _of_the_host(plan: Plan) -> Iterator[Remedy]:
    if plan.device == "cpu":
        yield from _fewer_bytes(plan)
    if plan.worker.kind != "script" and _section(plan.recipe, "checkpoint").get("asynchronous", True):
        yield Remedy("checkpoint.asynchronous=false", "no copy of the state while it is saved; the training waits")


def _fewer_loaders(plan: Plan) -> Iterator[Remedy]:
    loaders = _section(plan.recipe, "data").get("loader_workers")
    if isinstance(loaders, int) and loaders > 0:
        yield Remedy(f"data.loader_workers={loaders // 2}", "half the loader processes")


def _shares(plan: Plan) -> int:
    """Ranks that have samples of their own."""
    parallelism = _section(plan.recipe, "parallelism")
    return max(1, plan.world_size // (int(parallelism.get("tp", 1)) * int(parallelism.get("pp", 1))))


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}
