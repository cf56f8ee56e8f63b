"""The memory of a rank, and when it is called growing."""

from __future__ import annotations

import pytest
import torch

from jobs.memory_use import SAMPLES, MemoryUse, Use, grows, measure_use

MIB = 1 << 20


def test_the_memory_of_a_process_is_what_it_touches() -> None:
    before = measure_use(torch.device("cpu"))
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    after = measure_use(torch.device("cpu"))
    assert after.now - before.now > 48 * MIB
    assert after.peak >= after.now
    del block
    assert measure_use(torch.device("cpu")).peak > after.now - 4 * MIB  # the kernel counts by and by
    assert set(after.to_record()) == {"used_bytes", "peak_bytes"}


def test_growth_is_said_once_with_its_numbers() -> None:
    level = iter(range(100, 1_000, 10))
    memory = MemoryUse(torch.device("cpu"), measure=lambda: Use(now=next(level) * MIB, peak=0))
    told = []
    for number in range(1, 3 * SAMPLES):
        memory.look(50 * number)
        if memory.growth:
            told.append(memory.growth.sentence())
    assert told == [
        "memory grows steadily: 100.0 MiB at step 50, 210.0 MiB at step 600, 204.8 KiB per step; something is kept "
        "from step to step"
    ]


@pytest.mark.parametrize(
    "levels",
    [
        [100 + 10 * n for n in range(SAMPLES - 1)],  # not long enough
        [100 + n / 10 for n in range(SAMPLES)],  # a MiB in all
        [100 + 10 * n for n in range(SAMPLES - 1)] + [100],  # given back
        [100] * (SAMPLES - 1) + [900],  # once: a larger batch, a first evaluation
        [100_000 + 10 * n for n in range(SAMPLES)],  # a thousandth
    ],
)
def test_what_is_no_leak_is_not_called_one(levels: list[float]) -> None:
    assert grows([(50 * n, int(level * MIB)) for n, level in enumerate(levels)]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_memory_of_a_gpu_is_that_of_tensors_and_what_is_held_for_them() -> None:
    device = torch.device("cuda")
    before = measure_use(device)
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    after = measure_use(device)
    del block
    assert after.now - before.now >= 64 * MIB
    assert after.reserved is not None
    assert after.reserved >= after.peak >= after.now
