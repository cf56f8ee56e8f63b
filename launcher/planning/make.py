"""From a recipe and the facts of a machine to a plan. Pure: no clock, no environment, no files."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError, Refused
from launcher.planning.codeplan import absolute, with_code
from launcher.planning.engine import Engine, choose_engine, of_workers
from launcher.planning.network import Network, pick_family, resolve_network
from launcher.planning.plan import Limits, Plan, SlurmPlan, Value, leaves, local_agent_argv, slurm_agent_argv
from launcher.planning.points import folders_of_sweep
from launcher.planning.program import placeholders_of, plan_worker
from launcher.planning.slurm import Job, grace_of, plan_slurm
from launcher.planning.slurm_nodes import nodes_of_job, on_node, shape_nodes
from launcher.planning.topology import (
    Device,
    Finding,
    Remarks,
    Threads,
    check_batch,
    check_strategy,
    choose_device,
    choose_threads,
    place_nodes,
)
from launcher.planning.torchrun import srun_line, torchrun_lines
from launcher.planning.variables import check_secrets, worker_variables

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.loader import LoadedRecipe
    from launcher.recipe.schema import Recipe

GRACE_S = 30.0
JOIN_TIMEOUT_S = 300.0
ON_SLURM = ("slurm", "here")
"""Executors whose nodes are those of a job."""


def make_plan(loaded: LoadedRecipe, facts: Facts, *, run_id: str, runs_dir: str, executor: str = "local") -> Plan:
    """Expand a recipe into every node, rank, variable and limit. Pure: same arguments, same plan.

    Raises RecipeError with all problems at once, Refused where the interpreter that it names cannot run it.
    """
    recipe, origins, remarks = loaded.recipe, loaded.origins, Remarks()
    refusals: list[Finding] = []
    on_slurm = executor in ON_SLURM
    if on_slurm and recipe.slurm.container is not None:
        facts = _in_image(recipe, facts, remarks)
    engine = choose_engine(facts, script=recipe.is_script, remarks=remarks, refusals=refusals)
    own_python, launcher_python = facts.interpreter is None and not _has_image(recipe, executor), facts.python
    facts = of_workers(facts)
    one_machine = not on_slurm
    shape = shape_nodes(recipe, facts, remarks, inside=executor == "here") if on_slurm else None
    device = choose_device(recipe, facts, remarks) if shape is None else shape.device
    world_size = recipe.resources.nodes * device.nproc_per_node
    check_batch(recipe, world_size, remarks)
    check_strategy(recipe, world_size, remarks)
    if shape is None:
        of_machine, num_workers = facts, world_size
    else:
        of_machine, num_workers = on_node(facts, shape), device.nproc_per_node
    threads = choose_threads(recipe, of_machine, num_workers, origins.get("resources.threads", "default"), remarks)
    network = resolve_network(recipe, facts, one_machine=one_machine, origins=origins, remarks=remarks)
    if shape is None:
        nodes = place_nodes(recipe, facts, device, _own_address(facts), remarks)
    else:
        nodes = nodes_of_job(recipe, shape)
    run_dir = absolute(facts.cwd, posixpath.join(runs_dir, run_id))
    folder = facts.cwd if loaded.source is None else str(loaded.source.parent)
    cwd = facts.cwd if recipe.workdir is None else absolute(folder, recipe.workdir)
    resumable = not recipe.is_script or recipe.resume is not None
    slurm, grace_s = None, GRACE_S
    if shape is not None:
        job = Job(
            run_id=run_id,
            run_dir=run_dir,
            cwd=cwd,
            folders=(*_read_folders(recipe, folder, facts), *folders_of_sweep(run_dir)),
            shape=shape,
            own_python=launcher_python,
            python=facts.python,
            own=own_python,
            resumable=resumable,
            inside=executor == "here",
        )
        slurm, grace_s = plan_slurm(recipe, facts, job, remarks), grace_of(recipe, facts, remarks)
    placeholders = placeholders_of(recipe, run_dir, device.nproc_per_node)
    env = worker_variables(
        recipe,
        facts,
        device=device,
        threads=threads,
        network=network,
        origins=origins,
        placeholders=placeholders,
        remarks=remarks,
    )
    check_secrets(recipe, facts, remarks)
    document = recipe.model_dump(mode="json", by_alias=True)
    if remarks.problems:
        order = {key: index for index, (key, _) in enumerate(leaves(document))}
        findings = sorted(remarks.problems, key=lambda finding: _rank(finding.key, order))
        raise RecipeError([_placed(finding, loaded) for finding in findings])
    if refusals:
        raise Refused([_placed(finding, loaded) for finding in refusals])
    plan = Plan(
        run_id=run_id,
        name=recipe.name,
        executor=executor,
        run_dir=run_dir,
        recipe_source=None if loaded.source is None else str(loaded.source),
        overrides=loaded.overrides,
        recipe=document,
        values=(
            *_place(loaded),
            *_values(document, origins, device, network, threads, grace_s=grace_s, slurm=slurm),
        ),
        nodes=nodes,
        nproc_per_node=device.nproc_per_node,
        device=device.name,
        device_reason=device.reason,
        backend=device.backend,
        interface=network.interface,
        threads=threads.count,
        master_port=None if recipe.network.master_port == "auto" else recipe.network.master_port,
        worker=plan_worker(
            recipe,
            folder=folder,
            cwd=cwd,
            python=facts.python,
            fresh=engine.name == "torchrun",
            placeholders=placeholders,
        ),
        engine=engine.name,
        engine_reason=engine.reason,
        secrets=tuple(dict.fromkeys(recipe.secrets)),
        setup=recipe.setup,
        env=env,
        env_unset=network.unset,
        limits=_limits(recipe, facts, grace_s=grace_s, resumable=resumable),
        resumable=resumable,
        agent_argv=local_agent_argv(facts.python, run_dir, own=own_python)
        if slurm is None
        else slurm_agent_argv(launcher_python, run_dir, "batch"),
        slurm=slurm,
        prepare=recipe.prepare,
        internet=recipe.internet,
        scratch=recipe.scratch,
        torchrun=(),
        notes=(
            *loaded.notes,
            *_notes(recipe, device, engine, one_machine=one_machine, resumable=resumable),
            *remarks.notes,
        ),
    )
    overrides = _overrides(loaded, facts, document, device)
    torchrun = ("torchrun",) if own_python else (facts.python, "-m", "torch.distributed.run")
    # By hand it is the user's own file that runs, so these lines come first.
    how = torchrun_lines if slurm is None else srun_line
    lines = how(plan, torchrun=torchrun, overrides=overrides, cwd=facts.cwd)
    plan = dataclasses.replace(plan, torchrun=tuple(lines))
    return with_code(plan, facts.code)


def _placed(finding: Finding, loaded: LoadedRecipe) -> Problem:
    """A key of the recipe is shown at its line; a variable of the user's is in the environment."""
    place = "environment" if finding.key.isupper() else loaded.where(finding.key)
    return Problem(where=place, message=finding.message, hint=finding.hint)


