"""What a strategy makes of a network: something that makes the gradients of a step, with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jobs.data.base import Batch


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forwards and backwards of one step, as the trainer wants them; the same number on every rank."""

    batches: Iterator[Batch]
    """Micro-batches on the device, `count` of them."""
    count: int
    counted: int
    """How many of them count, from the first on; the others are there so that no rank sits out."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> the loss, summed over the samples."""
    scaled: Callable[[Tensor], Tensor]
    """The loss as it goes into the backward: ranks average their gradients, and the average is to be the mean."""
    loss_gradient: Tensor | None = None
    """With what the backward of a loss may begin in place of `scaled`: the same to the bit, and two operations less."""
    precision: Callable[[], AbstractContextManager[Any]]
    """Around each forward and its loss."""
    before_forward: Callable[[], None]
    """Called when a batch is there: from here on, the strategy may wait for others."""
    before_last_backward: Callable[[Tensor], None]
    """Called once, with the loss of this rank summed over its samples (0 where it computes none)."""


class Shared:
    """A network as the ranks share it. Replicas, and the base of the other strategies.

    net: holds the parameters that this rank has, under the names that they have in the whole model. forward: the same
    as the strategy wraps it.
    """

    everyone_evaluates = False
    """Whether a forward needs the other ranks: then all make equally many of them in an evaluation."""
    elsewhere: frozenset[str] | None = None
    """Names of the parameters and buffers that other ranks have, and this one not; None: every rank has all names."""
    sums_gradients = False
    """Whether the gradients are sums over the ranks, and not means."""
    gradients: Tensor | None = None
    """All of this rank in one row, where they lie so."""
    carrier: Tensor | None = None
    """Numbers that are summed over the ranks together with the gradients, where there are such."""
    remarks: tuple[str, ...] = ()
    """What is to be said at the start of a training."""

    def __init__(self, net: nn.Module, forward: nn.Module | None = None) -> None:
        self.net = net
        self.forward = net if forward is None else forward

    def connect(self, *, local_size: int, timeout_s: float) -> None:
        """Make connections to the other ranks beside those of torch, all ranks together, once.

        local_size: how many ranks are on this host. timeout_s: how long one waits for another in a step.
        """

    def run(self, work: Pass) -> None:
        """Forward and backward of each micro-batch; afterwards the gradients are those of all ranks."""
        total: Tensor | None = None
        for index, (inputs, targets) in enumerate(work.batches):
            is_last = index == work.count - 1
            with self.sync(is_last):  # around the forward too, or it has no effect
                work.before_forward()
                with work.precision():
                    outputs = self.forward(inputs)
                    loss = self.loss(work, outputs, targets)
                if index >= work.counted:
                    loss = loss * 0.0
                total = loss.detach() if total is None else total + loss.detach()
                if is_last:
                    work.before_last_backward(total)
                if work.loss_gradient is None:
                    torch.autograd.backward(work.scaled(loss))
                else:
                    torch.autograd.backward(loss, work.loss_gradient)

    def loss(self, work: Pass, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one micro-batch, summed over its samples."""
        return work.loss(outputs, targets)

    def sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch: gradients travel with the last one of a step alone."""
        context: Any = nullcontext() if is_last else getattr(self.forward, "no_sync", nullcontext)()
        return context  # type: ignore[no-any-return]

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Outputs without gradients, in the mode that the network is in; None where another rank has them."""
        outputs: Tensor = self.net(inputs)
        return outputs
