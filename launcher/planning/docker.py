"""The containers of a run: one per node, and the line of `docker run` that starts each. Pure."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.codeplan import absolute
from launcher.planning.plan import HostNode, HostsPlan, Mount, NodePlan, local_agent_argv, node_agent_argv
from launcher.planning.presets import ContainerNeeds, container_needs
from launcher.planning.ssh import ssh_argv
from launcher.planning.topology import Finding, Remarks
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.docker_facts import DockerFacts
    from launcher.planning.facts import Facts
    from launcher.planning.topology import Device
    from launcher.recipe.schema import Recipe

RUN_LABEL, NODE_LABEL = "launcher.run", "launcher.node"
FOLDER_LABEL, USER_LABEL = "launcher.folder", "launcher.user"
"""The run directory, and the number of who launches: whose watcher is gone is told by them."""
HEAD_PORT = 29_400
"""Of the head agent, where its container has a network of its own."""
STOP_MARGIN_S = 10.0
"""Between the end of a stop by the agents and Docker's KILL."""
SECRETS_FOLDER = "/run/launch-secrets"
"""Inside: holds one file until the agent has read it."""
SECRETS_VARIABLE = "LAUNCH_SECRETS_FILE"
SECRETS_FILE = "secrets.json"
_HOME = "/tmp"
"""Of a user whom the image may not know: there in every image, for everybody to write."""
_LEAST_SHM_BYTES = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MTU_BYTES = 1500
_STACK_BYTES = 67_108_864
_OWN_ARGS = {
    "--detach": "a run is always detached",
    "-d": "a run is always detached",
    "--name": "the launcher finds its containers by their names",
    "--rm": "how a container ended is read from it; the launcher removes it then",
    "--restart": "the launcher replaces a container that is killed, within faults.max_restarts",
    "--shm-size": "docker.shm_size",
    "--ipc": "docker.shm_size: host",
    "--network": "docker.network",
    "--net": "docker.network",
    "--user": "docker.user",
    "-u": "docker.user",
    "--env-file": "`env:`, or `secrets:`, whose values are in no file that stays",
    "--entrypoint": "the image's own entrypoint starts the agent",
}
"""Arguments of `docker run` that are not for `docker.args`, and what is in their place."""


@dataclass(frozen=True, kw_only=True)
class Containers:
    """What the rest of the plan has decided, as far as the containers depend on it."""

    run_id: str
    run_dir: str
    cwd: str
    folders: tuple[str, ...]
    """What the workers read besides."""
    python: str
    device: Device
    grace_s: float
    folder: str
    """Of the recipe: relative mounts begin there."""
    preset: str = "auto"
    """Of the network, resolved: what it needs of the machine is mounted."""


def image_of(recipe: Recipe, *, gpus: bool) -> str:
    """The image of a run: the recipe's, else the one that `docker/Dockerfile` makes."""
    if recipe.docker.image is not None:
        return recipe.docker.image
    return "launcher:cuda" if gpus and recipe.resources.device != "cpu" else "launcher:cpu"


def in_image(facts: Facts, recipe: Recipe) -> Facts:
    """The facts with the interpreter of the image, as far as it could be asked."""
    found = next((each.interpreter for each in facts.docker if each.interpreter is not None), None)
    if found is not None:
        return dataclasses.replace(facts, interpreter=found)
    python = recipe.python or "python3"
    return dataclasses.replace(facts, interpreter=None, torch_version=None, workers_python=python)


