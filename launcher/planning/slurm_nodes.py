"""What a node of a job gives: GPUs, workers, CPUs. From recipe and profile, never from a login node. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.plan import NodePlan
from launcher.planning.slurm_facts import gpus_in
from launcher.planning.topology import (
    Device,
    Finding,
    Remarks,
    check_devices,
    device_index,
    uses_all_gpus,
    workers_of,
)
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """What one node gives to a job; all nodes are alike."""

    device: Device
    gpus: int
    cpus: int
    cpus_key: str
    """The key that decided about the CPUs; `plan` where none did."""


def shape_nodes(recipe: Recipe, facts: Facts, remarks: Remarks, *, inside: bool) -> NodeShape:
    """Resolve device, workers and CPUs. `inside`: the job is the one that this process is in."""
    gpus = _gpus(recipe, remarks)
    if inside and facts.allocation is not None:
        gpus = facts.allocation.gpus_per_node
    device = _device(recipe, gpus, remarks, inside=inside)
    cpus, key = _cpus(recipe, device, gpus, remarks)
    if inside and facts.allocation is not None and facts.allocation.cpus_per_node is not None:
        cpus, key = facts.allocation.cpus_per_node, "plan"
    return NodeShape(device=device, gpus=gpus, cpus=cpus, cpus_key=key)


def on_node(facts: Facts, shape: NodeShape) -> Facts:
    """The facts as far as threads are concerned, with the CPUs of a node in place of those of this machine."""
    return dataclasses.replace(facts, cpus=tuple(range(shape.cpus)), cpu_quota=None)


def nodes_of_job(recipe: Recipe, shape: NodeShape) -> tuple[NodePlan, ...]:
    """Nodes without names: they, and their CPUs, are bound where they are. GPUs count from 0 in what SLURM gives."""
    gpus = tuple(range(shape.device.gpus_per_node)) if shape.device.name == "cuda" else ()
    return tuple(
        NodePlan(index=index, host="", address="", cpus=(), gpus=gpus) for index in range(recipe.resources.max_nodes)
    )


def _gpus(recipe: Recipe, remarks: Remarks) -> int:
    asked, gres = recipe.slurm.gpus_per_node, recipe.slurm.gres
    in_gres = gpus_in(gres or "")
    if asked is not None and in_gres and asked != in_gres:
        remarks.problems.append(
            Finding(
                "slurm.gres",
                f"slurm.gres: {gres} are {count(in_gres, 'GPU')} per node, but slurm.gpus_per_node is {asked}",
                "keep one of the two",
            )
        )
    return in_gres or asked or 0


def _device(recipe: Recipe, gpus: int, remarks: Remarks, *, inside: bool) -> Device:
    hint = "device: cpu or auto" if inside else "slurm.gpus_per_node: N, slurm.gres: gpu:N, or a profile that has it"
    more = "slurm.gpus_per_node: {}, "
    where = "the allocation gives" if inside else "the job asks for"
    one = ("; which ones a job gets, SLURM decides", " and slurm.gpus_per_node: 1")
    return device_of_node(recipe, gpus, remarks, where=where, hint=hint, more=more, one=one)


def device_of_node(
    recipe: Recipe,
    gpus: int,
    remarks: Remarks,
    *,
    where: str,
    hint: str,
    more: str = "",
    one: tuple[str, str] = ("; which one each host uses, its node decides", ""),
) -> Device:
    """Device and workers of a node with so many GPUs; all nodes are alike.

    where: `the job asks for`; `each host has`, which needs no "per node".
    hint: what helps where there is none; more: what would ask for `{}`.
    one: what follows the sentence about one GPU, and its hint.
    """
    resources, per = recipe.resources, "" if where.startswith("each ") else " per node"
    asked = None if resources.nproc_per_node == "auto" else resources.nproc_per_node
    if resources.device == "cpu" or (resources.device == "auto" and not gpus):
        reason = "as asked" if resources.device == "cpu" else f"{where} no GPU"
        return Device(name="cpu", reason=reason, nproc_per_node=asked or 1)
    if device_index(resources.device) is not None:
        message = f"resources.device: {resources.device} is one GPU of a machine{one[0]}"
        remarks.problems.append(Finding("resources.device", message, f"device: cuda, with nproc_per_node: 1{one[1]}"))
    elif not gpus:
        remarks.problems.append(
            Finding("resources.device", f"resources.device: cuda was asked for, but {where} no GPU", hint)
        )
    if gpus and asked is not None and asked > gpus:
        remarks.problems.append(
            Finding(
                "resources.nproc_per_node",
                f"resources.nproc_per_node: {asked} workers of a node need a GPU each, but {where} {gpus}{per}",
                f"nproc_per_node: {gpus}, {more.format(asked)}or device: cpu",
            )
        )
    if gpus:
        check_devices(recipe, gpus, where, remarks)
    nproc, why = workers_of(recipe, max(1, gpus))
    used = max(nproc, gpus) if uses_all_gpus(recipe) else nproc
    if gpus > used:
        remarks.notes.append(f"{gpus - used} of {gpus} GPUs of each node stay idle: {count(nproc, 'worker')} per node")
    reason = "as asked" if resources.device != "auto" else f"{where} {count(gpus, 'GPU')}{per}"
    return Device(name="cuda", reason=reason, nproc_per_node=nproc, nproc_reason=why, gpus_per_node=used)


def _cpus(recipe: Recipe, device: Device, gpus: int, remarks: Remarks) -> tuple[int, str]:
    """CPUs of a node for all its workers, and the key that says so."""
    slurm, nproc = recipe.slurm, device.nproc_per_node
    if slurm.cpus_per_node is not None and slurm.cpus_per_gpu is not None:
        remarks.problems.append(
            Finding(
                "slurm.cpus_per_gpu",
                f"slurm.cpus_per_gpu: {slurm.cpus_per_gpu} here, and slurm.cpus_per_node is {slurm.cpus_per_node}",
                "keep one of the two",
            )
        )
    if slurm.cpus_per_node is not None:
        return slurm.cpus_per_node, "slurm.cpus_per_node"
    if slurm.cpus_per_gpu is not None:
        return slurm.cpus_per_gpu * (gpus if device.name == "cuda" else nproc), "slurm.cpus_per_gpu"
    loaders = 0 if recipe.data is None else recipe.data.loader_workers
    threads = 1 if recipe.resources.threads == "auto" else recipe.resources.threads
    return nproc * (threads + loaders), "plan" if recipe.resources.threads == "auto" else "resources.threads"
