"""One thread waits for everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.agent.loop import Loop


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, before)


def test_calls_back_when_there_is_something_to_read(pipe: tuple[int, int]) -> None:
    loop, heard = Loop(), []
    loop.add(pipe[0], lambda: heard.append(os.read(pipe[0], 10)))
    os.write(pipe[1], b"hello")
    assert loop.run_until(lambda: bool(heard), timeout_s=10)
    assert heard == [b"hello"]


def test_a_removed_descriptor_is_not_heard(pipe: tuple[int, int]) -> None:
    loop = Loop()
    loop.add(pipe[0], lambda: pytest.fail("it was removed"))
    loop.remove(pipe[0])
    os.write(pipe[1], b"x")
    assert not loop.run_until(lambda: False, timeout_s=0.01)


def test_says_when_the_time_is_over() -> None:
    start = time.monotonic()
    assert not Loop().run_until(lambda: False, timeout_s=0.05)
    assert 0.05 <= time.monotonic() - start < 5


def test_does_not_wait_when_it_is_done_already() -> None:
    assert Loop().run_until(lambda: True, timeout_s=0)


def test_timers_come_again_and_again() -> None:
    loop, ticks = Loop(), []
    loop.every(0.005, lambda: ticks.append(time.monotonic()))
    assert loop.run_until(lambda: len(ticks) == 4, timeout_s=10)
    assert ticks[-1] - ticks[0] >= 3 * 0.004


def test_a_signal_is_delivered_from_the_loop_and_not_from_inside_other_code(signals_restored: None) -> None:
    loop, got = Loop(), []
    loop.on_signals([signal.SIGUSR1], got.append)
    signal.raise_signal(signal.SIGUSR1)
    assert got == []
    assert loop.run_until(lambda: bool(got), timeout_s=10)
    assert got == [signal.SIGUSR1]


def test_one_callback_may_remove_another_that_is_due_in_the_same_round() -> None:
    loop, heard = Loop(), []
    pipes = [os.pipe() for _ in range(2)]
    reads = [read for read, _ in pipes]

    def ready(mine: int) -> None:
        heard.append(mine)
        for read in reads:
            loop.remove(read)

    for mine, read in enumerate(reads):
        loop.add(read, lambda mine=mine: ready(mine))
    for _, write in pipes:
        os.write(write, b"x")
    assert loop.run_until(lambda: bool(heard), timeout_s=10)
    assert len(heard) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)


def test_a_number_that_was_closed_and_opened_again_in_one_round_is_not_mistaken_for_the_old_one() -> None:
    """Descriptors are numbers: the callback of a closed one must not be called for its successor."""
    loop, calls = Loop(), []
    pipes = [os.pipe() for _ in range(2)]

    def ready(mine: int) -> None:
        calls.append(mine)
        other = pipes[1 - mine]
        loop.remove(pipes[mine][0])
        loop.remove(other[0])
        os.close(other[0])
        new_read, new_write = os.pipe()
        if new_read != other[0]:  # the lowest free number: certain, unless another thread is at work
            os.dup2(new_read, other[0])
        os.write(new_write, b"x")
        loop.add(other[0], lambda: calls.append("successor"))

    for mine, (read, _) in enumerate(pipes):
        loop.add(read, lambda mine=mine: ready(mine))
    for _, write in pipes:
        os.write(write, b"x")
    assert loop.run_until(lambda: "successor" in calls, timeout_s=10)
    assert len(calls) == 2, "the old callback was called for the new descriptor"


def test_calls_once_after_a_while_also_from_within_a_call() -> None:
    loop, called = Loop(), []

    def first() -> None:
        called.append("first")
        loop.after(0.0, lambda: called.append("second"))

    loop.after(0.01, first)
    loop.after(30.0, lambda: called.append("too early"))
    assert loop.run_until(lambda: len(called) == 2, timeout_s=10)
    assert not loop.run_until(lambda: len(called) > 2, timeout_s=0.05)
    assert called == ["first", "second"]


def test_what_has_come_meanwhile_is_heard_before_the_time_that_has_passed(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop of this process the wait has run out, and says nothing of what has come."""
    loop, called = Loop(), list[str]()
    real = loop._selector.select

    def slept_through(timeout: float | None = None) -> list[Any]:
        if timeout:
            os.write(pipe[1], b"x")
            time.sleep(timeout)
            return []
        return list(real(timeout))

    monkeypatch.setattr(loop._selector, "select", slept_through)
    loop.add(pipe[0], lambda: called.append(os.read(pipe[0], 10).decode()))
    loop.after(0.02, lambda: called.append("late"))
    loop.run_until(lambda: len(called) == 2, timeout_s=10)
    assert called == ["x", "late"]
