"""Who runs where: device, workers per node, GPUs and cores of each node, threads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.planning.plan import NodePlan
from launcher.recipe.degrees import MANY_DEVICES, ONE_PROCESS
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe


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
    nproc_reason: str = ""
    """Why so many workers, as the origin of a value; empty where the recipe says it, or nobody had to."""
    gpus_per_node: int = 1
    """How many GPUs the workers of a node have."""
    index: int | None = None
    """Of `cuda:N`: which one of this machine."""

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
        message = f"resources.device: {resources.device} was asked for, but {obstacle}"
        remarks.problems.append(Finding("resources.device", message, "device: cpu, or auto"))
    if (index := device_index(resources.device)) is not None:
        return _one_gpu(recipe, facts, index, remarks, known=not obstacle)
    share = max(1, num_gpus // nodes)
    nproc, why = workers_of(recipe, share)
    if not obstacle and nproc * nodes > num_gpus:
        remarks.problems.append(
            Finding(
                "resources.nproc_per_node",
                f"resources.nproc_per_node: {_workers(nodes, nproc)} need a GPU each, but there {_are(num_gpus)} here",
                f"nproc_per_node: {share}, or device: cpu",
            )
        )
    used = max(nproc, share) if uses_all_gpus(recipe) else nproc
    if not obstacle:
        check_devices(recipe, share, "this machine has", remarks)
    if not obstacle and resources.nproc_per_node == "auto" and (idle := num_gpus - used * nodes):
        each = f"{nodes} nodes get {used} each" if nodes > 1 else f"the node gets {used}"
        remarks.notes.append(f"{idle} of {count(num_gpus, 'GPU')} stay idle: {each}")
    reason = "as asked" if resources.device == "cuda" else f"{count(num_gpus, 'GPU')} for {count(nodes, 'node')}"
    return Device(name="cuda", reason=reason, nproc_per_node=nproc, nproc_reason=why, gpus_per_node=used)


def device_index(device: str) -> int | None:
    """The N of `cuda:N`."""
    _, colon, index = device.partition(":")
    return int(index) if colon else None


def uses_all_gpus(recipe: Recipe) -> bool:
    """Whether one process of the training has all GPUs of its node."""
    return not recipe.is_script and recipe.parallelism.name in MANY_DEVICES


def workers_of(recipe: Recipe, gpus: int) -> tuple[int, str]:
    """How many workers a node with so many GPUs gets, and why, as the origin of that value."""
    asked = recipe.resources.nproc_per_node
    if asked != "auto":
        return asked, ""
    if not recipe.is_script and recipe.parallelism.name in ONE_PROCESS:
        return 1, f"auto: strategy {recipe.parallelism.name} is one process"
    return gpus, "auto: one per GPU"


def _one_gpu(recipe: Recipe, facts: Facts, index: int, remarks: Remarks, *, known: bool) -> Device:
    """Of `cuda:N`: the one GPU of the one worker of the one node that can be on this machine.

    known: whether the GPUs of this machine are, and can be used.
    """
    resources, device = recipe.resources, recipe.resources.device
    asked, nodes = resources.nproc_per_node, resources.max_nodes
    if asked not in ("auto", 1):
        message = f"resources.nproc_per_node: {asked} workers per node, and resources.device is {device}, one GPU"
        remarks.problems.append(Finding("resources.nproc_per_node", message, "nproc_per_node: 1, or device: cuda"))
    if nodes > 1:
        message = f"resources.device: {device} is one GPU, and {nodes} nodes on this machine would share it"
        remarks.problems.append(Finding("resources.device", message, "device: cuda, or nodes: 1"))
    if known and index >= len(facts.gpus):
        there = f"cuda:0 to cuda:{len(facts.gpus) - 1}" if len(facts.gpus) > 1 else "cuda:0 alone"
        message = f"resources.device: {device} was asked for, but this machine has {there}"
        remarks.problems.append(Finding("resources.device", message, "one of these, or cuda"))
    check_devices(recipe, 1, f"resources.device: {device} is", remarks)
    nproc = 1 if asked == "auto" else asked
    return Device(name="cuda", reason="as asked", nproc_per_node=nproc, nproc_reason="auto: one GPU", index=index)


def check_devices(recipe: Recipe, gpus: int, there: str, remarks: Remarks) -> None:
    """A model is split over no more GPUs than its one process has. there: who gives them, up to the verb."""
    wanted = recipe.parallelism.options.get("devices")
    if uses_all_gpus(recipe) and isinstance(wanted, int) and wanted > gpus:
        message = f"parallelism.devices: {wanted}, but {there} {count(gpus, 'GPU')}"
        remarks.problems.append(Finding("parallelism.devices", message, f"devices: {gpus} at most, or 0 for all"))


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
    nodes, share = recipe.resources.max_nodes, device.gpus_per_node
    cores = _core_parts(facts, nodes, remarks)
    indices = [gpu.index for gpu in facts.gpus] if device.name == "cuda" else []
    if device.index is not None:
        indices = indices[device.index : device.index + 1]
    return tuple(
        NodePlan(
            index=node,
            host=facts.hostname,
            address=address,
            cpus=cores[node],
            gpus=tuple(indices[node * share : (node + 1) * share]),
        )
        for node in range(nodes)
    )


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


def _are(number: int) -> str:
    return f"is {number}" if number == 1 else f"are {number}"
