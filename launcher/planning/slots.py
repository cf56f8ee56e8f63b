"""How many points of a sweep fit on one machine at a time, and which of its CPUs and GPUs each of them gets. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.plan import Plan
from launcher.planning.topology import device_index, uses_all_gpus
from launcher.recipe.degrees import ONE_PROCESS

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What one point has for itself."""

    cpus: tuple[int, ...]
    """Empty: a quota holds here, and nobody is pinned."""
    gpus: tuple[int, ...]
    cpu_quota: float | None = None


def divide(facts: Facts, recipes: Sequence[Recipe], *, on_gpus: bool, at_most: int | None) -> tuple[Slot, ...]:
    """One slot for each point that may run at a time: equal parts of the machine.

    A point needs a GPU for each worker, or a CPU for each thread of each worker. Where its recipe leaves the number to
    the machine (`auto`), a worker needs one CPU; a node all GPUs, or its share where `at_most` says how many there are.
    """
    most = min(len(recipes), at_most or len(recipes))
    cpus = max(_workers(recipe) * _threads(recipe) for recipe in recipes)
    fit = min(most, max(1, facts.num_cpus // cpus))
    gpus = [gpu.index for gpu in facts.gpus] if on_gpus else []
    if gpus:
        share = max(1, len(gpus) // (most if at_most else 1))
        needed = max(_gpus(recipe, share, len(gpus)) for recipe in recipes)
        fit = min(most, max(1, len(gpus) // max(1, needed)), max(1, facts.num_cpus // max(1, needed)))
    pinned = facts.num_cpus >= len(facts.cpus)
    cores, cards = len(facts.cpus) // fit, len(gpus) // fit
    return tuple(
        Slot(
            cpus=facts.cpus[number * cores : (number + 1) * cores] if pinned and cores else (),
            gpus=tuple(gpus[number * cards : (number + 1) * cards]),
            cpu_quota=None if pinned or facts.cpu_quota is None else facts.cpu_quota / fit,
        )
        for number in range(fit)
    )


def facts_of_slot(facts: Facts, slot: Slot) -> Facts:
    """The machine as the points of a slot see it."""
    return dataclasses.replace(
        facts,
        cpus=slot.cpus or facts.cpus,
        cpu_quota=facts.cpu_quota if slot.cpu_quota is None else slot.cpu_quota,
        gpus=tuple(gpu for gpu in facts.gpus if gpu.index in slot.gpus) if slot.gpus else facts.gpus,
    )


def in_slot(plan: Plan, first: Slot, slot: Slot) -> Plan:
    """A plan that was made for the first slot, in another one."""
    cpus = dict(zip(first.cpus, slot.cpus, strict=True))
    gpus = dict(zip(first.gpus, slot.gpus, strict=True))
    nodes = tuple(
        dataclasses.replace(
            node,
            cpus=tuple(cpus.get(cpu, cpu) for cpu in node.cpus),
            gpus=tuple(gpus.get(gpu, gpu) for gpu in node.gpus),
        )
        for node in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _workers(recipe: Recipe) -> int:
    nproc = recipe.resources.nproc_per_node
    return recipe.resources.max_nodes * (1 if nproc == "auto" else nproc)


def _threads(recipe: Recipe) -> int:
    threads = recipe.resources.threads
    return 1 if threads == "auto" else threads


def _gpus(recipe: Recipe, share: int, there: int) -> int:
    """GPUs of one point, of those that are there. A certain one (`cuda:1`) is found among all of them alone."""
    device, nodes = recipe.resources.device, recipe.resources.max_nodes
    if device == "cpu":
        return 0
    if device_index(device) is not None:
        return there
    if uses_all_gpus(recipe):
        return max(share, nodes)
    if recipe.resources.nproc_per_node == "auto" and recipe.parallelism.name not in ONE_PROCESS:
        return max(share, nodes)
    return _workers(recipe)
