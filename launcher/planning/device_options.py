"""What in a training depends on its devices: errors for what they cannot do, remarks for what has no effect. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.planning.topology import Finding

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.topology import Device, Remarks
    from launcher.recipe.schema import Recipe


def check_device_options(recipe: Recipe, device: Device, remarks: Remarks) -> None:
    """Keys of a training against the device that its workers get."""
    if recipe.train is None:
        return
    if device.name == "cpu":
        remarks.problems += _not_on_cpu(recipe, device)
        remarks.notes += _idle_on_cpu(recipe)


def check_nsys(recipe: Recipe, facts: Facts, remarks: Remarks) -> None:
    """Nsight Systems is there, as far as this machine can tell: where the workers are on it."""
    if recipe.profiler is not None and recipe.profiler.tool == "nsys" and facts.nsys is False:
        message = "profiler.tool: nsys was asked for, and there is no `nsys` on this machine"
        hint = "install Nsight Systems, or put it into PATH; or tool: torch"
        remarks.problems.append(Finding("profiler.tool", message, hint))


def _not_on_cpu(recipe: Recipe, device: Device) -> Iterator[Finding]:
    why = f"the device is cpu ({device.reason})"
    if recipe.parallelism.options.get("sync_batchnorm"):
        message = f"parallelism.sync_batchnorm: true, and {why}: PyTorch has SyncBatchNorm for GPUs alone"
        yield Finding("parallelism.sync_batchnorm", message, "sync_batchnorm: false, or device: cuda")
    if recipe.parallelism.options.get("comm") == "bf16":
        message = f"parallelism.comm: bf16, and {why}: PyTorch sends gradients in bf16 over NCCL alone"
        yield Finding("parallelism.comm", message, "comm: fp16 or fp32, or device: cuda")
    if recipe.profiler is not None and recipe.profiler.tool == "memory":
        message = f"profiler.tool: memory, and {why}: it is the history of the memory of a GPU"
        yield Finding("profiler.tool", message, "tool: torch, or device: cuda")


def _idle_on_cpu(recipe: Recipe) -> Iterator[str]:
    assert recipe.train is not None, "the caller has looked"
    train, data = recipe.train, recipe.data
    if train.precision == "fp16":
        yield "train.precision: fp16 on CPU is slower than fp32, and good for a try alone; bf16 needs no scaling"
    if train.precision == "tf32":
        yield "train.precision: tf32 is of GPUs; on CPU it is fp32"
    if train.compile:
        yield "train.compile: on CPU the first step takes long, it needs a C++ compiler, and small networks gain little"
    if data is not None and data.pin_memory is True:
        yield "data.pin_memory: true has no effect on CPU"
    if recipe.resources.alloc != "default":
        yield f"resources.alloc: {recipe.resources.alloc} has no effect on CPU"
