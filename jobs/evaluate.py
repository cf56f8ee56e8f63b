"""Evaluates a checkpoint by itself, in one process: what `launch eval` starts.

Standard input is one JSON object:
    {"checkpoint": FOLDER, "recipe": {...}, "threads": 1}
and the last line of standard output too:
    {"step", "samples", "device", "metrics", "recorded"}, recorded: what the training found at that step, or null
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs import registry
from jobs.batches import read_batches
from jobs.data.base import DataError, Samples
from jobs.evaluation import batch_size
from jobs.fit import check_fit
from jobs.folders import progress_of, read_state
from jobs.job import job_alone
from jobs.layers import lay_channels_last
from jobs.loader import Fetch
from jobs.making import make_model, make_task
from jobs.manifest import BrokenError, verify
from jobs.precision import make_precision
from jobs.registry import OptionError
from jobs.state import CheckpointError, restore_model
from jobs.tasks.base import Task
from jobs.world import World, WorldError, pick_device
from launcher.recipe.schema import Recipe

Order = Mapping[str, Any]


def evaluate_checkpoint(order: Order) -> dict[str, Any]:
    """Restore the model and evaluate it on the held-out data of the order's recipe.

    Raises CheckpointError or BrokenError for a checkpoint that cannot be used, WorldError for a device that is not
    there, DataError where there is nothing to evaluate on, OptionError for what cannot be made.
    """
    folder = Path(order["checkpoint"])
    job = job_alone(Recipe.model_validate(order["recipe"]))
    verify(folder)
    torch.set_num_threads(order["threads"])
    device = pick_device(job.device, World(rank=0, size=1, local_rank=0, local_size=1))
    source = registry.build_section("dataset", job.data)
    source.prepare()
    data, task = source.load(), make_task(job, source)
    samples = data.evaluation
    if samples is None or not len(samples):
        raise DataError(f"data: {job.data.name} has no held-out samples")
    check_fit(job.model, replace(data, train=samples), task)
    net = make_model(job).to(device)
    if job.train.channels_last:
        lay_channels_last(net)
    restore_model(net, folder, None)
    around = make_precision(job.train.precision, device).around_forward
    shares = read_batches(read_state(folder)).world_size  # the strategy may have been another one then
    metrics = measure(net, task, samples, shares=shares, device=device, around_forward=around)
    progress = progress_of(folder)
    recorded = None if progress.metrics is None else dict(progress.metrics)
    facts = {"step": progress.step, "samples": len(samples), "device": str(device)}
    return {**facts, "metrics": metrics, "recorded": recorded}


def measure(
    net: nn.Module,
    task: Task,
    samples: Samples,
    *,
    shares: int,
    device: torch.device,
    around_forward: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """The metrics of the task over all samples, in the batches that so many ranks would make of them.

    A sum of numbers depends on their order in its last bits: with the same shares it is the one of the training.
    """
    fetch = Fetch(samples, seed=0)
    batch = batch_size(task, fetch)
    total = torch.zeros(1 + len(task.measures), dtype=torch.float64)
    net.eval()
    with torch.inference_mode(), around_forward():
        for share in range(shares):
            sums = torch.zeros_like(total)
            mine = torch.arange(len(samples))[share::shares]
            for start in range(0, len(mine), batch):
                indices = mine[start : start + batch]
                inputs, targets = (tensor.to(device) for tensor in fetch[0, indices])
                outputs = net(inputs)
                sums[0] += task.loss(outputs, targets).double().cpu()
                sums[1:] += task.measure(outputs, targets).double().cpu()
            total += sums
    loss, *measured = (total / len(samples)).tolist()
    metrics = task.metrics(loss, dict(zip(task.measures, measured, strict=True)))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def answer(work: Callable[[Order], dict[str, Any]]) -> int:
    """Do what standard input says; whatever is printed meanwhile goes to standard error. 1 where it cannot be done."""
    with redirect_stdout(sys.stderr):
        order = json.loads(sys.stdin.read())
        try:
            done = work(order)
        except BrokenError as error:
            print(f"launch: {order['checkpoint']}: {error}; --step takes an older one", file=sys.stderr)
            return 1
        except (CheckpointError, DataError, WorldError, OptionError, OSError) as error:
            print(f"launch: {error}", file=sys.stderr)
            return 1
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    registry.load_all()
    sys.exit(answer(evaluate_checkpoint))