def _rank(key: str, order: Mapping[str, int]) -> int:
    """Where a key, or what it is a part of, stands in the schema."""
    while key and key not in order:
        key = key.rpartition(".")[0]
    return order.get(key, -1)


def _own_address(facts: Facts) -> str:
    """How the nodes of one machine reach node 0: over loopback, in the family that there is (F096)."""
    loopback = [item.addresses for item in facts.interfaces if item.loopback and item.addresses]
    family = pick_family(loopback[:1])
    return family.addresses[0] if family else "127.0.0.1"


def _has_image(recipe: Recipe, executor: str) -> bool:
    return executor in ON_SLURM and recipe.slurm.container is not None


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


def _limits(recipe: Recipe, facts: Facts, *, grace_s: float, resumable: bool) -> Limits:
    faults, limits = recipe.faults, recipe.limits
    return Limits(
        max_restarts=faults.max_restarts if resumable else 0,
        grace_s=grace_s if faults.grace == "auto" else faults.grace.time_s,
        network_timeout_s=recipe.network.timeout.time_s,
        join_timeout_s=JOIN_TIMEOUT_S,
        wall_s=None if limits.wall is None else limits.wall.time_s,
        gpu_hours=limits.gpu_hours,
        until_s=facts.until_s,
    )


def _place(loaded: LoadedRecipe) -> Iterator[Value]:
    """Where it runs, where somebody said so."""
    if loaded.on is not None:
        yield Value(key="on", value=loaded.on[0], origin=loaded.on[1])


def _values(
    document: Mapping[str, Any],
    origins: Mapping[str, str],
    device: Device,
    network: Network,
    threads: Threads,
    *,
    grace_s: float,
    slurm: SlurmPlan | None,
) -> Iterator[Value]:
    """Every value of the recipe in the order of the schema; what `auto` became, and why."""
    grace = "auto" if slurm is None else f"auto: KillWait {slurm.kill_wait_s:g} s - 5 s"
    resolved: dict[str, tuple[object, str]] = {
        "resources.nproc_per_node": (device.nproc_per_node, "auto: one per GPU" if device.name == "cuda" else "auto"),
        "resources.device": (device.name, f"auto: {device.reason}"),
        "resources.threads": (threads.count, threads.origin),
        "network.preset": (network.preset, "auto"),
        "network.interface": (network.interface, network.interface_origin),
        "network.master_port": ("auto", "auto: a free port for each attempt"),
        "faults.grace": (f"{grace_s:.0f}s", grace),
    }
    if slurm is not None:
        resolved["slurm.continue"] = slurm.continue_how, f"auto: {slurm.continue_reason}"
    for key, value in leaves(document):
        if value == "auto" and key in resolved:
            yield Value(key=key, value=resolved[key][0], origin=resolved[key][1])
        else:
            yield Value(key=key, value=value, origin=origins.get(key, "default"))


def _notes(recipe: Recipe, device: Device, engine: Engine, *, one_machine: bool, resumable: bool) -> Iterator[str]:
    nodes = recipe.resources.nodes
    if one_machine and nodes > 1:
        yield f"{nodes} nodes on this machine: {nodes} agents"
    if recipe.resources.device == "auto":
        yield f"device {device.name}: {device.reason}"
    if engine.reason:
        yield engine.reason
    if not recipe.internet and not recipe.prepare and recipe.data is not None and recipe.data.options.get("full"):
        yield "data.full downloads the dataset, and nodes have no internet: download it before, by lines of `prepare`"
    if engine.name == "torchrun" and (recipe.preload or not recipe.is_script):
        yield "nothing is preloaded: torchrun starts each worker in a fresh interpreter"
    if not resumable and recipe.faults.max_restarts:
        yield (
            "a failure ends the run: nothing is restarted without `resume:`, "
            "since a start from zero over old outputs is worse than a stop"
        )


def _overrides(loaded: LoadedRecipe, facts: Facts, document: Mapping[str, Any], device: Device) -> list[str]:
    """All that separates the recipe file from the recipe of the plan: overrides, and flags written as such."""
    resolved = dict(leaves(document))
    flags = [f"{key}={resolved[key]}" for key, origin in loaded.origins.items() if origin.startswith("flag ")]
    if device.name == "cpu" and loaded.recipe.resources.device == "auto" and facts.gpus:
        flags.append("resources.device=cpu")  # a worker alone would see the GPUs that the plan leaves out
    return [*loaded.overrides, *(flag for flag in flags if flag not in loaded.overrides)]
