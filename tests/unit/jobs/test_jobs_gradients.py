"""When the loss of a step is read: on a GPU not before its backward is in the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jobs.gradients
from jobs.data.base import TensorSamples
from jobs.gradients import Gradients, read_later
from jobs.loader import Loader
from jobs.sampler import Sampler


class Told:
    """Stands for what a step speaks to, and notes it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def send_with_gradients(self, *values: float) -> None:
        self.calls.append(("send", *values))

    def send(self) -> None:
        self.calls.append("buffers")


def gradients_on(device: str, told: Told) -> Gradients:
    made = Gradients.__new__(Gradients)
    made._parts = SimpleNamespace(  # type: ignore[assignment]
        device=torch.device(device),
        grid=SimpleNamespace(speaks=True),
        world=SimpleNamespace(rank=3),
        marks=SimpleNamespace(rest=lambda: None),
    )
    made._agreement = made._buffers = told  # type: ignore[assignment]
    made._late = None
    return made


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_loss_is_sent_before_the_backward_on_a_cpu_and_read_after_it_is_queued_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    told = Told()

    def later(number: Tensor) -> Any:
        told.calls.append("copy begins")
        return lambda: told.calls.append("waited") or number.item()

    monkeypatch.setattr(jobs.gradients, "read_later", later)
    gradients = gradients_on(device, told)
    gradients._send(SimpleNamespace(local_count=4), torch.tensor(2.5))  # type: ignore[arg-type]
    told.calls.append("backward")
    gradients._send_late()
    sent = ("send", 2.5, 4, 0.0, 0.0)
    assert (
        told.calls
        == {
            "cpu": [sent, "buffers", "backward"],
            "cuda": ["copy begins", "buffers", "backward", "waited", sent],
        }[device]
    )
    gradients._send_late()
    assert told.calls.count(sent) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_number_is_read_without_a_wait_for_what_was_queued_after_it() -> None:
    block = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    read = read_later(torch.tensor(2.5, device="cuda"))
    for _ in range(50):
        block = block @ block * 1e-4
    assert read() == 2.5
    assert not torch.cuda.current_stream().query(), "the products are still being computed"


def test_shapes_are_rehearsed_before_the_first_step_as_a_training_has_them() -> None:
    """A whole batch, and the last one of an epoch; on each rank equally many micro-batches."""
    told: list[list[tuple[int, ...]]] = []
    for rank in range(2):
        sampler = Sampler(num_samples=19, global_batch_size=8, seed=0, accumulate=2, rank=rank, world_size=2)
        made = gradients_on("cpu", Told())
        made._parts.sampler = sampler  # type: ignore[misc]
        made._parts.loader = Loader(TensorSamples(torch.zeros(19, 5), torch.zeros(19)), sampler)  # type: ignore[misc]
        made._rehearse = lambda step, batches, counted: told.append([tuple(each[0].shape) for each in batches])  # type: ignore[method-assign]
        made.rehearse_shapes(step=7)
    whole, last = [(2, 5), (2, 5)], [(2, 5)]
    assert told == [whole, last, whole, [(1, 5)]]
