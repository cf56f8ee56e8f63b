"""All there is to decide before a plan is written down: interpreter, devices, nodes, threads, network, job. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.codeplan import absolute
from launcher.planning.device_options import check_device_options, check_nsys
from launcher.planning.docker import Containers, image_findings, in_image, inside, on_docker_hosts, plan_docker
from launcher.planning.engine import Engine, choose_engine, of_workers
from launcher.planning.layer_options import check_layers
from launcher.planning.network import Network, pick_family, resolve_network
from launcher.planning.parallel import check_sharing, holds_whole
from launcher.planning.plan import EnvVar, HostsPlan, NodePlan, SkyPlan, SlurmPlan
from launcher.planning.points import folders_of_sweep
from launcher.planning.profiling import check_recording
from launcher.planning.program import placeholders_of
from launcher.planning.sky import SkyJob, cwd_on_sky, grace_on_sky, plan_sky, python_on_sky, shape_on_sky
from launcher.planning.slurm import Job, grace_of, plan_slurm
from launcher.planning.slurm_nodes import NodeShape, nodes_of_job, on_node, shape_nodes
from launcher.planning.ssh import cwd_on_hosts, nodes_on_hosts, on_hosts, plan_ssh, shape_of_host, unshared_checkpoints
from launcher.planning.store_facts import store_refusals
from launcher.planning.topology import (
    Device,
    Finding,
    Remarks,
    Threads,
    check_elastic,
    choose_device,
    choose_threads,
    place_nodes,
)
from launcher.planning.variables import check_secrets, worker_variables

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.loader import LoadedRecipe
    from launcher.recipe.schema import Recipe

GRACE_S = 30.0
"""How long a stop may take where nobody says so, and no SLURM has a say in it."""
ON_SLURM = ("slurm", "here")
"""Executors whose nodes are those of a job."""
DOCKER = "docker"
SSH = "ssh"
"""The executor whose nodes are hosts."""
SKY = "sky"
"""The executor whose nodes are rented for the run."""


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where a run is, and where its program is read from."""

    run_dir: str
    folder: str
    """Of the recipe; of a script without one, where `launch` was called."""
    cwd: str
    """Of the workers."""


@dataclass(frozen=True, kw_only=True)
class Interpreters:
    """Who runs what."""

    engine: Engine
    python: str
    """Of the workers."""
    launcher_python: str
    """Ours."""
    own: bool
    """Whether the two are one."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which nodes there are, what each gives, and how they talk."""

    shape: NodeShape | None
    """Of the nodes of a job of SLURM, or of hosts; None on this machine."""
    device: Device
    threads: Threads
    network: Network
    nodes: tuple[NodePlan, ...]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What the plan says, but for the recipe's own values."""

    paths: Paths
    interpreters: Interpreters
    layout: Layout
    resumable: bool
    rescue: bool
    """Whether survivors keep the state of the training."""
    slurm: SlurmPlan | None
    hosts: HostsPlan | None
    sky: SkyPlan | None
    grace_s: float
    placeholders: Mapping[str, str]
    env: tuple[EnvVar, ...]


