"""Numbers of fewer bits: around the forward, and between the backward and the update.

The order of an update is unscale, clip, step, update of the scale. A step whose gradients overflow ends after the
unscale with the update of the scale, on all ranks alike: what one of them has found, all are told before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from jobs.private_torch import tell_overflow

LEAST_SCALE = 1.0
"""Gradients that overflow without any scale are no matter of the scale."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Full precision, tf32, or autocast to bf16: nothing is scaled."""

    may_overflow = False
    """Whether gradients that are not finite are a matter of the scale, and a step left out for them is none of
    `faults.on_nan`."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device

    def around_forward(self) -> AbstractContextManager[Any]:
        """Around a forward and its loss."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it goes into the backward."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """After the last backward, before anybody looks at the gradients: give them their own size."""

    def step(self, optimizer: Optimizer) -> None:
        """The update of the weights."""
        optimizer.step()

    def update(self, optimizer: Optimizer, *, overflow: bool) -> None:
        """After a step that was made, or was left out since its gradients overflow on some rank."""

    def discard(self) -> None:
        """After a step that is left out for another reason: the scale is what it was."""

    @property
    def scale(self) -> float | None:
        """By what a loss is multiplied; None = by nothing. On a GPU it waits for the device."""
        return None

    def to_record(self) -> dict[str, Any] | None:
        """For state.json, `scaler`: plain numbers; None where there is nothing to go on from."""
        return None

    def restore(self, record: Mapping[str, Any] | None) -> None:
        """Go on from there: a record of the same precision (`difference`)."""

    def difference(self, record: Mapping[str, Any] | None, made_with: str) -> str:
        """Why a checkpoint of this precision cannot be gone on from; empty where it can."""
        if (record is not None) == self.may_overflow:
            return ""
        has, here = ("no", "one") if record is None else ("a", "none")
        return (
            f"train.precision: {made_with} in the checkpoint, {self.name} here: it has {has} gradient scale, and this "
            f"training {'needs ' if here == 'one' else 'has '}{here}; keep {made_with}, or start anew from its weights "
            "(checkpoint.init_from)"
        )

    def remark(self) -> str:
        """What a person should know at the start; empty where there is nothing."""
        if self.name == "tf32" and self._device.type != "cuda":
            return "train.precision: tf32 has no effect on a CPU: the numbers are those of fp32"
        return ""


class ScaledPrecision(Precision):
    """Autocast to fp16: the loss is scaled, so that small gradients are not lost; a step that overflows is left out."""

    may_overflow = True

    def __init__(self, name: str, device: torch.device, scaler: GradScaler | None = None) -> None:
        super().__init__(name, device)
        self._scaler = GradScaler(device.type) if scaler is None else scaler
        self._parts: OwnParts | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide by the scale; what is not finite stays so."""
        self._scaler.unscale_(self._known(optimizer))

    def step(self, optimizer: Optimizer) -> None:
        """The update of the weights; gradients are finite on all ranks."""
        self._scaler.step(self._known(optimizer))

    def update(self, optimizer: Optimizer, *, overflow: bool) -> None:
        """Half the scale after an overflow; twice after a long time without one."""
        if overflow:  # which this rank may know of another one only
            tell_overflow(self._scaler, self._known(optimizer))
        self._scaler.update()

    def _known(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as the scaler is to know it: always the same."""
        if self._parts is None and any(isinstance(each, DTensor) for each in parameters_of(optimizer)):
            self._parts = OwnParts(optimizer)
        return optimizer if self._parts is None else self._parts

    def discard(self) -> None:
        """Forget what was found: a loss that is not finite says nothing of the scale."""
        self._scaler.update(self._scaler.get_scale())

    @property
    def scale(self) -> float:
        """By what a loss is multiplied. On a GPU it waits for the device."""
        return self._scaler.get_scale()

    def to_record(self) -> dict[str, Any]:
        """As GradScaler gives it: two factors, an interval, the scale and how long it has not changed."""
        return self._scaler.state_dict()

    def restore(self, record: Mapping[str, Any] | None) -> None:
        """Go on from there."""
        assert record is not None, "asked for a difference before"
        self._scaler.load_state_dict(dict(record))

    def remark(self) -> str:
        """On a CPU it is for trying out."""
        if self._device.type == "cuda":
            return ""
        return "train.precision: fp16 on a CPU is slower than fp32 and of no use but to try it out; bf16 needs no scale"


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All of its parameters."""
    return (each for group in optimizer.param_groups for each in group["params"])


class OwnParts(Optimizer):
    """An optimizer whose gradients are seen as what this rank has of them.

    The scaler takes all gradients in one call, and torch has none for tensors and DTensors together, as tensor parallel
    has them. What other ranks find in their parts they tell (`update`).
    """

    def __init__(self, optimizer: Optimizer) -> None:  # an optimizer by its interface alone: it has no parameters
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group: of each gradient the part of this rank, the very same memory."""
        return [{"params": [_part(each) for each in parameters_of(self._optimizer)]}]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The real one's."""
        return self._optimizer.step(*args, **kwargs)


def _part(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return parameter
    part = parameter.to_local().detach()
    part.grad = parameter.grad.to_local()
    return part


def make_precision(name: str, device: torch.device) -> Precision:
    """For `train.precision`; sets how this process multiplies fp32 matrices on a GPU.

    torch's own default is neither fp32 nor tf32: products in full precision, convolutions in tf32.
    """
    products = "tf32" if name == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = products  # type: ignore[attr-defined]
    if device.type == "cpu":  # oneDNN has no LSTM of fp16 on most CPUs, and torch asks nobody else while it is on
        torch.backends.mkldnn.enabled = name != "fp16"  # type: ignore[assignment]
    return (ScaledPrecision if name == "fp16" else Precision)(name, device)
