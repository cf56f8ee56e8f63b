"""The state of a training: what is saved of model and optimizer, and how it is put back, strictly.

Tensors, by name: `model/NAME` and `optimizer/NAME/SLOT`. The rest is numbers, for state.json:

    {"name": "AdamW", "groups": [{}], "state": {"0.weight": {"exp_avg": "tensor", "step": "tensor"}}}

`groups`: what the optimizer has changed in its parameter groups since it was made (a schedule-free one counts there).
The learning rate is a function of recipe and step, as everything that the optimizer was made with is of the recipe, so
they are not state. `state` names every slot, so that one that is missing among the tensors is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from jobs.precision import Precision
from jobs.storage import Reader
from jobs.tensorfile import TensorFileError

_TENSOR = "tensor"
Numbers = dict[str, Any]
_Slots = dict[Tensor, dict[str, Any]]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or cannot be written: to try again would not help."""

    launch_plain = True
    """The message says all: the agent shows it without a traceback, as with the other errors that have this."""


class DifferenceError(CheckpointError):
    """A checkpoint is of another training than this one."""


class TrainingState:
    """Model and optimizer of a training, as a checkpoint holds them. Make it while the optimizer is new."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        precision: Precision | None = None,
        elsewhere: frozenset[str] | None = None,
    ) -> None:
        self.net, self.optimizer = net, optimizer
        self.elsewhere = elsewhere
        """Names in the state of the whole model that other ranks have, and this one not; None: all ranks have all."""
        self.precision = Precision("fp32", torch.device("cpu")) if precision is None else precision
        """With the scale of fp16, numbers for state.json."""
        self._made_with = [_options(group) for group in optimizer.param_groups]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of it, so that it can keep it without the others."""
        return self.elsewhere is None and not any(isinstance(each, DTensor) for each in self.net.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is saved as a tensor, by name. Of what is elsewhere nothing."""
        state = model_tensors(self.net)
        for name, slots in self._slots().items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    state[f"optimizer/{name}/{slot}"] = value
        return state

    def numbers(self) -> Numbers:
        """Everything else of the optimizer. Raises CheckpointError for what is neither a number nor a tensor."""
        groups = zip(self.optimizer.param_groups, self._made_with, strict=True)
        changes = [_changes(f"group {k}", _options(group), made) for k, (group, made) in enumerate(groups)]
        return {
            "name": kind_of(self.optimizer),
            "groups": changes[:1] if self._groups_are_alike and _all_same(changes) else changes,
            "state": {name: _describe(name, slots) for name, slots in self._slots().items()},
        }

    def restore(
        self,
        folder: Path,
        numbers: Numbers,
        group: ProcessGroup | None,
        *,
        verify: Collection[str] = (),
        alone: bool = False,
    ) -> dict[str, str]:
        """Put back what `tensors` and `numbers` gave, all ranks together; `alone`: this one reads all of it by itself.

        Returns the hashes of the files that are named in `verify`. Raises DifferenceError, with every difference and
        before anything is changed; CheckpointError where a file cannot be read.
        """
        reader = open_tensors(folder, verify=verify)
        self.refill(
            str(folder), numbers, reader.tensors, lambda into: read_tensors(reader, folder, into, group, alone=alone)
        )
        return reader.hashes

    def refill(
        self,
        source: str,
        numbers: Numbers,
        saved: Mapping[str, TensorStorageMetadata],
        fill: Callable[[dict[str, Tensor]], None],
    ) -> None:
        """Put back a state whose tensors come from somewhere: `fill` is given memory for all of `saved`, by name.

        Raises DifferenceError, with every difference and before anything is changed. `source` is what it says of it.
        """
        slots, wanted, differences = self._expected(numbers, saved)
        differences += model_differences(self.net, saved, self.elsewhere or ())
        surplus = {key for key in saved if key.startswith("optimizer/") and not self._is_elsewhere(key)}
        differences += [f"{key}: not in this training" for key in sorted(surplus - wanted.keys())]
        if differences:
            raise DifferenceError("\n  ".join([f"{source} is of another training:", *differences]))
        fill({**model_tensors(self.net), **wanted})
        self.optimizer.state.clear()  # of a checkpoint that turned out to be broken after it was read
        self.optimizer.state.update(slots)
        of_groups = self._for_each_group(numbers["groups"])
        groups = zip(self.optimizer.param_groups, self._made_with, of_groups, strict=True)
        for options, made_with, changes in groups:
            options.update({**made_with, **changes})

    def _expected(
        self, numbers: Numbers, saved: Mapping[str, TensorStorageMetadata]
    ) -> tuple[_Slots, dict[str, Tensor], list[str]]:
        """The optimizer's state with memory for what is to be read, that memory by name, and what does not fit."""
        here = kind_of(self.optimizer)
        if numbers["name"] != here:
            return {}, {}, [f"optimizer: {numbers['name']} in the checkpoint, {here} here"]
        slots: _Slots = {}
        wanted: dict[str, Tensor] = {}
        differences = self._group_differences(numbers["groups"])
        parameters = dict(self.net.named_parameters())
        for name, described in numbers["state"].items():
            if name in (self.elsewhere or ()):
                continue
            if name not in parameters:
                differences.append(f"optimizer/{name}: no such parameter in the model")
                continue
            for slot, value in described.items():
                key = f"optimizer/{name}/{slot}"
                if value != _TENSOR:
                    slots.setdefault(parameters[name], {})[slot] = value
                elif key not in saved:
                    differences.append(f"{key}: not in the checkpoint")
                else:
                    wanted[key] = _memory(parameters[name], saved[key])
                    slots.setdefault(parameters[name], {})[slot] = wanted[key]
        return slots, wanted, differences

    @property
    def _groups_are_alike(self) -> bool:
        """Whether they were made with the same options: then they are groups for us alone (`jobs.making`)."""
        return _all_same(self._made_with)

    def _for_each_group(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups that are alike are saved as one: how many there are depends on the strategy."""
        return groups * len(self._made_with) if len(groups) == 1 and self._groups_are_alike else groups

    def _is_elsewhere(self, key: str) -> bool:
        """Whether a tensor of the optimizer belongs to a parameter that other ranks have."""
        return key.removeprefix("optimizer/").rsplit("/", 1)[0] in (self.elsewhere or ())

    def _group_differences(self, groups: list[dict[str, Any]]) -> list[str]:
        groups = self._for_each_group(groups)
        if len(groups) != len(self.optimizer.param_groups):
            return [f"optimizer: {len(groups)} parameter groups in the checkpoint, {len(self._made_with)} here"]
        return [
            f"optimizer group {index}: no option {name!r} here"
            for index, (saved, here) in enumerate(zip(groups, self._made_with, strict=True))
            for name in saved
            if name not in here
        ]

    def _slots(self) -> dict[str, Mapping[str, Any]]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.net.named_parameters()}
        return {names[parameter]: slots for parameter, slots in self.optimizer.state.items()}


def kind_of(optimizer: Optimizer) -> str:
    """Its name in a checkpoint: of the class of torch where it is one of ours that computes the same (`of_torch`)."""
    return str(getattr(optimizer, "of_torch", type(optimizer).__name__))


def together(of_ranks: Iterable[Numbers]) -> Numbers:
    """The numbers of a whole model, from those of ranks that have parts of it, or the same."""
    first, *others = of_ranks
    return {**first, "state": {name: slots for each in (first, *others) for name, slots in each["state"].items()}}


def restore_model(
    net: nn.Module, folder: Path, group: ProcessGroup | None, elsewhere: Collection[str] | None = None
) -> None:
    """Put back the model alone; `elsewhere` are names that other ranks have.

    Raises CheckpointError, with every difference.
    """
    reader = open_tensors(folder)
    if differences := model_differences(net, reader.tensors, elsewhere or ()):
        raise DifferenceError("\n  ".join([f"{folder} is of another model:", *differences]))
    read_tensors(reader, folder, model_tensors(net), group)


def model_tensors(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model, by their names in a checkpoint."""
    return {f"model/{name}": tensor for name, tensor in net.state_dict().items()}


def model_differences(
    net: nn.Module, saved: Mapping[str, TensorStorageMetadata], elsewhere: Collection[str] = ()
) -> list[str]:
    """Why a checkpoint is not of this model: every tensor that is missing, too much, or of another shape or type.

    elsewhere: names that other ranks have, and look at.
    """
    wanted = model_tensors(net)
    differences = []
    for key in sorted({*wanted, *(key for key in saved if key.startswith("model/"))}):
        name = key.removeprefix("model/")
        if name in elsewhere:
            continue
        if key not in saved:
            differences.append(f"{name}: not in the checkpoint")
        elif key not in wanted:
            differences.append(f"{name}: not in the model")
        elif tuple(saved[key].size) != tuple(wanted[key].shape):
            differences.append(f"{name}: {tuple(saved[key].size)} in the checkpoint, {tuple(wanted[key].shape)} here")
        elif saved[key].properties.dtype != wanted[key].dtype:
            differences.append(f"{name}: {saved[key].properties.dtype} in the checkpoint, {wanted[key].dtype} here")
    return differences


def open_tensors(folder: Path, *, verify: Collection[str] = ()) -> Reader:
    """The tensors of a checkpoint. Raises CheckpointError where their list cannot be read."""
    try:
        return Reader(folder, verify=verify)
    except TensorFileError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def read_tensors(
    reader: Reader, folder: Path, into: dict[str, Tensor], group: ProcessGroup | None, *, alone: bool = False
) -> None:
    """Fill tensors by their names, all ranks together, or this one alone. Raises CheckpointError."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(into, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:  # a BaseException, which nobody expects
        raise CheckpointError(f"{folder}: {reasons(error)}") from error


def reasons(error: CheckpointException) -> str:
    """What went wrong, on which ranks."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    return "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items())


def _memory(parameter: Tensor, meta: TensorStorageMetadata) -> Tensor:
    """Where a slot of the optimizer is read to: sharded, and with its numbers in the order, as its parameter is.

    The order counts (`channels_last`): where tensors lie differently an update takes other code, with other last bits.
    """
    if parameter.shape == meta.size:
        return torch.empty_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype, device=parameter.device)


def _describe(name: str, slots: Mapping[str, Any]) -> dict[str, Any]:
    return {
        slot: _TENSOR if isinstance(value, Tensor) else _number(f"{name}/{slot}", value)
        for slot, value in slots.items()
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr", "param_names")}


def _changes(place: str, now: Mapping[str, Any], made_with: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name for name, value in now.items() if name not in made_with or not _same(value, made_with[name])}
    return {name: _number(f"{place}/{name}", now[name]) for name in sorted(changed)}


def _all_same(options: Sequence[Mapping[str, Any]]) -> bool:
    first = options[0]
    return all(
        each.keys() == first.keys() and all(_same(value, first[name]) for name, value in each.items())
        for each in options
    )


def _same(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _number(place: str, value: object) -> bool | int | float | str | None:
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    raise CheckpointError(f"optimizer {place} is a {type(value).__name__}: only tensors and plain numbers can be saved")
