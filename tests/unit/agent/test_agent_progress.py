"""The step of a script, found in what it prints."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from launcher.agent.progress import TELL_EVERY_S, StepClock


@dataclass
class Watched:
    """A clock of the user's pattern, and what it tells."""

    pattern: str
    now_s: float = 0.0
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.pattern, self.told.append, now=lambda: self.now_s)


@pytest.mark.parametrize(
    ("pattern", "printed", "step"),
    [
        (r"step (\d+)", b"step 12 loss 0.1\n", 12),
        (r"step ([\d,]+)", b"step 4,180 loss 0.1\n", 4180),
        (r"step ([\d_]+)", b"step 4_180\n", 4180),
        (r"(\d+)/\d+", b"epoch 1 of 2\r 10/40 [00:01]\r 11/40 [00:02]\r", 11),
        (r"Schritt (\d+), größe", "Schritt 3, größe\n".encode(), 3),
        (r"step (\d+)", b"step 1\nstep 2\nno more\n", 2),
    ],
)
def test_the_last_step_that_was_printed_is_told(pattern: str, printed: bytes, step: int) -> None:
    watched = Watched(pattern)
    watched.clock.feed(1, printed)
    assert watched.told == [step]


def test_a_step_that_comes_in_two_pieces_is_one() -> None:
    watched = Watched(r"step (\d+)")
    watched.clock.feed(1, b"ste")
    watched.clock.feed(2, b"step 7 on the other stream")
    watched.clock.feed(1, b"p 12")
    watched.clock.feed(1, b"3\n")
    assert watched.told == [123]


def test_steps_are_told_once_a_second_and_the_last_one_in_any_case() -> None:
    watched = Watched(r"step (\d+)")
    for step in range(1, 100):
        watched.clock.feed(1, b"step %d\n" % step)
    assert watched.told == [1]
    watched.now_s = TELL_EVERY_S
    watched.clock.flush()
    assert watched.told == [1, 99]
    watched.clock.feed(1, b"step 100\nstep 101")
    watched.clock.end()
    watched.clock.flush()
    assert watched.told == [1, 99, 101]


def test_what_is_no_number_is_passed_over() -> None:
    watched = Watched(r"step (\S*)")
    watched.clock.feed(1, b"step 5\nstep one\nstep \n")
    assert watched.told == [5]


def test_a_bar_that_never_ends_its_line_does_not_fill_the_memory() -> None:
    watched = Watched(r"step (\d+)")
    for _ in range(100):
        watched.clock.feed(1, b"." * 10_000)
    assert sum(map(len, watched.clock._rests.values())) < 100_000
