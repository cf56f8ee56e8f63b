"""Pipeline parallel: stages, each with some of the layers, through which micro-batches go one after the other.

The schedules are torch's (`torch.distributed.pipelining`). What they are given here:

- stages whose shapes are known (from the network on the meta device), so that no rank sends another a pickle to say
  what will come;
- micro-batches of one size: smaller ones are filled up with their first sample, and the loss does not look at that;
- what lies between two stages in full precision, also where they compute in 16 bits: nothing is rounded twice.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.data.base import Batch
from jobs.mesh import Grid
from jobs.parallel.balance import balanced
from jobs.parallel.base import Pass, Shared
from jobs.registry import OptionError


class StageLayers(nn.Sequential):
    """The layers of one stage, under the names that they have in the whole model."""

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__(layers)
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.after_forward: Callable[[], None] = _nothing

    def forward(self, inputs: Tensor) -> Tensor:
        """In the precision of the step; what comes out is in full precision."""
        with self.precision():
            outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        self.after_forward()
        return _between(outputs)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a rank has of a network, and what it knows of the rest."""

    net: StageLayers
    index: int
    count: int
    shapes: Shapes
    elsewhere: frozenset[str]
    """Names in the state of the whole network that are not in this stage."""


class Shapes:
    """What lies before each stage and after it, for inputs of some shape: found with a network without numbers."""

    def __init__(self, net: nn.Sequential, parts: list[range]) -> None:
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}.values()
        without_numbers: dict[int, Any] = {id(each): _like(each) for each in tensors}
        self._layers = list(copy.deepcopy(net, without_numbers))  # a copy that takes no memory
        self._parts = parts

    def around(self, index: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into a stage and what comes out of it, on the meta device."""
        value = torch.empty(inputs.shape, dtype=inputs.dtype, device="meta")
        before = value
        with torch.no_grad():
            for part in self._parts[: index + 1]:
                before = value
                for layer in self._layers[part.start : part.stop]:
                    value = layer(value)
                value = _between(value)
        return before, value


def cut(net: nn.Module, grid: Grid) -> Stage:
    """The stage of this rank. Raises OptionError where the network cannot be cut into so many."""
    count, index = grid.degrees.pp, grid.place["pp"]
    if not isinstance(net, nn.Sequential):
        raise OptionError(
            f"parallelism.pp: {count} cuts between the layers of an nn.Sequential, and the model is a "
            f"{type(net).__name__}"
        )
    layers = list(net.named_children())
    try:
        parts = balanced([sum(each.numel() for each in layer.parameters()) for _, layer in layers], count)
    except ValueError as error:
        raise OptionError(f"parallelism.pp: {error}") from None
    _check_apart(layers, parts)
    if in_place := [layers[part.start][0] for part in parts[1:] if getattr(layers[part.start][1], "inplace", False)]:
        raise OptionError(
            f"parallelism.pp: {count}, and layer {', '.join(in_place)}, with which a stage begins, would overwrite "
            "what came from the stage before; inplace: false, or do without pp"
        )
    own = StageLayers(OrderedDict(layers[parts[index].start : parts[index].stop]))
    shapes = Shapes(net, parts)
    elsewhere = frozenset(net.state_dict()) - frozenset(own.state_dict())
    return Stage(net=own, index=index, count=count, shapes=shapes, elsewhere=elsewhere)


def _check_apart(layers: list[tuple[str, nn.Module]], parts: list[range]) -> None:
    """Raise OptionError where stages would share a parameter: each would have its own, and train it alone."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for name, layer in layers[part.start : part.stop]:
            for parameter in layer.parameters():
                before, other = seen.setdefault(parameter, (number, name))
                if before != number:
                    raise OptionError(
                        f"parallelism.pp: layers {other} and {name} share a parameter, and are in different stages; "
                        "the model has an option for that, or do without pp"
                    )


class Pipeline(Shared):
    """One stage of a pipeline. All ranks of a pipeline get the same batches."""

    everyone_evaluates = True

    def __init__(self, stage: Stage, grid: Grid, device: torch.device) -> None:
        super().__init__(stage.net)
        self._stage_net, self._stage, self._device = stage.net, stage, device
        self._group = grid.axis("pp").get_group()
        self._schedule = grid.pipeline
        self._schedules: dict[tuple[int, torch.Size, torch.dtype], _Planned] = {}
        self.elsewhere = stage.elsewhere  # may be empty: other stages know that there are stages

    @property
    def is_last(self) -> bool:
        """Whether outputs and losses are made here."""
        return self._stage.index == self._stage.count - 1

    def run(self, work: Pass) -> None:
        """Forward and backward of all micro-batches, in the order of the schedule."""
        batches = list(work.batches)
        work.before_forward()
        sizes = [len(inputs) if index < work.counted else 0 for index, (inputs, _) in enumerate(batches)]
        batches += batches[:1] * (self._stage.count - len(batches))  # torch's schedules want one for each stage
        inputs, targets = _filled(batches)
        planned = self._planned(len(batches), inputs[0])
        step = _Step(work, sizes + [0] * (len(batches) - len(sizes)), self.is_last)
        planned.step = step
        self._stage_net.precision, self._stage_net.after_forward = work.precision, step.forwarded
        arguments = (torch.cat(inputs),) if self._stage.index == 0 else ()
        target = torch.cat(targets) if self.is_last else None
        if not self.is_last:
            work.scaled(torch.zeros((), device=self._device))  # the scale of fp16 begins with the first loss
        planned.schedule.step(*arguments, target=target, return_outputs=False)
        self._stage_net.precision, self._stage_net.after_forward = nullcontext, _nothing

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Outputs on the last stage; None on the others."""
        before, _ = self._stage.shapes.around(self._stage.index, inputs)
        if self._stage.index > 0:
            inputs = torch.empty(before.shape, dtype=before.dtype, device=self._device)
            dist.recv(inputs, group=self._group, group_src=self._stage.index - 1)
        outputs: Tensor = self.net(inputs)
        if self.is_last:
            return outputs
        dist.send(outputs, group=self._group, group_dst=self._stage.index + 1)
        return None

    def _planned(self, count: int, like: Tensor) -> _Planned:
        """A schedule for so many micro-batches of this shape; there are two of them in a training, or three."""
        key = (count, like.shape, like.dtype)
        if key not in self._schedules:
            self._schedules[key] = self._plan(count, like)
        return self._schedules[key]

    def _plan(self, count: int, like: Tensor) -> _Planned:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        before, after = self._stage.shapes.around(self._stage.index, like)
        stage = PipelineStage(
            self._stage_net,
            self._stage.index,
            self._stage.count,
            self._device,
            input_args=before.requires_grad_(self._stage.index > 0 and before.is_floating_point()),
            output_args=after.requires_grad_(),
            group=self._group,
        )
        planned = _Planned()
        kind = Schedule1F1B if self._schedule == "1f1b" else ScheduleGPipe
        planned.schedule = kind(stage, n_microbatches=count, loss_fn=planned.loss, scale_grads=False)
        return planned


class _Planned:
    """A schedule of torch, and the step that goes through it."""

    schedule: Any
    step: _Step

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Called on the last stage for each micro-batch, in order."""
        return self.step.loss(outputs, targets)


class _Step:
    """One step on one stage."""

    def __init__(self, work: Pass, sizes: list[int], is_last: bool) -> None:
        self._work, self._sizes, self._is_last = work, sizes, is_last
        self._forwards = self._losses = 0
        self._total: Tensor | None = None

    def forwarded(self) -> None:
        """A forward of this stage is through."""
        self._forwards += 1
        if self._forwards == len(self._sizes) and not self._is_last:
            self._work.before_last_backward(torch.zeros(()))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the samples that are there; of none it is 0, with a gradient all the same."""
        size = self._sizes[self._losses]
        self._losses += 1
        if size:
            with self._work.precision():
                loss = self._work.loss(outputs[:size], targets[:size])
        else:
            loss = outputs.sum() * 0.0
        self._total = loss.detach() if self._total is None else self._total + loss.detach()
        if self._losses == len(self._sizes):
            self._work.before_last_backward(self._total)
        return self._work.scaled(loss)


def _filled(batches: list[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of all micro-batches, filled up to the size of the largest."""
    largest = max(len(inputs) for inputs, _ in batches)
    columns = zip(*(tuple(_fill(each, largest)) for each in batches), strict=True)
    inputs, targets = (list(column) for column in columns)
    return inputs, targets


def _fill(batch: Batch, size: int) -> Iterator[Tensor]:
    for tensor in batch:
        missing = size - len(tensor)
        yield torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if missing else tensor


def _between(outputs: Tensor) -> Tensor:
    """As it goes from one stage to the next."""
    return (outputs.float() if outputs.is_floating_point() else outputs).contiguous()


def _like(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _nothing() -> None:
    """Nobody is told."""
