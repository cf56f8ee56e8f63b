"""How things are put for people."""

from __future__ import annotations

import pytest

from launcher.wording import (
    aligned,
    count,
    duration,
    first_line,
    ranges,
    short_duration,
    short_hosts,
    shortened,
    signal_name,
    step_text,
)


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


def test_signals_have_names_where_they_have_one() -> None:
    assert (signal_name(9), signal_name(33)) == ("SIGKILL", "signal 33")


@pytest.mark.parametrize(("text", "line"), [(None, ""), ("", ""), ("one", "one"), ("one\ntwo", "one")])
def test_first_lines(text: str | None, line: str) -> None:
    assert first_line(text) == line


def test_long_texts_are_cut() -> None:
    assert (shortened("abcd", 4), shortened("abcde", 4)) == ("abcd", "abcd ...")


def test_rows_are_lines_of_columns() -> None:
    rows = [("RUN", "STEP", "WHY"), ("a", "7", ""), ("bcd-1", "120/632", "it was stopped")]
    assert aligned(rows, right=(1,)) == [
        "RUN       STEP  WHY",
        "a            7",
        "bcd-1  120/632  it was stopped",
    ]
    assert aligned([]) == []


def test_steps_and_hosts_are_short() -> None:
    assert [step_text(*each) for each in ((None, 5), (0, None), (3, 5))] == ["", "0", "3/5"]
    assert short_hosts(["n1", "n2"]) == "n1, n2"
    assert short_hosts([f"n{number}" for number in range(1, 65)]) == "n1 ... n64 (64 nodes)"
