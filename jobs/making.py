"""What a training is made of, from its job: each function makes one thing, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from jobs import registry
from jobs.batches import Batches, divide
from jobs.checkpoint import Checkpoints
from jobs.data.base import Data, Source
from jobs.hygiene import set_deterministic
from jobs.job import Job
from jobs.layers import prepare_layers
from jobs.loader import Loader, seed_all
from jobs.memory import Memory
from jobs.mesh import Grid, make_grid
from jobs.parallel.base import Shared
from jobs.parts import Calendar
from jobs.precision import make_precision
from jobs.sampler import Sampler, derive_seed
from jobs.state import TrainingState
from jobs.tasks.base import Task
from jobs.world import World
from launcher.recipe.degrees import WITH_FSDP, resolve_degrees
from launcher.runs.rundir import RunDir


def with_all_nodes(job: Job) -> Batches | None:
    """How the batch is divided when every planned node is there; None for a job by hand, which has no plan.

    An elastic run that begins with fewer goes on from it: each rank makes more micro-batches, and none is larger.
    """
    if job.world_sizes is None:
        return None
    most, section = job.world_sizes[-1], job.recipe.parallelism
    shares = resolve_degrees(section, world_size=most, nodes=job.recipe.resources.max_nodes).data
    return divide(job.data.global_batch_size, world_size=shares, wanted=job.train.accumulate, before=None)


def make_sampler(job: Job, data: Data, grid: Grid, batches: Batches) -> Sampler:
    """The order of the samples, for this rank."""
    return Sampler(
        num_samples=len(data.train),
        global_batch_size=job.data.global_batch_size,
        seed=job.train.seed,
        accumulate=batches.accumulate,
        rank=grid.data_rank,
        world_size=grid.degrees.data,
    )


def make_loader(job: Job, data: Data, sampler: Sampler, *, samples_seen: int, device: torch.device) -> Loader:
    """What brings the samples of this rank, from there on."""
    section = job.data
    pins = device.type == "cuda" and section.pin_memory is not False
    return Loader(
        data.train,
        sampler,
        samples_seen=samples_seen,
        loader_workers=section.loader_workers,
        prefetch=section.prefetch,
        pin_memory=pins,
    )


def make_calendar(job: Job, sampler: Sampler) -> Calendar:
    """All lengths of the recipe, in steps."""
    per_epoch = sampler.steps_per_epoch
    eval_every, save_every = job.train.eval_every, job.recipe.checkpoint.every
    snapshot_every = job.recipe.checkpoint.memory_every
    return Calendar(
        total_steps=job.train.until.steps(per_epoch),
        steps_per_epoch=per_epoch,
        log_every=max(1, job.train.log_every.steps(per_epoch)),
        eval_every=None if eval_every is None else max(1, eval_every.steps(per_epoch)),
        save_every=None if save_every is None else max(1, save_every.steps(per_epoch)),
        snapshot_every=None if snapshot_every is None else max(1, snapshot_every.steps(per_epoch)),
    )


def make_model(job: Job) -> nn.Module:
    """The network, in the memory of the host: the strategy brings to the device what this rank needs of it.

    Its first weights depend on the seed alone, so they are the same on every rank.
    """
    seed = derive_seed("model", job.train.seed)
    seed_all(seed)  # a model of the user's own may draw from any generator
    torch.manual_seed(seed)
    net = registry.build_section("model", job.model)
    if not isinstance(net, nn.Module):
        raise registry.OptionError(f"model.target: {job.model.target} returns a {type(net).__name__}, and no nn.Module")
    return net


def place_on_mesh(job: Job, world: World, device: torch.device) -> Grid:
    """Where this rank stands. Raises OptionError where the degrees of the recipe do not fit the ranks there are."""
    section, nodes = job.recipe.parallelism, world.size // world.local_size
    try:
        degrees = resolve_degrees(section, world_size=world.size, nodes=nodes)
    except ValueError as error:
        raise registry.OptionError(str(error)) from None
    if job.train.accumulate < degrees.pp:
        raise registry.OptionError(
            f"train.accumulate: {job.train.accumulate}, and parallelism.pp is {degrees.pp}: a pipeline works on one "
            f"micro-batch per stage at least; make it {degrees.pp} or more"
        )
    return make_grid(degrees, world, device.type, pipeline=section.pipeline, by_fsdp=section.name in WITH_FSDP)


def make_task(job: Job, source: Source) -> Task:
    """What is learned: what the recipe says, else what belongs to the data."""
    section = job.train.task
    name, options = (
        (getattr(source, "task", "classification"), {}) if section is None else (section.name, section.options)
    )
    task: Task = registry.build("task", name, options)
    return task


def share_model(job: Job, world: World, device: torch.device) -> tuple[Grid, Shared]:
    """Where this rank stands, and the network as the strategy shares it between the ranks."""
    section = job.recipe.parallelism
    _check_comm(job)
    grid = place_on_mesh(job, world, device)
    set_deterministic(job.train.deterministic)
    net = make_model(job)
    is_cut = not grid.is_replicated or section.name == "split"
    prepare_layers(net, job.train, strategy=section.name, is_cut=is_cut, device=device)
    shared: Shared = registry.build("strategy", section.name, section.options, net, grid, device)
    return grid, shared


def _check_comm(job: Job) -> None:
    """powersgd adds what it left out of a step to a later one: a gradient that is not finite would stay for ever."""
    if job.recipe.parallelism.options.get("comm") != "powersgd":
        return
    wrong = {
        "train.precision: fp16": job.train.precision == "fp16",
        f"faults.on_nan: {job.recipe.faults.on_nan}": job.recipe.faults.on_nan != "stop",
    }
    if given := " and ".join(key for key, is_wrong in wrong.items() if is_wrong):
        raise registry.OptionError(
            f"parallelism.comm: powersgd does not go with {given}: a gradient that is not finite would stay in what it "
            "remembers; use comm: fp16 or bf16"
        )


def make_optimizer(job: Job, net: nn.Module) -> Optimizer:
    """Of all parameters of this rank."""
    section = job.train.optimizer
    groups = groups_of(net)
    parameters = net.parameters() if len(groups) == 1 else [{"params": group} for group in groups]
    optimizer: Optimizer = registry.build("optimizer", section.name, section.options, parameters)
    return optimizer


def groups_of(net: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters that one fused update can take together: not tensors and DTensors, nor DTensors of several meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in net.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def make_state(job: Job, shared: Shared, device: torch.device) -> TrainingState:
    """The network with its optimizer, and the scale of fp16: what a checkpoint holds."""
    precision = make_precision(job.train.precision, device)
    return TrainingState(shared.net, make_optimizer(job, shared.net), precision, shared.elsewhere)


def make_schedule(job: Job, calendar: Calendar) -> Any:
    """Step -> factor of the learning rate."""
    section = job.train.schedule
    function = registry.find("schedule", section.name)
    warmup_steps = section.warmup.steps(calendar.steps_per_epoch)
    return lambda step: function(step, calendar.total_steps, warmup_steps, **section.options)


def make_checkpoints(job: Job, run_dir: RunDir, run_id: str, memory: Memory) -> Checkpoints:
    """The checkpoints of the run; each notes what it was trained from."""
    recipe = job.recipe.model_dump(mode="json", by_alias=True, include={"name", "model", "data", "train"})
    section = job.recipe.checkpoint
    return Checkpoints(
        run_dir.checkpoints,
        run_id=run_id,
        attempt=job.attempt,
        keep=section.keep,
        best=section.best,
        record={"recipe": recipe},
        memory=memory,
    )
