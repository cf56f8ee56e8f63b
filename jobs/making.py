"""What a training is made of, from its job: each function makes one thing, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jobs import registry
from jobs.batches import Batches, divide
from jobs.checkpoint import Checkpoints
from jobs.data.base import Data
from jobs.job import Job
from jobs.memory import Memory
from jobs.parts import Calendar
from jobs.sampler import Sampler, derive_seed
from jobs.world import World
from launcher.runs.rundir import RunDir


def with_all_nodes(job: Job) -> Batches | None:
    """How the batch is divided when every planned node is there; None for a job by hand, which has no plan.

    An elastic run that begins with fewer goes on from it: each rank makes more micro-batches, and none is larger.
    """
    if job.world_sizes is None:
        return None
    most = job.world_sizes[-1]
    return divide(job.data.global_batch_size, world_size=most, wanted=job.train.accumulate, before=None)


def make_sampler(job: Job, data: Data, world: World, batches: Batches) -> Sampler:
    """The order of the samples, for this rank."""
    return Sampler(
        num_samples=len(data.train),
        global_batch_size=job.data.global_batch_size,
        seed=job.train.seed,
        accumulate=batches.accumulate,
        rank=world.rank,
        world_size=world.size,
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


def make_model(job: Job, device: torch.device) -> nn.Module:
    """The network; its first weights depend on the seed alone, so they are the same on every rank."""
    torch.manual_seed(derive_seed("model", job.train.seed))
    net: nn.Module = registry.build("model", job.model.name, job.model.options)
    return net.to(device)


def wrap(job: Job, net: nn.Module, device: torch.device) -> nn.Module:
    """The network as the strategy shares it between the ranks."""
    section = job.recipe.parallelism
    wrapped: nn.Module = registry.build("strategy", section.name, section.options, net, device)
    return wrapped


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
