"""Durations and lengths as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.recipe.units import Duration, Length


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("30s", 30), ("10m", 600), ("1h30m", 5400), ("1h 30m", 5400), ("1.5 h", 5400), ("250ms", 0.25), ("2d", 172800)],
)
def test_durations(text: str, time_s: float) -> None:
    assert Duration.parse(text) == Duration(time_s, text)
    assert str(Duration.parse(text)) == text


@pytest.mark.parametrize("text", ["", "10", "m", "10 minutes", "-5m", "1 0m", "5m x", "٣s", "9" * 400 + "s", 600, None])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "here"),
    [("02:30:00", "2h30m"), ("30:00", "30m"), ("1-12", "1d12h"), ("1-00:00:10", "1d10s"), ("2-03:04", "2d3h4m")],
)
def test_a_duration_as_slurm_writes_it_is_told_with_units(text: str, here: str) -> None:
    with pytest.raises(ValueError, match=f"as SLURM reads it, `{here}`"):
        Duration.parse(text)
    Duration.parse(here)


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("8 epochs", 8, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("10k steps", 10_000, "steps"),
        ("1.5k steps", 1_500, "steps"),
        ("2M steps", 2_000_000, "steps"),
        ("1_000steps", 1_000, "steps"),
    ],
)
def test_lengths(text: str, count: float, unit: str) -> None:
    length = Length.parse(text)
    assert (length.count, length.unit, str(length)) == (count, unit, text)


@pytest.mark.parametrize("text", ["", "8", "epochs", "8 epoch s", "-1 steps", "1.5 steps", "9" * 400 + " epochs", 8])
def test_no_lengths(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a (length|whole number of steps)"):
        Length.parse(text)


def test_lengths_in_steps_round_up() -> None:
    assert Length.parse("0.5 epochs").steps(79) == 40
    assert Length.parse("8 epochs").steps(79) == 632
    assert Length.parse("10 steps").steps(79) == 10


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for kind in (Duration, Length):
        try:
            parsed = kind.parse(text)
        except ValueError:
            continue
        assert str(parsed) == (text if kind is Duration else text.strip())


@given(st.integers(0, 10**9), st.sampled_from(["steps", "epochs"]), st.sampled_from(["", " ", "  "]))
def test_whole_lengths_are_exact(count: int, unit: str, space: str) -> None:
    assert Length.parse(f"{count}{space}{unit}").count == count


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["ms", "s", "m", "h", "d"])), min_size=1))
def test_durations_add_up(parts: list[tuple[int, str]]) -> None:
    seconds = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    text = " ".join(f"{number}{unit}" for number, unit in parts)
    assert Duration.parse(text).time_s == pytest.approx(sum(n * seconds[u] for n, u in parts))
