"""What a rank marks on the page that its agent reads, and what of a step counts as its own work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from jobs.marks import Marks
from launcher.runs.clock import Phase, StepPage


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def pass_ms(self, time_ms: int) -> None:
        self.now_ns += time_ms * 1_000_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("jobs.marks.time.perf_counter_ns", made)
    return made


@pytest.fixture
def page() -> Iterator[StepPage]:
    made = StepPage.create()
    yield made
    made.close()


def test_own_work_is_what_a_rank_does_without_waiting(clock: Clock, page: StepPage) -> None:
    marks, net = Marks(page), nn.Linear(2, 2)
    marks.watch_forward(net)
    for step in (1, 2):
        marks.work()
        clock.pass_ms(3)  # the samples
        marks.rest()
        clock.pass_ms(50)  # buffers of others, before the forward of the network itself
        net(torch.zeros(1, 2))
        clock.pass_ms(5)  # the forward
        marks.rest()
        clock.pass_ms(70)  # gradients of others
        marks.work()
        clock.pass_ms(2)  # the optimizer
        marks.step(step)
    reading = page.read()
    assert (reading.own_ns, reading.own_steps) == (20_000_000, 2)
    assert (reading.phase, reading.step) == (Phase.STEP, 2)


def test_an_evaluation_in_between_is_no_own_work_of_a_step(clock: Clock, page: StepPage) -> None:
    marks, net = Marks(page), nn.Linear(2, 2)
    marks.watch_forward(net)
    marks.at(Phase.START, 0)
    marks.step(1)
    with marks.during(Phase.EVAL, 1):
        assert page.read().phase is Phase.EVAL
        net(torch.zeros(1, 2))
        clock.pass_ms(500)
    assert page.read().phase is Phase.STEP
    marks.work()
    clock.pass_ms(4)
    marks.step(2)
    assert page.read().own_ns == 4_000_000


def test_before_the_first_step_a_save_leads_back_to_the_start(page: StepPage) -> None:
    marks = Marks(page)
    marks.at(Phase.START, 30)
    with marks.during(Phase.SAVE, 30):
        assert page.read().phase is Phase.SAVE
    assert page.read().phase is Phase.START


def test_outside_a_run_nothing_happens() -> None:
    marks, net = Marks(), nn.Linear(2, 2)
    marks.watch_forward(net)
    assert not net._forward_pre_hooks
    marks.work()
    marks.rest()
    marks.step(1)
