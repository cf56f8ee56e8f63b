"""The gradients of a step, looked at once: whether all are finite, and how long they are together.

Replicas hold the same gradients, so each rank finds the same. Where ranks hold different parts, each finds the squares
of its part, divided by the number of ranks that hold the same part: summed over all ranks they are the whole model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobs.mesh import Grid
from jobs.private_torch import norm_of_each, scale_each

_SMALL = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The same on every rank."""

    problem: str
    """Which gradient is not finite; empty where all are."""
    norm: float
    """The L2 norm of all gradients together; not a number where there is a problem."""


class GradientCheck:
    """Of one network. `add`: sums numbers over all ranks; it is used where they hold different parts of the model."""

    def __init__(
        self, net: nn.Module, grid: Grid, add: Callable[[float, float], Sequence[float]], row: Tensor | None = None
    ) -> None:
        """`row`: all gradients one after the other, where they lie so."""
        self._named = list(net.named_parameters())
        self._grid, self._add, self._row = grid, add, row

    def look(self) -> Finding:
        """One pass over all numbers, and one wait for the device. Every rank must call it."""
        if self._row is not None and math.isfinite(norm := torch.linalg.vector_norm(self._row).item()):
            return Finding(problem="", norm=norm)
        named = [(name, each, each.grad) for name, each in self._named if each.grad is not None]
        if self._grid.is_replicated:
            problem, squares = _look([(name, grad) for name, _, grad in named])
            return Finding(problem=problem, norm=math.sqrt(squares) if not problem else math.nan)
        by_copies: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter, grad in named:
            local, copies = self._local(parameter, grad)
            by_copies.setdefault(copies, []).append((name, local))
        problem, squares = "", 0.0
        for copies, grads in sorted(by_copies.items()):
            found, sum_of_squares = _look(grads)
            problem, squares = problem or found, squares + sum_of_squares / copies
        bad, total = self._add(float(bool(problem)), 0.0 if problem else squares)
        if bad > 0:
            return Finding(problem=problem or "a gradient is not finite on another rank", norm=math.nan)
        return Finding(problem="", norm=math.sqrt(total))

    def clip(self, norm: float, largest: float) -> None:
        """Scale all gradients down to a norm of `largest`, where theirs is more. No wait for the device."""
        if norm <= largest:
            return
        grads = [each.grad for _, each in self._named if each.grad is not None]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        scale_each(local, largest / (norm + _SMALL))

    def _local(self, parameter: nn.Parameter, grad: Tensor) -> tuple[Tensor, int]:
        """The part of a gradient that this rank holds, and how many ranks hold the same."""
        holders = self._grid.degrees.size // self._grid.degrees.pp
        if not isinstance(grad, DTensor):
            return grad, holders
        assert isinstance(parameter, DTensor)
        if any(placement.is_partial() for placement in grad.placements):  # a sum that is still to be made
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        shards = 1
        for axis, placement in enumerate(grad.placements):
            shards *= 1 if placement.is_replicate() else grad.device_mesh.size(axis)
        return grad.to_local(), holders // shards


def _look(named: Sequence[tuple[str, Tensor]]) -> tuple[str, float]:
    """What is not finite, and the sum of the squares: one pass, a tenth of the time of asking each number."""
    grads = [(name, grad) for name, grad in named if grad.numel()]
    if not grads:
        return "", 0.0
    norms = norm_of_each([grad for _, grad in grads])
    device = norms[0].device
    if any(norm.device != device for norm in norms):  # `split` has several
        norms = [norm.to(device) for norm in norms]
    squares: float = torch.stack(list(norms)).double().square().sum().item()
    if math.isfinite(squares):
        return "", squares
    # The square of a number may be too large where the number is not, so this alone decides.
    for name, grad in grads:
        bad = grad[~torch.isfinite(grad)]
        if bad.numel():
            return f"the gradient of {name} is {bad.flatten()[0].item()}", math.nan
    exact = [torch.linalg.vector_norm(grad, dtype=torch.float64).to(device) for _, grad in grads]
    return "", torch.stack(exact).square().sum().item()
