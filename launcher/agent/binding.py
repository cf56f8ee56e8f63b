"""A plan for other machines than the one that launches is bound to the node that this process is on.

Pure but for the one question to the routing table, which is passed in. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.agent import addresses, hostlist
from launcher.agent.addresses import Address
from launcher.agent.allocation import HEAD, NODES, SECONDS_LEFT
from launcher.planning.plan import EnvVar, NodePlan, Plan
from launcher.runs.states import Cause

TASK_SCOPED = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_TASK_PID",
    "SLURM_GTIDS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_",
    "SLURM_STEPID",
    "SLURM_STEPMGR",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_",
    "SLURM_DISTRIBUTION",
    "SLURM_CPU_BIND",
    "SLURM_MEM_BIND",
    "SLURM_PMI",
    "PMI_",
    "PMIX_",
    "PMI2_",
)
"""Beginnings of names that describe our one task per node, not a worker: a library would take them for its ranks."""
ORIGIN = "node"
"""Of a variable that only the node could know."""
OF_NODE = "the environment of the node"
"""Of a variable that the workers inherit there."""
_INTERFACE_NAMES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}
"""Each in its own syntax: `=` makes NCCL match the whole name, not a prefix."""


class NodeError(Exception):
    """This node cannot take part; the sentence names what is wrong."""

    def __init__(self, text: str, *, cause: Cause = Cause.RENDEZVOUS, exit_code: int = 1) -> None:
        super().__init__(text)
        self.cause, self.exit_code = cause, exit_code


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The plan as it is here, and what a person should know."""

    plan: Plan
    warnings: tuple[str, ...]