def on_docker_hosts(recipe: Recipe, facts: Facts, remarks: Remarks) -> Facts:
    """The facts as they are on hosts: without devices of this machine, whatever Python the hosts have themselves."""
    hosts, nodes = recipe.docker.hosts, recipe.resources.max_nodes
    if len(hosts) < nodes:
        message = f"resources.nodes: {nodes} nodes, and docker.hosts has {count(len(hosts), 'host')}"
        hint = f"nodes: {len(hosts)}, or more hosts: each has one node"
        remarks.problems.append(Finding("resources.nodes", message, hint))
    if len(set(hosts)) < len(hosts):
        twice = next(name for name in hosts if hosts.count(name) > 1)
        message = f"docker.hosts: {twice} is there {hosts.count(twice)} times: each host has one node"
        remarks.problems.append(Finding("docker.hosts", message, "--nproc-per-node N: so many workers on each"))
    if recipe.docker.network not in ("auto", "host"):
        message = f"docker.network: {recipe.docker.network} ends at its machine, and the nodes are on several"
        remarks.problems.append(Finding("docker.network", message, "docker.network: auto, which is host there"))
    environment = {name: value for name, value in facts.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    asked = tuple(dataclasses.replace(host, torch_version=None) for host in facts.ssh)
    return dataclasses.replace(
        facts, environment=environment, gpus=(), gpu_fault="", ssh=asked, hosts=tuple(host.facts for host in asked)
    )


def inside(nodes: Sequence[NodePlan]) -> tuple[NodePlan, ...]:
    """The nodes of this machine as they are in their containers: own names, devices numbered from 0."""
    return tuple(
        dataclasses.replace(
            node,
            host=host_of(node.index),
            address=host_of(node.index) if len(nodes) > 1 else "127.0.0.1",
            gpus=tuple(range(len(node.gpus))),
        )
        for node in nodes
    )


def host_of(node: int) -> str:
    """The name of a container among those of its run."""
    return f"node-{node}"


def name_of(run_id: str, node: int) -> str:
    """The name of a container among all."""
    return f"{run_id}-node-{node}"


def network_of(run_id: str) -> str:
    """The network of a run whose nodes need one."""
    return f"launch-{run_id}"


def secrets_folder(container: str, uid: int) -> str:
    """Where a node's secrets wait for its agent: in memory, outside of the run directory."""
    return f"/dev/shm/launch-{uid}-{container}"


def image_findings(recipe: Recipe, docker: Sequence[DockerFacts]) -> Iterator[Finding]:
    """Why containers of the image, which was asked, cannot run the workers."""
    for each in docker:
        where = f"the image {each.image}" + (f" on {each.machine}" if each.machine else "")
        if each.machine and each.has_image is False and (recipe.docker.image is None or recipe.docker.pull == "never"):
            hint = f"docker save {each.image} | ssh {each.machine} docker load; or one from a registry"
            yield Finding("docker.image", f"docker.image: {where} is not there", hint)
        elif each.has_image and each.interpreter is None and each.fault:
            yield Finding("docker.image", f"docker.image: {where} cannot be used: {each.fault}")
        elif each.interpreter is not None and (missing := each.missing(script=recipe.is_script)):
            what = "which the workers need" if recipe.is_script else "which the built-in training program imports"
            install = f"RUN {each.interpreter.path} -m pip install {' '.join(missing)}"
            hint = f"in its Dockerfile: {install}; or an image by docker/Dockerfile"
            yield Finding("docker.image", f"docker.image: {where} has no {', '.join(missing)}, {what}", hint)


def plan_docker(
    recipe: Recipe, facts: Facts, job: Containers, nodes: Sequence[NodePlan], remarks: Remarks
) -> HostsPlan:
    """The containers of a run; `nodes` as they are outside of them. What is wrong goes to `remarks`."""
    remarks.problems += _args_findings(recipe)
    far, first = bool(recipe.docker.hosts), facts.docker[0]
    network, made = ("host", False) if far else _network(recipe, job, len(nodes), remarks)
    mounts = tuple(_mounts(recipe, job, remarks))
    shares_network = network == "host"
    port = first.free_port if shares_network else HEAD_PORT
    address = host_of(0) if len(nodes) > 1 and not shares_network else "127.0.0.1"
    if far:
        address = nodes[0].address
    started = []
    for node in nodes:
        machine = min(node.index, len(facts.docker) - 1) if far else 0  # fewer than nodes: a problem that is known
        there, needs = facts.docker[machine], _needs(job, facts, machine)
        brought = [mount for text in needs.mounts if (mount := read_mount(text, "/")) is not None]
        own = Mount(
            source=secrets_folder(name_of(job.run_id, node.index), there.uid), target=SECRETS_FOLDER, read_only=False
        )
        seen = (*{mount.target: mount for mount in (*brought, *mounts)}.values(), own)
        name = name_of(job.run_id, node.index)
        devices = tuple(dict.fromkeys((*there.devices, *needs.devices)))
        argv = local_agent_argv(job.python, job.run_dir, own=False)
        words = [
            *("docker", "run", "--detach", "--name", name),
            *("--label", f"{RUN_LABEL}={job.run_id}", "--label", f"{NODE_LABEL}={node.index}"),
            *("--label", f"{FOLDER_LABEL}={job.run_dir}", "--label", f"{USER_LABEL}={there.uid}"),
            *_network_flags(network, node.index, made=made),
            *_gpu_flags(node),
            *_common_flags(recipe, facts, there, job, 1 if far else len(nodes), devices=devices),
            *(word for mount in seen for word in ("--mount", mount_text(mount))),
            *recipe.docker.args,
            there.image,
            *node_agent_argv(argv, node.index, (address, port)),
        ]
        stop = ("docker", "stop", "-t", str(_stop_timeout_s(job.grace_s)), name)
        started.append(HostNode(machine=there.machine, name=name, start=tuple(words), stop=stop, mounts=seen))
    make = ("docker", "network", "create", *_mtu(facts), "--label", f"{RUN_LABEL}={job.run_id}", network)
    return HostsPlan(
        nodes=tuple(started),
        head_address=address,
        head_port=port,
        image=first.image,
        network=network if made else "",
        before=(*_pulls(recipe, facts.docker[: len(nodes)]), *((make,) if made else ())),
        after=(("docker", "network", "rm", network),) if made else (),
        shared=all(host.shared for host in facts.ssh),
    )


def _needs(job: Containers, facts: Facts, machine: int) -> ContainerNeeds:
    """What the machine brings for its network."""
    known = facts.hosts[machine : machine + 1]
    return container_needs(job.preset, known[0]) if known else ContainerNeeds((), (), (), ())


def size_bytes(text: str) -> int:
    """`64MiB`, `16g`, `1.5 GB`: as Docker has it, in powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * (1 << 10 * _POWERS[found[2].upper()]))


def _pulls(recipe: Recipe, engines: Sequence[DockerFacts]) -> Iterator[tuple[str, ...]]:
    """What fetches the image, on each machine that needs it."""
    how = recipe.docker.pull
    for there in engines:
        if how == "always" or (how == "missing" and there.has_image is False and recipe.docker.image is not None):
            pull = ("docker", "pull", "--quiet", there.image)
            yield tuple(ssh_argv(there.machine, pull, config=recipe.ssh.config)) if there.machine else pull


def _network(recipe: Recipe, job: Containers, nodes: int, remarks: Remarks) -> tuple[str, bool]:
    """The network of the containers, and whether it is made for this run. Several nodes need one with names."""
    asked = recipe.docker.network
    if asked in ("auto", "bridge") and nodes > 1:
        return network_of(job.run_id), True
    if asked == "host" and nodes > 1:
        message = f"docker.network: host, and {nodes} nodes on this machine would share all addresses and ports"
        remarks.problems.append(Finding("docker.network", message, "docker.network: auto makes a network for the run"))
    return ("bridge" if asked == "auto" else asked), False


def _mtu(facts: Facts) -> tuple[str, ...]:
    """The packets of a network that is made are 1500 bytes whatever the machine's are: on many clouds, too long."""
    links = [each for host in facts.hosts[:1] for each in host.interfaces if each.addresses and not each.is_virtual]
    least = min((each.mtu for each in links if each.mtu), default=_MTU_BYTES)
    return ("--opt", f"com.docker.network.driver.mtu={least}") if least < _MTU_BYTES else ()


def _network_flags(network: str, node: int, *, made: bool) -> tuple[str, ...]:
    if network == "host":
        return ("--network", "host")
    named = ("--network-alias", host_of(node)) if made else ()
    return ("--hostname", host_of(node), "--network", network, *named)


def _gpu_flags(node: NodePlan) -> tuple[str, ...]:
    """The GPUs of that node alone. The quotes are Docker's: its value is a line of CSV."""
    return ("--gpus", f'"device={",".join(map(str, node.gpus))}"') if node.gpus else ()


def _common_flags(
    recipe: Recipe, facts: Facts, there: DockerFacts, job: Containers, nodes: int, *, devices: Sequence[str]
) -> Iterator[str]:
    if there.has_init:
        yield from ("--entrypoint", "")  # one process 1 is enough, and ours signals the agent alone
    yield from ("--init", "--stop-timeout", str(_stop_timeout_s(job.grace_s)))
    yield from ("--security-opt", "no-new-privileges")
    if recipe.docker.user == "auto" and not there.rootless:
        yield from ("--user", f"{there.uid}:{there.gid}")
    elif recipe.docker.user not in ("auto", "image"):
        yield from ("--user", recipe.docker.user)
    yield from _shm_flags(recipe, there, nodes)
    for device in devices:
        yield from ("--device", device)
    if devices:
        yield from ("--cap-add", "IPC_LOCK")
    if devices or job.device.name == "cuda":
        yield from ("--ulimit", "memlock=-1", "--ulimit", f"stack={_STACK_BYTES}")
    variables = {"HOME": _HOME, "USER": facts.user, "LAUNCH_RUN_ID": job.run_id}
    variables[SECRETS_VARIABLE] = f"{SECRETS_FOLDER}/{SECRETS_FILE}"
    for name, value in variables.items():
        yield from ("--env", f"{name}={value}")
    yield from ("--workdir", job.run_dir)


def _shm_flags(recipe: Recipe, there: DockerFacts, nodes: int) -> tuple[str, ...]:
    """A container has 64 MB otherwise, too little for loader workers and NCCL. It is a limit: nothing is taken."""
    asked = recipe.docker.shm_size
    if asked == "host":
        return ("--ipc", "host")
    size = max(_LEAST_SHM_BYTES, there.memory_bytes // 4 // nodes) if asked == "auto" else size_bytes(asked)
    return ("--shm-size", str(size))


def _stop_timeout_s(grace_s: float) -> int:
    return math.ceil(grace_s + STOP_MARGIN_S)


def _mounts(recipe: Recipe, job: Containers, remarks: Remarks) -> Iterator[Mount]:
    """The run directory, what the program is read from, and what the recipe names."""
    yield Mount(source=job.run_dir, target=job.run_dir, read_only=False)
    seen = {job.run_dir}
    if recipe.docker.code == "mount":
        # The workdir is there for reading and writing, as everywhere else; what is only read is not to be changed.
        weights = recipe.checkpoint.init_from or ""
        for folder in dict.fromkeys((job.cwd, *job.folders, *([weights] if posixpath.isabs(weights) else []))):
            if folder == "/":
                message = "workdir: the whole disk (/) cannot be mounted into a container; launch from a folder of it"
                remarks.problems.append(Finding("workdir", message, "workdir: a folder; or docker.code: image"))
            elif folder not in seen and not _is_inside(folder, job.run_dir):
                seen.add(folder)
                yield Mount(source=folder, target=folder, read_only=folder != job.cwd)
    for index, text in enumerate(recipe.docker.mounts):
        mount = read_mount(text, job.folder)
        if mount is None:
            key = f"docker.mounts.{index}"
            hint = "`/data`, `/data:/mnt/data` or `/data:/data:ro`"
            remarks.problems.append(Finding(key, f"{key}: {text!r} is not a mount with a path inside", hint))
        elif mount.target not in seen:
            seen.add(mount.target)
            yield mount


def read_mount(text: str, folder: str) -> Mount | None:
    """`/data`, `data:/data`, `/data:/mnt:ro`; None for anything else. Without `ro` it can be written to."""
    parts = text.split(":")
    options = parts.pop() if parts[1:] and parts[-1] in ("ro", "rw") else "rw"
    if not 1 <= len(parts) <= 2 or not all(parts):
        return None
    source = absolute(folder, parts[0])
    target = parts[1] if len(parts) > 1 else source
    if not posixpath.isabs(target):
        return None
    return Mount(source=source, target=posixpath.normpath(target), read_only=options == "ro")


def mount_text(mount: Mount) -> str:
    """One value of `--mount`, a line of CSV."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([*fields, *(["readonly"] if mount.read_only else [])])
    return line.getvalue()


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _args_findings(recipe: Recipe) -> Iterator[Finding]:
    for index, word in enumerate(recipe.docker.args):
        name = word.partition("=")[0]
        if name in _OWN_ARGS:
            key = f"docker.args.{index}"
            yield Finding(key, f"docker.args: {name} is the launcher's own", f"in its place: {_OWN_ARGS[name]}")


def where_text(plan_nodes: int, image: str) -> str:
    """What a dry run says of where a run is."""
    return f"docker: {count(plan_nodes, 'container')} on this machine, image {image}"