def decide(
    loaded: LoadedRecipe,
    facts: Facts,
    *,
    run_id: str,
    runs_dir: str,
    executor: str,
    remarks: Remarks,
    refusals: list[Finding],
) -> Decisions:
    """Decide all of it. What is wrong with the recipe goes to `remarks`, what this machine cannot do to `refusals`."""
    recipe = loaded.recipe
    facts = on_hosts(recipe, facts, remarks) if executor == SSH else facts
    far = executor == SSH or (executor == DOCKER and bool(recipe.docker.hosts))
    facts = on_docker_hosts(recipe, facts, remarks) if far and executor == DOCKER else facts
    interpreters, facts = _interpreters(recipe, facts, executor, remarks, refusals)
    layout = _lay_out(loaded, facts, executor, remarks)
    paths = _paths(loaded, facts, run_id=run_id, runs_dir=runs_dir)
    if executor != SKY:  # rented machines install what they need; who launches is asked by the executor
        refusals += store_refusals(recipe.checkpoint.store, facts.store_fault)
    if far:
        refusals += unshared_checkpoints(recipe, facts)
        paths = dataclasses.replace(paths, cwd=cwd_on_hosts(recipe, facts, paths.cwd, paths.run_dir, refusals))
    if executor == SKY:
        paths = dataclasses.replace(paths, cwd=cwd_on_sky(recipe, paths.run_dir))
    resumable = not recipe.is_script or recipe.resume is not None
    rescue = _rescues(recipe, interpreters.engine.name, layout.device.name)
    check_elastic(recipe, remarks, resumable=resumable)
    world_size = recipe.resources.max_nodes * layout.device.nproc_per_node
    engine = interpreters.engine.name
    check_recording(recipe, remarks, device=layout.device.name, world_size=world_size, engine=engine)
    slurm, grace_s = None, GRACE_S if recipe.faults.grace == "auto" else recipe.faults.grace.time_s
    if layout.shape is not None and executor in ON_SLURM:
        job = Job(
            run_id=run_id,
            run_dir=paths.run_dir,
            cwd=paths.cwd,
            folders=(*_read_folders(recipe, paths.folder, facts), *folders_of_sweep(paths.run_dir)),
            shape=layout.shape,
            own_python=interpreters.launcher_python,
            python=interpreters.python,
            own=interpreters.own,
            resumable=resumable,
            inside=executor == "here",
        )
        slurm, grace_s = plan_slurm(recipe, facts, job, remarks), grace_of(recipe, facts, remarks)
    hosts = None
    if executor == DOCKER:
        containers = Containers(
            run_id=run_id,
            run_dir=paths.run_dir,
            cwd=paths.cwd,
            folders=() if far else (*_read_folders(recipe, paths.folder, facts), *folders_of_sweep(paths.run_dir)),
            python=interpreters.python,
            device=layout.device,
            grace_s=grace_s,
            folder=paths.folder,
            preset=layout.network.preset,
        )
        hosts = plan_docker(recipe, facts, containers, layout.nodes, remarks)
        layout = layout if far else dataclasses.replace(layout, nodes=inside(layout.nodes))
    if executor == SSH:
        run_dir = paths.run_dir
        hosts = plan_ssh(recipe, facts, run_id=run_id, run_dir=run_dir, python=interpreters.python)
    sky = None
    if executor == SKY:
        grace_s = grace_on_sky(recipe, remarks)
        rented = SkyJob(run_id=run_id, run_dir=paths.run_dir, device=layout.device, python=interpreters.python)
        sky = plan_sky(recipe, facts, rented, remarks)
    placeholders = placeholders_of(recipe, paths.run_dir, layout.device.nproc_per_node)
    env = worker_variables(
        recipe,
        facts,
        device=layout.device,
        threads=layout.threads,
        network=layout.network,
        rescue=rescue,
        origins=loaded.origins,
        placeholders=placeholders,
        remarks=remarks,
    )
    check_secrets(recipe, facts, remarks)
    return Decisions(
        paths=paths,
        interpreters=interpreters,
        layout=layout,
        resumable=resumable,
        rescue=rescue,
        slurm=slurm,
        hosts=hosts,
        sky=sky,
        grace_s=grace_s,
        placeholders=placeholders,
        env=env,
    )


def _rescues(recipe: Recipe, engine: str, device: str) -> bool:
    """Whether the workers' state outlives some of them. A script keeps its own; parts of one cannot be kept."""
    if recipe.is_script or engine == "torchrun" or not holds_whole(recipe):
        return False
    return device == "cpu" if recipe.faults.rescue == "auto" else recipe.faults.rescue


def _interpreters(
    recipe: Recipe, facts: Facts, executor: str, remarks: Remarks, refusals: list[Finding]
) -> tuple[Interpreters, Facts]:
    """Who runs what, and the facts as they are for the workers."""
    has_image = executor in (DOCKER, SKY) or (executor in ON_SLURM and recipe.slurm.container is not None)
    if executor == DOCKER:
        if found_here := list(image_findings(recipe, facts.docker)):
            refusals.extend(found_here)
            refusals = []  # what follows from these is not said once more
        facts = in_image(facts, recipe)
    elif executor == SKY:
        python = python_on_sky(recipe)
        facts = dataclasses.replace(facts, interpreter=None, torch_version=None, workers_python=python)
    elif has_image:
        facts = _in_image(recipe, facts, remarks)
    engine = choose_engine(facts, script=recipe.is_script, remarks=remarks, refusals=refusals)
    of_launcher, facts = facts, of_workers(facts)
    own = of_launcher.interpreter is None and not has_image
    found = Interpreters(engine=engine, python=facts.python, launcher_python=of_launcher.python, own=own)
    return found, facts


