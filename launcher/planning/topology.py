"""Who runs where: device, workers per node, GPUs and cores of each node, threads. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.planning.plan import NodePlan
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe


_LARGER = 64
"""A batch that is so many times the one asked for is no hint."""
_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """A problem before it has a place: the key decides where it is shown."""

    key: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the workers compute on."""

    name: str
    """cpu or cuda."""
    reason: str
    """Why, as a sentence without a full stop."""
    nproc_per_node: int

    @property
    def backend(self) -> str:
        """The collectives library that goes with it."""
        return "nccl" if self.name == "cuda" else "gloo"


@dataclass(frozen=True, kw_only=True)
class Threads:
    """CPU threads of each worker."""

    count: int
    value: str
    """OMP_NUM_THREADS as it is set: the user's own may be a list."""
    origin: str


@dataclass
class Remarks:
    """What the steps of planning have to say, collected so that all of it is shown at once."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_device(recipe: Recipe, facts: Facts, remarks: Remarks) -> Device:
    """Resolve `device` and `nproc_per_node`: cuda where every node gets a GPU, else cpu; never less than asked for."""
    resources = recipe.resources
    nodes, num_gpus = resources.max_nodes, len(facts.gpus)
    obstacle = _why_no_cuda(facts, nodes)
    if resources.device == "cpu" or (resources.device == "auto" and obstacle):
        nproc = 1 if resources.nproc_per_node == "auto" else resources.nproc_per_node
        return Device(name="cpu", reason=obstacle if resources.device == "auto" else "as asked", nproc_per_node=nproc)
    if obstacle:
        remarks.problems.append(
            Finding("resources.device", f"resources.device: cuda was asked for, but {obstacle}", "device: cpu, or auto")
        )
    share = max(1, num_gpus // nodes)
    nproc = share if resources.nproc_per_node == "auto" else resources.nproc_per_node
    if not obstacle and nproc * nodes > num_gpus:
        remarks.problems.append(
            Finding(
                "resources.nproc_per_node",
                f"resources.nproc_per_node: {_workers(nodes, nproc)} need a GPU each, but there {_are(num_gpus)} here",
                f"nproc_per_node: {share}, or device: cpu",
            )
        )
    if not obstacle and resources.nproc_per_node == "auto" and (idle := num_gpus - nproc * nodes):
        remarks.notes.append(f"{idle} of {count(num_gpus, 'GPU')} stay idle: {nodes} nodes get {nproc} each")
    reason = "as asked" if resources.device == "cuda" else f"{count(num_gpus, 'GPU')} for {count(nodes, 'node')}"
    return Device(name="cuda", reason=reason, nproc_per_node=nproc)


def choose_threads(recipe: Recipe, facts: Facts, workers: int, where: str, remarks: Remarks) -> Threads:
    """CPU threads per worker: the recipe's, else the user's OMP_NUM_THREADS, else the CPUs shared out (F075).

    `workers` are those of this machine; `where` is the origin of an explicit `resources.threads`.
    """
    asked, exported = recipe.resources.threads, facts.environment.get("OMP_NUM_THREADS")
    share = max(1, facts.num_cpus // workers)
    if asked != "auto":
        if exported is not None and exported != str(asked):
            remarks.notes.append(
                f"OMP_NUM_THREADS={asked} from resources.threads; {exported} in the environment is not used"
            )
        if asked * workers > facts.num_cpus and asked > 1:
            remarks.notes.append(
                f"{workers} workers x {asked} threads on {facts.num_cpus} CPUs: they will wait for each other; "
                f"resources.threads: auto would give {share}"
            )
        return Threads(count=asked, value=str(asked), origin=where)
    own = recipe.env.get("OMP_NUM_THREADS")
    if own is not None:
        return _given_threads("env.OMP_NUM_THREADS", own, "recipe:env.OMP_NUM_THREADS", remarks)
    if exported is not None:
        return _given_threads("OMP_NUM_THREADS", exported, "environment", remarks)
    return Threads(
        count=share, value=str(share), origin=f"auto: {count(facts.num_cpus, 'CPU')} / {count(workers, 'worker')}"
    )


def place_nodes(recipe: Recipe, facts: Facts, device: Device, address: str, remarks: Remarks) -> tuple[NodePlan, ...]:
    """All nodes on this machine: its GPUs in order, its cores in equal parts (affinity, never a number of workers)."""
    nodes, nproc = recipe.resources.max_nodes, device.nproc_per_node
    cores = _core_parts(facts, nodes, remarks)
    indices = [gpu.index for gpu in facts.gpus] if device.name == "cuda" else []
    return tuple(
        NodePlan(
            index=node,
            host=facts.hostname,
            address=address,
            cpus=cores[node],
            gpus=tuple(indices[node * nproc : (node + 1) * nproc]),
        )
        for node in range(nodes)
    )


def check_batch(recipe: Recipe, nproc: int, remarks: Remarks) -> None:
    """The global batch divides by world size x accumulate, or each rank would see another number of samples.

    Of MIN:MAX nodes it does so for every number of them, since any of these may be what is left.
    """
    if recipe.data is None or recipe.train is None:
        return
    resources, batch, accumulate = recipe.resources, recipe.data.global_batch_size, recipe.train.accumulate
    counts = range(resources.min_nodes, resources.max_nodes + 1)
    unfit = [nodes for nodes in counts if batch % (nodes * nproc * accumulate)]
    if not unfit:
        return
    nodes = unfit[-1]
    parts = nodes * nproc * accumulate
    also = f", nor with {_listed(unfit[:-1])} of {resources.nodes} nodes" if unfit[:-1] else ""
    of_range = f", of {resources.nodes}" if resources.is_elastic else ""
    remarks.problems.append(
        Finding(
            "data.global_batch_size",
            f"data.global_batch_size: {batch} does not divide by {parts} = world size {nodes * nproc} "
            f"(nodes {nodes}{of_range} x nproc_per_node {nproc}) x train.accumulate {accumulate}{also}",
            _batch_hint(batch, [count * nproc * accumulate for count in counts], resources.nodes),
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


def check_elastic(recipe: Recipe, remarks: Remarks, *, resumable: bool) -> None:
    """Another number of nodes takes a restart, which needs something to go on from."""
    nodes = recipe.resources.nodes
    if resumable or not recipe.resources.is_elastic:
        return
    remarks.problems.append(
        Finding(
            "resources.nodes",
            f"resources.nodes: {nodes} goes on with fewer nodes by a restart, which needs something to go on from, "
            f"and there is no `resume:`",
            f"add `resume:` (self, lightning, hf, or {{newest, args}}), or nodes: {recipe.resources.max_nodes}",
        )
    )


def check_strategy(recipe: Recipe, world_size: int, remarks: Remarks) -> None:
    """`single` is one rank."""
    if recipe.is_script or recipe.parallelism.name != "single" or world_size == 1:
        return
    remarks.problems.append(
        Finding(
            "parallelism.strategy",
            f"parallelism.strategy: single is one rank, but the world size is {world_size} "
            f"(nodes {recipe.resources.nodes} x nproc_per_node {world_size // recipe.resources.max_nodes})",
            "strategy: ddp, or nodes: 1 and nproc_per_node: 1",
        )
    )


def _why_no_cuda(facts: Facts, nodes: int) -> str:
    """Empty where every node gets a GPU that torch can use."""
    if facts.gpu_fault:
        return f"the GPU driver of this machine does not answer ({facts.gpu_fault})"
    if not facts.gpus:
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
        return "this machine has no GPU" + (
            f" that CUDA_VISIBLE_DEVICES={visible} names" if visible is not None else ""
        )
    if (facts.torch_version or "").endswith("+cpu"):
        return f"torch {facts.torch_version} is built without CUDA"
    if len(facts.gpus) < nodes:
        return f"{count(len(facts.gpus), 'GPU')} cannot be shared out over {count(nodes, 'node')}"
    return ""


def _core_parts(facts: Facts, nodes: int, remarks: Remarks) -> Sequence[tuple[int, ...]]:
    """Cores of each node, in order; empty tuples where nodes share them all."""
    cpus = facts.cpus
    if nodes == 1:
        return (cpus,)
    if facts.num_cpus < len(cpus):
        # A quota is time on any core. Pinning to the first few would meet every other container that does so.
        remarks.notes.append(f"a quota of {facts.num_cpus} CPUs holds here, so nodes are not pinned to cores")
        return ((),) * nodes
    if len(cpus) < nodes:
        remarks.notes.append(f"{nodes} nodes share {count(len(cpus), 'CPU core')}: expect it to be slow")
        return ((),) * nodes
    size, more = divmod(len(cpus), nodes)
    starts = [node * size + min(node, more) for node in range(nodes + 1)]
    return [cpus[starts[node] : starts[node + 1]] for node in range(nodes)]


def _given_threads(key: str, text: str, origin: str, remarks: Remarks) -> Threads:
    """The user's own value; a list such as `4,2` has the number of the outermost level first."""
    first = text.split(",", maxsplit=1)[0].strip()
    if not first.isdecimal() or int(first) < 1:
        remarks.problems.append(Finding(key, f"{key}: {text!r} is not a number of threads", "a whole number from 1 on"))
        return Threads(count=1, value=text, origin=origin)
    return Threads(count=int(first), value=text, origin=origin)


def _workers(nodes: int, nproc: int) -> str:
    return f"{nproc} per node x {count(nodes, 'node')} = {nodes * nproc} workers"


def _listed(numbers: Sequence[int]) -> str:
    """The last few of them: `2, 3 or 5`."""
    shown = [str(number) for number in numbers[-_NAMED:]]
    more = [f"{len(numbers) - _NAMED} fewer"] if len(numbers) > _NAMED else []
    *first, last = [*more, *shown]
    return f"{', '.join(first)} or {last}" if first else last


def _are(number: int) -> str:
    return f"is {number}" if number == 1 else f"are {number}"
