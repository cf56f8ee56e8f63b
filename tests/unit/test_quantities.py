"""Quantities as people read them."""

from __future__ import annotations

import pytest

from launcher.quantities import count, duration, ranges, short_duration


@pytest.mark.parametrize(("number", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1024, "1,024 nodes")])
def test_counts(number: int, text: str) -> None:
    assert count(number, "node") == text


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 3, 8, 10, 11), "0-3,8,10-11")]
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text
    assert ranges(numbers, ", ") == text.replace(",", ", ")


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.44, "0.4 s"), (21.2, "21 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_are_for_people(time_s: float, text: str) -> None:
    assert duration(time_s) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.44, "0.4s"), (21.2, "21s"), (60, "1m00s"), (185, "3m05s"), (22360, "6h12m"), (187200, "2d04h")],
)
def test_durations_are_short(time_s: float, text: str) -> None:
    assert short_duration(time_s) == text
