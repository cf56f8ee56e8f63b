"""Shares of the time of recorded steps, from the events of torch.profiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from jobs.timeline import INPUT, divide_time, merged, top_operators

STEP = "ProfilerStep*"


def event(name: str, begin: float, end: float, *, gpu: bool = False, thread: int = 1, note: bool = False) -> Any:
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, thread=thread, is_user_annotation=note)


def test_on_a_cpu_the_input_comes_first_and_what_overlaps_counts_once() -> None:
    events = [
        event(STEP, 0, 50, note=True),
        event(STEP, 50, 100, note=True),
        event(INPUT, 0, 20, note=True),
        event("aten::index", 5, 15),  # reading the samples is computing, and still input
        event("aten::mm", 20, 60),
        event("aten::add", 30, 40),
        event("autograd::engine::evaluate_function: MmBackward0", 20, 95),  # only around the work of others
        event("gloo:all_reduce", 50, 80, thread=2),
        event("aten::copy_", 80, 100, thread=3),  # somebody else's
        event("FSDP::all_gather", 60, 95, note=True),  # a range that waits for the others
        event("aten::mm", -50, 10),  # before the first step
    ]
    assert divide_time(events, on_gpu=False) == {"compute": 0.4, "communication": 0.2, "input": 0.2, "other": 0.2}


def test_on_a_gpu_only_what_no_kernel_hides_counts_beside_them() -> None:
    events = [
        event(STEP, 0, 100, note=True),
        event(STEP, 0, 100, gpu=True, note=True),
        event("sm90_gemm", 10, 50, gpu=True),
        event("ncclDevKernel_AllReduce", 40, 70, gpu=True),
        event("nccl:all_reduce", 0, 100, note=True),
        event("aten::mm", 0, 100),
        event(INPUT, 0, 30, note=True),
    ]
    assert divide_time(events, on_gpu=True) == {"compute": 0.4, "communication": 0.2, "input": 0.1, "other": 0.3}


def test_without_a_step_there_are_no_shares() -> None:
    assert divide_time([event("aten::mm", 0, 1)], on_gpu=False) == {}
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]


def test_a_real_recording_adds_up() -> None:
    layer = torch.nn.Linear(256, 256)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=9)) as recorded:
        for _ in range(3):
            with record_function(INPUT):
                samples = torch.randn(512, 256)
            layer(samples).sum().backward()
            recorded.step()
    shares = divide_time(recorded.events(), on_gpu=False)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert shares["input"] > 0
    assert shares["compute"] > 0
    assert shares["communication"] == 0
    names = [row["name"] for row in top_operators(recorded.key_averages(), on_gpu=False)]
    assert "aten::addmm" in names
    assert not any(name.startswith(("ProfilerStep", "launch::")) for name in names)
