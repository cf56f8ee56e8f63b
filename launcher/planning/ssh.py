"""Nodes that are reached by ssh: what a host gives, who the nodes are, and the line that is run for each. Pure."""

from __future__ import annotations

import dataclasses
import ipaddress
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.planning.interpreters import Interpreter
from launcher.planning.network import NOT_A_CABLE
from launcher.planning.plan import CODE, HostNode, HostsPlan, NodePlan, local_agent_argv, node_agent_argv
from launcher.planning.slurm_nodes import NodeShape, device_of_node
from launcher.planning.topology import Finding, Remarks
from launcher.wording import count, duration

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.ssh_facts import SshHost
    from launcher.recipe.schema import Recipe

DETACHED = "--detached"
"""The agent's flag: see `agent/detached.py`."""
_CLOCK_S = 5.0
"""From here on a clock that is ahead or behind is worth a word."""


def ssh_argv(
    destination: str, command: Sequence[str], *, config: str | None = None, options: Sequence[str] = ()
) -> list[str]:
    """The ssh that runs a command there; without one, the one that logs in.

    The login shell of the other side gets one text, so the words are quoted for it.
    """
    file = [] if config is None else ["-F", config]
    given = [word for option in options for word in ("-o", option)]
    return ["ssh", *file, *given, destination, *([shlex.join(command)] if command else [])]


