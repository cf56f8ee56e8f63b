"""The batches of a step on the device: what is made ahead, in which order, and what counts as a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from jobs.data.base import Batch, TensorSamples
from jobs.feed import Feed, beside
from jobs.loader import Loader
from jobs.marks import Marks
from jobs.sampler import Sampler


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, time_s: float) -> None:
        self.now_ns += round(time_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("jobs.feed.time.perf_counter_ns", made)
    return made


class SlowSamples(TensorSamples):
    """Each batch takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.arange(8.0), torch.arange(8))
        self._clock = clock

    def __getitems__(self, indices: Tensor | list[int]) -> Batch:
        self._clock.pass_s(1.0)
        return super().__getitems__(indices)


class Story:
    """What happened, in order; also the fake stream."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.idle = False
        self._copying = False

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._copying = True
        yield
        self._copying = False

    def hand_over(self, batch: Batch) -> None:
        self.lines.append(f"hand over {batch[1].tolist()}")

    def is_idle(self) -> bool:
        return self.idle

    def place(self, batch: Batch) -> Batch:
        self.lines.append(f"copy {batch[1].tolist()}{' beside' if self._copying else ''}")
        return batch


def feed(clock: Clock, story: Story, *, on_stream: bool) -> Feed:
    sampler = Sampler(num_samples=8, global_batch_size=4, seed=0, accumulate=2)
    loader = Loader(SlowSamples(clock), sampler)
    return Feed(loader, story.place, Marks(), story if on_stream else None)


def compute(story: Story, made: Feed, steps: int) -> list[list[int]]:
    """Two micro-batches per step, each of which is given to the device at once."""
    seen = []
    for _ in range(steps):
        for _, targets in made.take(2):
            story.lines.append(f"compute {targets.tolist()}")
            seen.append(targets.tolist())
        story.lines.append("update")
    return seen


def test_the_next_batch_is_copied_beside_the_one_that_computes(clock: Clock) -> None:
    story = Story()
    a, b, c, d = compute(story, feed(clock, story, on_stream=True), 2)
    each = [(f"hand over {x}", f"compute {x}", f"copy {y} beside") for x, y in ((a, b), (b, c), (c, d))]
    first, second, third = each  # the second ends with a copy for the next step, before the update of this one
    assert story.lines[:11] == [f"copy {a} beside", *first, *second, "update", *third]


def test_on_a_cpu_a_batch_is_made_when_it_is_asked_for(clock: Clock) -> None:
    assert beside(torch.device("cpu")) is None
    story = Story()
    a, b = compute(story, feed(clock, story, on_stream=False), 1)
    assert story.lines == [f"copy {a}", f"compute {a}", f"copy {b}", f"compute {b}", "update"]


def test_batches_do_not_depend_on_what_is_made_ahead(clock: Clock) -> None:
    story = Story()
    here = compute(story, feed(clock, story, on_stream=False), 6)
    assert compute(story, feed(clock, story, on_stream=True), 6) == here


def test_a_step_waits_for_what_is_made_when_it_is_asked_for(clock: Clock) -> None:
    story = Story()
    made = feed(clock, story, on_stream=False)
    compute(story, made, 1)
    assert made.wait_s == 0  # the first step: loader processes are only just starting
    compute(story, made, 3)
    assert made.wait_s == 6
    assert made.lap() == 6 / 4
    compute(story, made, 2)
    assert made.lap() == 2


def test_made_ahead_it_is_a_wait_where_the_device_has_nothing_left_to_do(clock: Clock) -> None:
    story = Story()
    made = feed(clock, story, on_stream=True)
    compute(story, made, 2)
    assert made.wait_s == 0
    story.idle = True
    compute(story, made, 2)
    assert made.wait_s == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_batches_arrive_whole_from_a_stream_of_their_own() -> None:
    device = torch.device("cuda", 0)
    sampler = Sampler(num_samples=64, global_batch_size=16, seed=0)
    samples = TensorSamples(torch.arange(64.0).repeat_interleave(1 << 16).reshape(64, -1), torch.arange(64))
    loader = Loader(samples, sampler, pin_memory=True)

    def place(batch: Batch) -> Batch:
        assert batch[0].is_pinned()
        assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)

    made = Feed(loader, place, Marks(), beside(device))
    sums = [(inputs.sum(dim=1), targets) for _ in range(8) for inputs, targets in made.take(1)]
    for total, targets in sums:
        assert torch.equal(total, targets * float(1 << 16))
