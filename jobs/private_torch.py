"""What the job needs of torch that torch calls private: here alone, with a test for each version of torch.

They have no public name. (What the agent needs is in
`launcher.agent.elastic`.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store  # where they are defined; torch.distributed re-exports them
from torch.amp.grad_scaler import GradScaler
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = [
    "PrefixStore",
    "Store",
    "abort_groups",
    "buffers_of",
    "copy_each",
    "dump_memory_history",
    "gathered",
    "narrow_tensor_by_index",
    "norm_of_each",
    "record_memory_history",
    "scale_each",
    "tell_overflow",
    "update_adamw",
]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call: the interpreter is free meanwhile."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def gathered(tensor: Tensor) -> Tensor:
    """A tensor whose parts are on several ranks, whole on each of them; they all ask for it."""
    # What torch says there of speed (one gather per axis of the mesh) is of no use to anybody, at the end of a run.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The L2 norm of each tensor, in one call. At least one."""
    return torch._foreach_norm(list(tensors))


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor, in place, in one call."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def update_adamw(parameters: Sequence[Tensor], slots: Sequence[dict[str, Tensor]], group: dict[str, Any]) -> None:
    """What a step of a fused AdamW comes to, in two calls: all parameters on one device, of one type, with gradients.

    slots: their state in the optimizer. group: the one they belong to.
    """
    steps = [each["step"] for each in slots]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        list(parameters),
        [each.grad for each in parameters],  # type: ignore[misc]
        [each["exp_avg"] for each in slots],
        [each["exp_avg_sq"] for each in slots],
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


def tell_overflow(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Another rank has found what this one has not: gradients that are not finite. After `unscale_`."""
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)


def record_memory_history() -> None:
    """From now on note each block of GPU memory that is taken or given back, with its Python stack; at most 200,000."""
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")


def dump_memory_history(path: Path) -> None:
    """Write what was noted, for pytorch.org/memory_viz, and note no more."""
    memory: Any = torch.cuda.memory  # torch has no types for the first of these
    memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of one module, itself and not a copy: a forward may put another tensor in the place of one."""
    return module._buffers


def abort_groups() -> None:
    """Abort all process groups: what waits in a collective of NCCL fails. gloo has none of that (`jobs.sockets`)."""
    dist.distributed_c10d._abort_process_group()
