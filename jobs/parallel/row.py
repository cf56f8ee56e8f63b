"""Small replicas on CPUs: the gradients lie in one row, and travel together with what the ranks tell each other.

DistributedDataParallel sends what fits into its first bucket when the backward is over, too: there is nothing to
overlap. What is left out is its part of each forward and backward, a copy, and the second message of a step. At a
millisecond per step that is a fifth of it. Between ranks of one host they travel through memory (`jobs.host_sum`),
which leaves a third of what is left.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.agreement import CARRIED
from jobs.host_sum import HostSum, connect
from jobs.parallel.base import Pass, Shared
from jobs.registry import OptionError

LARGEST_BYTES = 1 << 20
"""Of gradients in one row: the size of DistributedDataParallel's first bucket."""


def fits_row(net: nn.Module, device: torch.device) -> bool:
    """Whether the gradients of a network may lie in one row."""
    parameters = [each for each in net.parameters() if each.requires_grad]
    size_bytes = sum(each.numel() * each.element_size() for each in parameters)
    plain = all(each.dtype == torch.float32 and _is_dense(each) for each in parameters)
    return device.type == "cpu" and plain and 0 < size_bytes <= LARGEST_BYTES


class Row(Shared):
    """Replicas of a network; the gradients that it leaves are sums over the ranks, not means."""

    sums_gradients = True

    def __init__(self, net: nn.Module, *, ranks: int) -> None:
        super().__init__(net)
        self._ranks = ranks
        self._named = [(name, each) for name, each in net.named_parameters() if each.requires_grad]
        self._row = torch.zeros(sum(each.numel() for _, each in self._named) + CARRIED)
        self.gradients, self.carrier = self._row[:-CARRIED], self._row[-CARRIED:]
        self._views: list[Tensor] = []
        self._host_sum: HostSum | None = None

    def connect(self, *, local_size: int, timeout_s: float) -> None:
        """Through memory, where all ranks are on one host."""
        self._host_sum = connect(self._row, local_size=local_size, timeout_s=timeout_s)

    def run(self, work: Pass) -> None:
        """Forward and backward of each micro-batch; then all gradients and the message travel."""
        self._row.zero_()
        for (_, parameter), view in zip(self._named, self._views, strict=False):
            parameter.grad = view
        super().run(work)
        if not self._views:
            self._lay_out()
        if self._host_sum is not None:
            self._host_sum.all_reduce()
        elif self._ranks > 1:
            dist.all_reduce(self._row)

    def _lay_out(self) -> None:
        """After the first backward: each gradient gets its place, in the memory format of its parameter.

        A parameter to which none has come is left out of the forward, and nobody has said that it may be.
        """
        if missing := [name for name, each in self._named if each.grad is None]:
            raise OptionError(
                f"parallelism.find_unused_parameters: false, and no gradient comes to {', '.join(missing)}; set it to "
                "true, or leave these layers out of the model"
            )
        begin = 0
        for _, parameter in self._named:
            view = self._row.as_strided(parameter.size(), parameter.stride(), begin)
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
            self._views.append(view)
            begin += parameter.numel()


def _is_dense(parameter: Tensor) -> bool:
    """Whether a row of as many numbers holds it in its own memory format."""
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return parameter.is_contiguous() or last
