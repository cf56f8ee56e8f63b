"""How the ranks share a training: degrees against the world size, the batch, and the model. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.planning.strategy_options import check_strategy
from launcher.planning.topology import Finding
from launcher.recipe.catalog import catalog
from launcher.recipe.degrees import ONE_PROCESS, WITH_FSDP, Degrees, DegreesError, resolve_degrees
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.topology import Device, Remarks
    from launcher.recipe.catalog import Entry
    from launcher.recipe.schema import ParallelismSection, Recipe

_LARGER = 64
"""A batch that is so many times the one asked for is no hint."""
_NAMED = 4
_SHOWN = 8
"""So many degrees that would fit are named."""
_OF_PRODUCTS = ("sync_batchnorm",)
"""Options of ddp that replicas beside tp or pp have, too."""


def check_sharing(recipe: Recipe, device: Device, remarks: Remarks) -> None:
    """All that a training asks of the number of its ranks, for every number of nodes that it may have."""
    if recipe.data is None or recipe.train is None or recipe.model is None:
        return
    nproc, is_auto = device.nproc_per_node, recipe.resources.nproc_per_node == "auto"
    why = "" if not is_auto else ", auto: one per GPU" if device.name == "cuda" else ", auto: one on CPU"
    found = _degrees(recipe, nproc, remarks, "" if recipe.parallelism.name in ONE_PROCESS else why)
    _check_batch(recipe, nproc, found, remarks)
    remarks.problems += check_strategy(recipe)
    if recipe.parallelism.name not in ONE_PROCESS:  # which have neither tp nor pp, as was said then
        remarks.problems += _of_model(recipe)
        remarks.problems += _of_whole_states(recipe)


def holds_whole(recipe: Recipe) -> bool:
    """Whether each rank of a training has all of its state, so that it can keep it without the others."""
    return recipe.parallelism.name not in WITH_FSDP and recipe.parallelism.tp * recipe.parallelism.pp == 1


def sharing_text(section: ParallelismSection, *, least: int, most: int, nproc: int) -> str:
    """`fsdp: fsdp 2 x tp 2`; of an elastic run, from least to most nodes, `ddp: dp 1 to 4`."""
    low, high = (resolve_degrees(section, world_size=nodes * nproc, nodes=nodes) for nodes in (least, most))
    if low == high:
        return f"{section.name}: {high}" if high.size > 1 else section.name
    sizes = [(field.name, getattr(low, field.name), getattr(high, field.name)) for field in dataclasses.fields(high)]
    texts = [f"{name} {low} to {high}" if low != high else f"{name} {high}" for name, low, high in sizes if high > 1]
    return f"{section.name}: {' x '.join(texts)}"


def _degrees(recipe: Recipe, nproc: int, remarks: Remarks, why: str) -> Mapping[int, Degrees]:
    """By the number of nodes. What does not fit is a problem, and replicas are as many as there is room for then."""
    found: dict[int, Degrees] = {}
    errors: dict[int, DegreesError] = {}
    for nodes in _counts(recipe):
        try:
            found[nodes] = resolve_degrees(recipe.parallelism, world_size=nodes * nproc, nodes=nodes)
        except DegreesError as unfit:
            errors[nodes] = unfit
            of_model = Degrees(tp=recipe.parallelism.tp, pp=recipe.parallelism.pp)
            dp, rest = divmod(nodes * nproc, of_model.size)
            if not rest:
                found[nodes] = dataclasses.replace(of_model, dp=dp)
    if errors:
        *others, nodes = errors
        error = errors[nodes]
        message = error.message
        if "world size" in message:
            message += f" ({_product(recipe, nodes, nproc)}{why})"
            message += f"; nor does it fit {_listed(others)} of {recipe.resources.nodes} nodes" if others else ""
        remarks.problems.append(Finding(error.key, message, error.hint))
    return found


def _check_batch(recipe: Recipe, nproc: int, degrees: Mapping[int, Degrees], remarks: Remarks) -> None:
    """The global batch divides by data-parallel ranks x accumulate, or each would see another number of samples.

    Of MIN:MAX nodes it does so for every number of them, since any of these may be what is left.
    """
    assert recipe.data is not None, "the caller has looked"
    assert recipe.train is not None, "the caller has looked"
    batch, accumulate, asked = recipe.data.global_batch_size, recipe.train.accumulate, recipe.resources.nodes
    unfit = [nodes for nodes, each in degrees.items() if batch % (each.data * accumulate)]
    if not unfit:
        return
    nodes = unfit[-1]
    shares = degrees[nodes].data
    ranks = f"world size {shares}"
    if degrees[nodes].model > 1:
        of_model = dataclasses.replace(degrees[nodes], dp=1, fsdp=1)
        ranks = f"{count(shares, 'data-parallel rank')} (world size {degrees[nodes].size} by {of_model})"
    also = f", nor with {_listed(unfit[:-1])} of {asked} nodes" if unfit[:-1] else ""
    remarks.problems.append(
        Finding(
            "data.global_batch_size",
            f"data.global_batch_size: {batch} does not divide by {shares * accumulate} = {ranks} "
            f"({_product(recipe, nodes, nproc)}) x train.accumulate {accumulate}{also}",
            _batch_hint(batch, [each.data * accumulate for each in degrees.values()], asked),
        )
    )


def _batch_hint(batch: int, divisors: Sequence[int], nodes: object) -> str:
    """The nearest batches that divide by all of these; where there is none of a size that one would take, the range."""
    parts = math.lcm(*divisors)
    below, above = batch // parts * parts, -(-batch // parts) * parts
    if len(divisors) > 1 and above > _LARGER * batch:
        return f"one that does for all of {nodes} nodes is {above} or more: another range, or a fixed number"
    which = f" for all of {nodes} nodes" if len(divisors) > 1 else ""
    return f"the nearest that do{which}: {below} or {above}" if below else f"the smallest that does{which}: {above}"


def _of_model(recipe: Recipe) -> Iterator[Finding]:
    """What tensor and pipeline parallel ask of the batch, the strategy and the model."""
    assert recipe.train is not None, "the caller has looked"
    tp, pp, accumulate = recipe.parallelism.tp, recipe.parallelism.pp, recipe.train.accumulate
    if tp * pp == 1:
        return
    if accumulate < pp:
        message = f"train.accumulate: {accumulate} micro-batch{'es' * (accumulate > 1)} for parallelism.pp: {pp} stages"
        hint = f"accumulate: {pp} or more, of which each stage has one at a time; {4 * pp} keep them busy"
        yield Finding("train.accumulate", message, hint)
    yield from _of_ddp(recipe)
    assert recipe.model is not None, "the caller has looked"
    entry = catalog("models").get(recipe.model.name)
    if entry is not None:
        defaults = {option.name: option.default for option in entry.options}
        yield from _of_options(entry, {**defaults, **recipe.model.options}, recipe.parallelism)


def _of_whole_states(recipe: Recipe) -> Iterator[Finding]:
    """What is kept in memory is kept by one rank alone, which has to have all of it."""
    if holds_whole(recipe):
        return
    cut = (
        f"strategy {recipe.parallelism.name}"
        if recipe.parallelism.tp * recipe.parallelism.pp == 1
        else _of_both(recipe)
    )
    if recipe.faults.rescue is True:
        message = f"faults.rescue: true, and with {cut} no rank has all of the state, so a survivor cannot keep it"
        yield Finding("faults.rescue", message, "rescue: auto; a restart goes on from the last checkpoint")
    if recipe.checkpoint.memory_every is not None:
        every = recipe.checkpoint.memory_every
        message = f"checkpoint.memory_every: {every}, and with {cut} no rank has all of the state to put into memory"
        yield Finding("checkpoint.memory_every", message, "leave it out; checkpoint.every saves more often")


def _of_ddp(recipe: Recipe) -> Iterator[Finding]:
    """Replicas beside tp or pp are not made by DistributedDataParallel, whose options have no meaning then."""
    entry = catalog("strategies").get("ddp")
    if entry is None or recipe.parallelism.name != entry.name:
        return
    for option in entry.options:
        value = recipe.parallelism.options.get(option.name, option.default)
        if value != option.default and option.name not in _OF_PRODUCTS:
            message = f"parallelism.{option.name}: {value} is of ddp alone, and parallelism has {_of_both(recipe)}"
            yield Finding(f"parallelism.{option.name}", message, f"leave out {option.name}, or tp and pp")


def _of_options(entry: Entry, options: Mapping[str, Any], section: ParallelismSection) -> Iterator[Finding]:
    """What a model says of its own options: they divide by tp, they go with neither, there are as many layers."""
    tp, pp = section.tp, section.pp
    if tp > 1 and entry.tp_divides is None:
        able = ", ".join(name for name, each in catalog("models").items() if each.tp_divides is not None)
        message = f"parallelism.tp: {tp}, and `{entry.name}` has no layers that several ranks could compute together"
        yield Finding("parallelism.tp", message, f"tp: 1; models that have: {able}")
    for name in entry.tp_divides or ():
        value = options.get(name)
        if isinstance(value, int) and value % tp:
            message = f"parallelism.tp: {tp} does not divide model.{name}, which is {value}"
            fit = [str(degree) for degree in range(1, value + 1) if value % degree == 0][:_SHOWN]
            yield Finding("parallelism.tp", message, f"tp: one of {', '.join(fit)}; or {name}: {-(-value // tp) * tp}")
    for name in entry.undivided:
        if options.get(name):
            message = f"model.{name}: true, and parallelism divides the model (tp {tp}, pp {pp})"
            yield Finding(f"model.{name}", message, f"{name}: false, or tp: 1 and pp: 1")
    layers = None if entry.layers is None else options.get(entry.layers)
    if isinstance(layers, int) and layers < pp:
        message = f"parallelism.pp: {pp} stages, and model.{entry.layers} is {layers}: a stage has at least one"
        yield Finding("parallelism.pp", message, f"pp: {layers} at most, or {entry.layers}: {pp}")


def _of_both(recipe: Recipe) -> str:
    return str(Degrees(tp=recipe.parallelism.tp, pp=recipe.parallelism.pp))


def _counts(recipe: Recipe) -> range:
    return range(recipe.resources.min_nodes, recipe.resources.max_nodes + 1)


def _product(recipe: Recipe, nodes: int, nproc: int) -> str:
    of_range = f", of {recipe.resources.nodes}" if recipe.resources.is_elastic else ""
    return f"nodes {nodes}{of_range} x nproc_per_node {nproc}"


def _listed(numbers: Sequence[int]) -> str:
    """The last few of them: `2, 3 or 5`."""
    shown = [str(number) for number in numbers[-_NAMED:]]
    more = [f"{len(numbers) - _NAMED} fewer"] if len(numbers) > _NAMED else []
    *first, last = [*more, *shown]
    return f"{', '.join(first)} or {last}" if first else last
