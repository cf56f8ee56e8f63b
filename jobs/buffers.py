"""Buffers that a forward changes (statistics of a batch norm): one set of them for all ranks, with every step.

Each rank's forward changes its own from its own samples. DistributedDataParallel would give those of rank 0 to the
others before the next forward: too late for an evaluation, a checkpoint (whose tensors are written by one rank or
another) or a survivor that keeps the step. So they travel with the loss of the step, while the backward runs: the same
numbers, a step is complete with them, and nothing is sent twice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.private_torch import buffers_of, copy_each


class SharedBuffers:
    """The floating-point buffers of a network, as rank 0 has them. Others (counters) are the same on all ranks.

    ranks: how many have the same part of the network, and other samples. group: these ranks; None = all. source: the
    one of them that sends, by its rank in the whole world.
    """

    def __init__(self, net: nn.Module, *, ranks: int, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
        self._group, self._source = group, source
        self._places = [
            (buffers_of(module), name)
            for module in (net.modules() if ranks > 1 else ())
            for name, buffer in buffers_of(module).items()
            if buffer is not None and buffer.is_floating_point()
        ]
        self._sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def send(self) -> None:
        """After the last forward of a step, on every rank: rank 0 sends its own."""
        assert not self._sent, "the last ones were not received"
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for held, name in self._places:  # a forward may put another tensor in the place of a buffer
            if (buffer := held[name]) is not None:
                by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            work = dist.broadcast(flat, src=self._source, group=self._group, async_op=True)
            assert work is not None, "every rank is in the default group"
            self._sent.append((work, flat, buffers))

    def receive(self) -> None:
        """Wait for them, and put them in place."""
        for work, flat, buffers in self._sent:
            work.wait()
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            copy_each(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
        self._sent.clear()
