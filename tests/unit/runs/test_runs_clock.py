"""The page that a worker shares with its agent: what is marked is read, by whichever of the two writers."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from launcher.runs.clock import FD_VARIABLE, Phase, Reading, StepPage

CLIENT = Path(__file__).parents[3] / "launch_client.py"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepPage]:
    """A page as the agent has made it, which this process is to find."""
    made = StepPage.create()
    monkeypatch.setenv(FD_VARIABLE, str(made.fd))
    yield made
    made.close()


def client() -> ModuleType:
    """A copy of launch_client as a worker imports it."""
    spec = importlib.util.spec_from_file_location("client_with_a_page", CLIENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked_by_the_job(clock: pytest.MonkeyPatch, times_ns: list[int], page: StepPage) -> Reading:
    """Steps 7 and 8 at these times, by the built-in job."""
    clock.setattr("time.monotonic_ns", iter(times_ns).__next__)
    mine = StepPage.from_env()
    assert mine is not None
    mine.mark(Phase.STEP, 7)
    mine.mark(Phase.STEP, 8)
    return page.read()


def marked_by_a_script(clock: pytest.MonkeyPatch, times_ns: list[int], page: StepPage) -> Reading:
    """The same by a script."""
    clock.setattr("time.monotonic_ns", iter(times_ns).__next__)
    script = client()
    script.progress(7)
    script.progress(8)
    return page.read()


def test_a_page_says_what_was_marked_last(page: StepPage) -> None:
    assert page.read().phase is Phase.NOTHING
    mine = StepPage.from_env()
    assert mine is not None
    mine.mark(Phase.EVAL, 12)
    mine.add_own(5_000_000)
    assert page.read().own_steps == 0, "shown with the next mark"
    mine.mark(Phase.STEP, 13)
    reading = page.read()
    assert (reading.phase, reading.step, reading.marks) == (Phase.STEP, 13, 2)
    assert (reading.own_ns, reading.own_steps) == (5_000_000, 1)
    assert reading.age_s(reading.marked_ns + 1_500_000_000) == 1.5


def test_the_longest_time_without_a_mark_is_kept_for_each_phase(
    page: StepPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = 10**9
    monkeypatch.setattr("time.monotonic_ns", iter([0, 4 * second, 5 * second, 8 * second, 9 * second]).__next__)
    mine = StepPage.from_env()
    assert mine is not None
    for phase in (Phase.START, Phase.STEP, Phase.STEP, Phase.SAVE):
        mine.mark(phase, 0)
    longest_s = page.read().longest_s
    assert longest_s[Phase.NOTHING] == 4
    assert longest_s[Phase.START] == 1
    assert longest_s[Phase.STEP] == 3
    assert longest_s[Phase.SAVE] == 0


def test_a_script_writes_the_same_page_as_the_job(page: StepPage, monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = [1_000, 3_000_001_000, 7_000_001_000]
    job = marked_by_the_job(monkeypatch, times_ns, page)
    os.pwrite(page.fd, bytes(4096), 0)
    script = marked_by_a_script(monkeypatch, times_ns, page)
    assert script == job
    assert script.step == 8


def test_a_child_with_the_variable_and_another_file_under_its_number_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        monkeypatch.setenv(FD_VARIABLE, str(file.fileno()))
        assert StepPage.from_env() is None
        client().progress(3)
        assert os.pread(file.fileno(), 4096, 0) == bytes(4096)


@pytest.mark.parametrize("value", ["", "12x", "9999"])
def test_without_a_page_a_script_goes_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FD_VARIABLE, value)
    assert StepPage.from_env() is None
    client().progress(3)