def node_index(env: Mapping[str, str], node_count: int, *, at_least: int | None = None) -> int:
    """Which node of the plan this is: the place in the allocation. Raises NodeError for anything but one per node.

    at_least: how many nodes will do; None = all of the plan.
    """
    node, task, count = (env.get(name, "") for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_NODES"))
    if not node.isdecimal():
        raise NodeError("SLURM_NODEID is not set: a task is started by srun")
    if node != task:
        raise NodeError(f"this is task {task} on node {node} of the job: there must be one task on each node")
    if count.isdecimal() and not (node_count if at_least is None else at_least) <= int(count) <= node_count:
        raise NodeError(f"the job has {count} nodes, and the plan has {node_count}")
    if int(node) >= node_count:
        raise NodeError(f"this is node {node} of the job, and the plan has {node_count}")
    return int(node)


def bind(
    plan: Plan,
    node: int,
    *,
    env: Mapping[str, str],
    host: str,
    head: str,
    cpus: Collection[int],
    known: tuple[Address, ...],
    leads_to: Callable[[str], str | None] = addresses.leads_to,
) -> Bound:
    """The plan with hosts, this node's address, CPUs and GPUs, and the interface of its collectives.

    cpus: those that this process may use. head: the address of node 0. Raises NodeError.
    """
    assert plan.slurm is not None
    warnings = []
    gpus = _gpus(plan, env)
    address, interface = _way(node, host=host, head=head, known=known, leads_to=leads_to)
    names = _hosts(env, len(plan.nodes), at_least=plan.min_nodes)
    nodes = [replace(each, host=name) for each, name in zip(plan.nodes, names, strict=True)]
    nodes[0] = replace(nodes[0], address=head)
    nodes[node] = NodePlan(index=node, host=host, address=address, cpus=tuple(sorted(cpus)), gpus=gpus)
    wanted = plan.slurm.cpus_per_node
    if len(cpus) < wanted:
        warnings.append(
            f"node {node} ({host}) may use {len(cpus)} of the {wanted} CPUs that were asked for: "
            f"loaders and threads of its workers share them"
        )
    bound = replace(
        plan,
        nodes=tuple(nodes),
        env=_with_interface(plan, interface, known, host, env),
        env_unset=(*plan.env_unset, HEAD, SECONDS_LEFT, NODES, *(name for name in env if name.startswith(TASK_SCOPED))),
    )
    return Bound(plan=bound, warnings=tuple(warnings))


def bind_host(
    plan: Plan,
    node: int,
    *,
    host: str,
    head: str,
    known: tuple[Address, ...],
    env: Mapping[str, str],
    leads_to: Callable[[str], str | None] = addresses.leads_to,
) -> Plan:
    """The plan on one of several machines that no scheduler has given: CPUs and GPUs are the plan's own.

    head: the address of node 0. Raises NodeError.
    """
    address, interface = _way(node, host=host, head=head, known=known, leads_to=leads_to)
    nodes = list(plan.nodes)
    nodes[0] = replace(nodes[0], address=head)
    nodes[node] = replace(nodes[node], host=host, address=address)
    return replace(plan, nodes=tuple(nodes), env=_with_interface(plan, interface, known, host, env))


def _way(
    node: int, *, host: str, head: str, known: tuple[Address, ...], leads_to: Callable[[str], str | None]
) -> tuple[str, str]:
    """By which address and interface of this node the others are reached. Raises NodeError where there is none."""
    is_name = ":" not in head and not head.replace(".", "").isdecimal()
    address = head if node == 0 and not is_name else leads_to(head)
    if address is None:
        raise NodeError(f"no way leads to the head node at {head}; interfaces here: {addresses.listed(known)}")
    interface = addresses.interface_of(address, known)
    if interface is None:
        where = "the head agent's address" if node == 0 else "the address that leads to the head node"
        raise NodeError(f"{address}, {where}, is on no interface of {host}: {addresses.listed(known)}")
    return address, interface


def _hosts(env: Mapping[str, str], count: int, *, at_least: int | None = None) -> Sequence[str]:
    """The names of all nodes, in the order of the job; `?` where SLURM's list cannot be read (names only show), and
    for the last ones of the plan, where the job has fewer."""
    text = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    try:
        names: Sequence[str] = hostlist.expand(text)
    except ValueError:
        names = ()
    fits = (count if at_least is None else at_least) <= len(names) <= count
    return [*names, *["?"] * (count - len(names))] if fits else ["?"] * count


def _gpus(plan: Plan, env: Mapping[str, str]) -> tuple[int, ...]:
    """Numbers of the devices that SLURM has given this task, empty where they have other names."""
    given = env.get("CUDA_VISIBLE_DEVICES")
    if plan.device != "cuda" or given is None:
        return ()
    names = [name for name in given.split(",") if name]
    if len(names) < plan.nproc_per_node:
        raise NodeError(
            f"{plan.nproc_per_node} workers need a GPU each, and SLURM has given {len(names)} "
            f"(CUDA_VISIBLE_DEVICES={given}): see `gpus_per_node`, or `gres`, in the profile",
            cause=Cause.USAGE,
        )
    return tuple(int(name) for name in names) if all(name.isdecimal() for name in names) else ()


def _with_interface(
    plan: Plan, interface: str, known: tuple[Address, ...], host: str, env: Mapping[str, str]
) -> tuple[EnvVar, ...]:
    """The environment of the workers with the interface of this node, where neither plan nor node have named one."""
    given = {variable.name: variable for variable in plan.env}
    own = [EnvVar(name=name, value=env[name], origin=OF_NODE) for name in _INTERFACE_NAMES if env.get(name)]
    given = {**{variable.name: variable for variable in own}, **given}  # of `setup`, which may be a provider's script
    for name in _INTERFACE_NAMES:
        if name in given:
            _check_interface(given[name], known, host)
    names = _INTERFACE_NAMES if len(plan.nodes) > 1 else ()
    found = [
        EnvVar(name=name, value=_INTERFACE_NAMES[name].format(interface), origin=ORIGIN)
        for name in names
        if name not in given
    ]
    return tuple(sorted((*plan.env, *found), key=lambda variable: variable.name))


def _check_interface(variable: EnvVar, known: tuple[Address, ...], host: str) -> None:
    """One that is not here makes a library fail with words about address families. `^` (NCCL) excludes."""
    exact = variable.name != "NCCL_SOCKET_IFNAME" or variable.value.startswith("=")
    if variable.value.startswith("^") or not exact:
        return
    names = variable.value.removeprefix("=").split(",")
    if not {name.partition(":")[0] for name in names} & {each.interface for each in known}:
        raise NodeError(
            f"{variable.name}={variable.value} ({variable.origin}): {host} has no such interface with an address; "
            f"it has {addresses.listed(known)}"
        )
