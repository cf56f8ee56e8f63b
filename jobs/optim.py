"""Optimizers, and schedules of the learning rate as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from jobs.private_torch import update_adamw
from jobs.registry import OptionError, optimizer, schedule

BOUNDS = {
    "lr": (0, None),
    "weight_decay": (0, None),
    "beta1": (0, 1),
    "beta2": (0, 1),
    "eps": (0, None),
    "momentum": (0, None),
    "final": (0, None),
}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""


@optimizer("adamw")
def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Optimizer:
    """Adam with decoupled weight decay.

    Args:
        lr: Learning rate, before the schedule.
        weight_decay: Share of the weights that is taken off per step, times lr.
        beta1: Decay of the mean of the gradients.
        beta2: Decay of the mean of their squares.
        eps: Added to the denominator.
    """
    return QuickAdamW(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True)


class QuickAdamW(AdamW):
    """AdamW, the same to the bit. On a CPU its step is the fused update alone.

    Of a small model most of torch's step goes into finding out that all parameters are ordinary tensors of one type.
    """

    of_torch = "AdamW"
    """Under this name it is saved: a checkpoint of either goes on with the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        updates = []
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            updates.append((group, parameters, [self.state.get(each) or {} for each in parameters]))
        # the first step makes the state; a scaler of fp16 gives this one what it has found
        is_whole = all(all(slots) for _, _, slots in updates) and not hasattr(self, "found_inf")
        if closure is not None or not is_whole or not self._is_plain:
            return super().step(closure)
        for group, parameters, slots in updates:
            update_adamw(parameters, slots, group)
        return None

    @cached_property
    def _is_plain(self) -> bool:
        parameters = [each for group in self.param_groups for each in group["params"]]
        first = parameters[0]
        return first.device.type == "cpu" and all(
            not isinstance(each, DTensor) and each.device == first.device and each.dtype == first.dtype
            for each in parameters
        )


@optimizer("sgd")
def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float = 0.1,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent.

    Args:
        lr: Learning rate, before the schedule.
        momentum: Share of the last update that is kept.
        nesterov: Look ahead along the momentum.
        weight_decay: Share of the weights that is added to the gradient.
    """
    if nesterov and not momentum:
        raise OptionError("train.optimizer.nesterov: true looks along the momentum, and momentum is 0; give it, as 0.9")
    listed: list[Any] = list(parameters)
    shared_out = any(isinstance(each, DTensor) for group in listed for each in _parameters(group))
    return SGD(
        listed,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        fused=None if shared_out else True,  # torch has no rule for this one over DTensors, as it has for AdamW's
        foreach=True if shared_out else None,
    )


def _parameters(listed: Any) -> Iterable[nn.Parameter]:
    """Of one entry of an optimizer's list: a parameter, or a group of them."""
    return listed["params"] if isinstance(listed, dict) else (listed,)


@schedule("constant")
def constant(step: int, total_steps: int, warmup_steps: int) -> float:
    """The same learning rate all the way, after the warm-up."""
    return warm_up(step, warmup_steps)


@schedule("linear")
def linear(step: int, total_steps: int, warmup_steps: int, *, final: float = 0.0) -> float:
    """Falls on a straight line, after the warm-up.

    Args:
        final: Share of the learning rate that is left at the end.
    """
    return warm_up(step, warmup_steps) * (1 - (1 - final) * decayed(step, total_steps, warmup_steps))


@schedule("cosine")
def cosine(step: int, total_steps: int, warmup_steps: int, *, final: float = 0.0) -> float:
    """Falls along half a cosine, after the warm-up.

    Args:
        final: Share of the learning rate that is left at the end.
    """
    falling = (1 + math.cos(math.pi * decayed(step, total_steps, warmup_steps))) / 2
    return warm_up(step, warmup_steps) * (final + (1 - final) * falling)


def warm_up(step: int, warmup_steps: int) -> float:
    """Rises from 1/warmup_steps to 1. `step` is the number of updates already done, so the first one is not lost."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def decayed(step: int, total_steps: int, warmup_steps: int) -> float:
    """How much of the way after the warm-up is done, from 0 to 1."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
