"""Gradients in one row: the same as elsewhere, each in the memory format of its parameter; what does not fit there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.agreement import CARRIED, Agreement
from jobs.clip import GradientCheck
from jobs.data.base import Batch
from jobs.mesh import Grid
from jobs.models.convnet import convnet
from jobs.parallel.base import Pass, Shared
from jobs.parallel.row import LARGEST_BYTES, Row, fits_row
from jobs.registry import OptionError
from jobs.stop import StopRequest
from launcher.recipe.degrees import Degrees

CPU = torch.device("cpu")


def work(batches: Sequence[Batch], told: list[float] | None = None) -> Pass:
    return Pass(
        batches=iter(batches),
        count=len(batches),
        counted=len(batches),
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"),
        scaled=lambda loss: loss / 8,
        precision=nullcontext,
        before_forward=lambda: None,
        before_last_backward=lambda total: None if told is None else told.append(total.item()),
    )


def batches(count: int, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 1, 28, 28, generator=generator), torch.arange(4)) for _ in range(count)]


def net(*, channels_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = convnet(channels=4, hidden=8)
    return made.to(memory_format=torch.channels_last) if channels_last else made  # type: ignore[call-overload]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_those_of_an_ordinary_backward(count: int, channels_last: bool) -> None:
    plain, row = Shared(net(channels_last=channels_last)), Row(net(channels_last=channels_last), ranks=1)
    for step in range(3):
        for shared in (plain, row):
            for parameter in shared.net.parameters():
                parameter.grad = None
            shared.run(work(batches(count, step)))
        for one, other in zip(plain.net.parameters(), row.net.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
            assert other.grad.stride() == other.stride()  # a fused update takes it for granted
            assert other.grad.untyped_storage().data_ptr() == row.gradients.untyped_storage().data_ptr()


def test_a_layer_without_a_gradient_is_named() -> None:
    made = nn.Sequential(net())
    made.register_module("aside", nn.Linear(2, 3))
    made.forward = made[0].forward  # type: ignore[method-assign]
    with pytest.raises(OptionError, match=r"find_unused_parameters: false, and no gradient .* aside\.weight, aside\."):
        Row(made, ranks=1).run(work(batches(1, 0)))


def test_what_does_not_fit_into_a_row() -> None:
    small = nn.Linear(4, 4)
    assert fits_row(small, CPU)
    assert not fits_row(small, torch.device("cuda", 0))
    assert not fits_row(nn.Linear(4, 4).bfloat16(), CPU)
    assert not fits_row(nn.Linear(LARGEST_BYTES // 4, 1), CPU)
    assert not fits_row(nn.ReLU(), CPU)
    frozen = nn.Linear(LARGEST_BYTES // 4, 1)
    frozen.weight.requires_grad = False
    assert fits_row(frozen, CPU)


def test_a_message_travels_with_the_gradients() -> None:
    row, stop = Row(net(), ranks=1), StopRequest()
    written = (5 << 20) + 3
    agreement = Agreement(stop, lambda: written, has_trouble=lambda: True, carrier=row.carrier)
    row.run(work(batches(1, 0)))  # lays the row out
    told: list[float] = []
    made = work(batches(1, 1), told)
    row.run(
        Pass(
            **{
                **vars(made),
                "before_last_backward": lambda total: agreement.send_with_gradients(total.item(), 4.0, 0.0, 0.0),
            }
        )
    )
    agreed = agreement.receive()
    assert agreed.written == written
    assert agreement.trouble
    assert not agreed.stop
    assert agreed.sums[1:] == (4.0, 0.0, 0.0)
    assert agreed.sums[0] == pytest.approx(F.cross_entropy(row.net(batches(1, 1)[0][0]), torch.arange(4)).item() * 4)
    assert row.carrier.numel() == CARRIED


def test_the_norm_of_a_row_is_that_of_its_gradients_and_what_is_wrong_in_it_has_a_name() -> None:
    row = Row(net(), ranks=1)
    row.run(work(batches(1, 0)))
    grid = Grid(degrees=Degrees(), rank=0)

    def none(*values: float) -> Sequence[float]:
        raise AssertionError("replicas ask nobody")

    by_row = GradientCheck(row.net, grid, none, row=row.gradients)
    assert by_row.look().norm == pytest.approx(GradientCheck(row.net, grid, none).look().norm, rel=1e-6)
    weight = row.net.get_parameter("0.weight")
    assert isinstance(weight.grad, Tensor)
    weight.grad[0, 0, 0, 0] = float("inf")
    assert by_row.look().problem == "the gradient of 0.weight is inf"
