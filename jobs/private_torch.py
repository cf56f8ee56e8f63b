"""What the job needs of torch that torch calls private: here alone, with a test for each version of torch.

They have no public name. (What the agent needs is in
`launcher.agent.elastic`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store  # where they are defined; torch.distributed re-exports them
from torch.distributed._shard._utils import narrow_tensor_by_index

__all__ = ["PrefixStore", "Store", "abort_groups", "buffers_of", "copy_each", "narrow_tensor_by_index", "norm_of_each"]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call: the interpreter is free meanwhile."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def norm_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The L2 norm of each tensor, in one call. At least one."""
    return torch._foreach_norm(list(tensors))


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of one module, itself and not a copy: a forward may put another tensor in the place of one."""
    return module._buffers


def abort_groups() -> None:
    """Abort all process groups: what waits in a collective of NCCL fails. gloo has none of that (`jobs.sockets`)."""
    dist.distributed_c10d._abort_process_group()