def on_hosts(recipe: Recipe, facts: Facts, remarks: Remarks) -> Facts:
    """The facts as they are for the workers: with the interpreter of the hosts, and without devices of this machine."""
    hosts, nodes = recipe.ssh.hosts, recipe.resources.max_nodes
    if not hosts:
        message = "ssh.hosts: there is none"
        hint = "a profile with `executor: ssh` and `ssh: {hosts: [node0, node1]}`, or ssh.hosts=[node0,node1]"
        remarks.problems.append(Finding("ssh.hosts", message, hint))
    elif len(hosts) < nodes:
        message = f"resources.nodes: {nodes} nodes, and ssh.hosts has {count(len(hosts), 'host')}"
        hint = f"nodes: {len(hosts)}, or more hosts: each has one node"
        remarks.problems.append(Finding("resources.nodes", message, hint))
    if len(set(hosts)) < len(hosts):
        twice = next(name for name in hosts if hosts.count(name) > 1)
        message = f"ssh.hosts: {twice} is there {hosts.count(twice)} times: each host has one node"
        remarks.problems.append(Finding("ssh.hosts", message, "--nproc-per-node N: so many workers on each"))
    environment = {name: value for name, value in facts.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    asked = facts.ssh
    found = Interpreter(path=facts.python, version=facts.python_version, torch_version=facts.torch_version)
    if asked:
        found = Interpreter(path=asked[0].python, version=asked[0].python_version, torch_version=asked[0].torch_version)
    return dataclasses.replace(
        facts, environment=environment, interpreter=found, gpus=(), gpu_fault="", hosts=tuple(h.facts for h in asked)
    )


def shape_of_host(recipe: Recipe, facts: Facts, remarks: Remarks) -> NodeShape:
    """What each host gives: what the one gives that has least."""
    hosts = facts.ssh
    fewest = min(hosts, key=lambda host: len(host.facts.gpus), default=None)
    gpus = 0 if fewest is None else len(fewest.facts.gpus)
    most = max((len(host.facts.gpus) for host in hosts), default=0)
    if fewest is not None and gpus < most:
        remarks.notes.append(
            f"{fewest.destination} has {count(gpus, 'GPU')}, others up to {most}: each node uses {gpus}"
        )
    for host in hosts:
        if host.facts.gpu_fault:
            remarks.notes.append(f"the GPUs of {host.destination} cannot be asked: {host.facts.gpu_fault}")
        if host.clock_ahead_s is not None and abs(host.clock_ahead_s) >= _CLOCK_S:
            way = "ahead of" if host.clock_ahead_s > 0 else "behind"
            text = duration(abs(host.clock_ahead_s))
            remarks.notes.append(
                f"the clock of {host.destination} is {text} {way} the one here: so are times in its events"
            )
        if host.torch_version != hosts[0].torch_version:
            remarks.problems.append(
                Finding(
                    "ssh.python",
                    f"ssh.python: {host.destination} has torch {host.torch_version}, and {hosts[0].destination} has "
                    f"{hosts[0].torch_version}",
                    "one version on all hosts",
                )
            )
    device = device_of_node(recipe, gpus, remarks, where="each host has", hint="device: cpu or auto")
    cpus = min((host.facts.cpus for host in hosts), default=0)
    return NodeShape(device=device, gpus=gpus, cpus=max(1, cpus), cpus_key="plan")


def unshared_checkpoints(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    """Checkpoints that each node would write to a folder of its own, where they are meant to be in one."""
    apart = next((host.destination for host in facts.ssh if not host.sees_first), None)
    if apart is not None and not recipe.is_script and recipe.checkpoint.store == "shared":
        message = f"checkpoint.store: shared, and {apart} does not see the folder of runs of {facts.ssh[0].destination}"
        hint = (
            "checkpoint.store: replicate keeps the newest one on two hosts, a URL such as s3://bucket/runs elsewhere; "
            "or --runs-dir with a folder that all hosts share"
        )
        yield Finding("checkpoint.store", message, hint)


def nodes_on_hosts(recipe: Recipe, facts: Facts, shape: NodeShape) -> tuple[NodePlan, ...]:
    """One node on each host. Addresses are bound there, all but that of the first, which the others come to."""
    gpus = tuple(range(shape.device.gpus_per_node)) if shape.device.name == "cuda" else ()
    names = [*(host.facts.hostname or host.destination for host in facts.ssh), *recipe.ssh.hosts[len(facts.ssh) :]]
    head = head_address(recipe, facts.ssh)
    return tuple(
        NodePlan(
            index=index,
            host=names[index] if index < len(names) else "",
            address=head if index == 0 else "",
            cpus=(),
            gpus=gpus,
        )
        for index in range(recipe.resources.max_nodes)
    )


def head_address(recipe: Recipe, hosts: Sequence[SshHost]) -> str:
    """How the other nodes reach node 0: by `network.interface`, else by the address that this machine reaches it by.

    Empty for an interface that it does not have, which `network.py` tells of.
    """
    if not hosts:
        return ""
    first, wanted = hosts[0], recipe.network.interface
    if wanted != "auto":
        named = [each.addresses[0] for each in first.facts.interfaces if each.name == wanted and each.addresses]
        return named[0] if named else ""
    if first.address and (len(hosts) == 1 or not _is_loopback(first.address)):
        return first.address
    # This machine is that host, or comes to it by a tunnel.
    usable = [each for each in first.facts.interfaces if each.addresses and not _is_loopback(each.addresses[0])]
    usable.sort(key=lambda each: (NOT_A_CABLE.match(each.name) is not None, each.is_virtual))
    return usable[0].addresses[0] if usable else "127.0.0.1" if len(hosts) == 1 else ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def cwd_on_hosts(recipe: Recipe, facts: Facts, cwd: str, run_dir: str, refusals: list[Finding]) -> str:
    """Where the workers run: as on this machine; where a host has no such folder, in the run directory.

    A script without a copy there has nothing to run.
    """
    lacking = next((host.destination for host in facts.ssh if not host.has_workdir), None)
    if lacking is None:
        return cwd
    if not recipe.is_script:
        return run_dir
    if facts.code is not None and not facts.code.snapshot:
        message = f"workdir: {lacking} has no {cwd}, and the code is not copied: {facts.code.reason}"
        hint = "a git repository of at most 50 MB is copied to the hosts; or the same folder on each of them"
        refusals.append(Finding("workdir", message, hint))
    return f"{run_dir}/{CODE}"


def plan_ssh(recipe: Recipe, facts: Facts, *, run_id: str, run_dir: str, python: str) -> HostsPlan:
    """The line of each node, which returns at once."""
    hosts = facts.ssh
    head = head_address(recipe, hosts)
    port = (hosts[0].port if hosts else None) or 0
    return HostsPlan(
        nodes=tuple(
            HostNode(
                machine=host.destination,
                name=f"{run_id}-node-{index}",
                start=_start(python, run_id, run_dir, index, (head, port)),
                stop=("sh", "-c", f"kill $(cut -d' ' -f1 {shlex.quote(f'{run_dir}/hosts/node-{index}.pid')})"),
            )
            for index, host in enumerate(hosts)
        ),
        head_address=head,
        head_port=port,
        shared=all(host.shared for host in hosts),
    )


def _start(python: str, run_id: str, run_dir: str, node: int, head: tuple[str, int]) -> tuple[str, ...]:
    """The agent of a node, in the environment of a login without a terminal."""
    argv = node_agent_argv(local_agent_argv(python, run_dir, own=False), node, head)
    start = argv.index(f"{run_dir}/agent/start.py") + 1
    return ("env", f"LAUNCH_RUN_ID={run_id}", *argv[:start], DETACHED, *argv[start:])