def _lay_out(loaded: LoadedRecipe, facts: Facts, executor: str, remarks: Remarks) -> Layout:
    recipe, elsewhere = loaded.recipe, executor in (*ON_SLURM, SSH, SKY)
    far = executor == SSH or (executor == DOCKER and bool(recipe.docker.hosts))
    elsewhere = elsewhere or far
    shape = shape_nodes(recipe, facts, remarks, inside=executor == "here") if executor in ON_SLURM else None
    if far:
        shape = shape_of_host(recipe, facts, remarks)
    if executor == SKY:
        shape = shape_on_sky(recipe, remarks)
    device = choose_device(recipe, facts, remarks) if shape is None else shape.device
    check_training(recipe, facts, device, remarks, elsewhere=elsewhere)
    if shape is None:
        of_machine, num_workers = facts, recipe.resources.max_nodes * device.nproc_per_node
    else:
        of_machine, num_workers = on_node(facts, shape), device.nproc_per_node
    threads = choose_threads(recipe, of_machine, num_workers, loaded.origin("resources.threads"), remarks)
    one_network = not elsewhere and (executor != DOCKER or recipe.resources.max_nodes == 1)
    network = resolve_network(recipe, facts, one_machine=one_network, origins=loaded.origins, remarks=remarks)
    if shape is None:
        nodes = place_nodes(recipe, facts, device, _own_address(facts), remarks)
    else:
        nodes = nodes_on_hosts(recipe, facts, shape) if far else nodes_of_job(recipe, shape)
    return Layout(shape=shape, device=device, threads=threads, network=network, nodes=nodes)


def check_training(recipe: Recipe, facts: Facts, device: Device, remarks: Remarks, *, elsewhere: bool) -> None:
    """What a training asks of its workers and their devices. A script asks for nothing that is known here."""
    check_sharing(recipe, device, remarks)
    remarks.problems += check_layers(recipe)
    check_device_options(recipe, device, remarks)
    if not elsewhere:
        check_nsys(recipe, facts, remarks)


def _paths(loaded: LoadedRecipe, facts: Facts, *, run_id: str, runs_dir: str) -> Paths:
    folder = facts.cwd if loaded.source is None else str(loaded.source.parent)
    return Paths(
        run_dir=absolute(facts.cwd, posixpath.join(runs_dir, run_id)),
        folder=folder,
        cwd=facts.cwd if loaded.recipe.workdir is None else absolute(folder, loaded.recipe.workdir),
    )


def _own_address(facts: Facts) -> str:
    """How the nodes of one machine reach node 0: over loopback, in the family that there is (F096)."""
    loopback = [item.addresses for item in facts.interfaces if item.loopback and item.addresses]
    family = pick_family(loopback[:1])
    return family.addresses[0] if family else "127.0.0.1"


def _in_image(recipe: Recipe, facts: Facts, remarks: Remarks) -> Facts:
    """The facts with the interpreter of the container's image, of which nothing can be known from here."""
    if not recipe.is_script:
        message = "slurm.container: the built-in training program runs in our own environment, not in an image"
        remarks.problems.append(Finding("slurm.container", message, "slurm.container: null, or a script of your own"))
    python = "python3" if recipe.python is None else recipe.python
    return dataclasses.replace(facts, interpreter=None, torch_version=None, workers_python=python)


def _read_folders(recipe: Recipe, folder: str, facts: Facts) -> tuple[str, ...]:
    """Folders that a script is read from, besides the run directory and the workdir."""
    code = () if facts.code is None or facts.code.snapshot else (facts.code.root,)
    script = () if recipe.script is None else (posixpath.dirname(absolute(folder, recipe.script)),)
    return (*code, *script)
