"""What an agent tells of the clocks of its workers, and of processes that do nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.agent.clocks import Clock, clock_of, idle_state
from launcher.runs.clock import Phase, StepPage


def test_a_clock_travels_as_json() -> None:
    clock = Clock(
        phase=Phase.SAVE,
        step=7,
        age_s=1.5,
        own_ms=12.25,
        own_steps=7,
        longest_s=(0.5, 1.0, 2.0, 0.0, 3.25, 0.0),
        state="D",
        is_silent=False,
    )
    assert Clock.from_message(clock.to_message()) == clock


def test_the_age_is_that_of_the_last_mark_and_before_one_that_of_the_last_output() -> None:
    page = StepPage.create()
    now_s = time.monotonic()
    silent = clock_of(page.read(), os.getpid(), started_s=now_s - 30.0, output_s=None)
    assert silent.age_s == pytest.approx(30.0, abs=1.0)
    assert silent.is_silent
    printed = clock_of(page.read(), os.getpid(), started_s=now_s - 30.0, output_s=now_s - 10.0)
    assert printed.age_s == pytest.approx(10.0, abs=1.0)
    assert not printed.is_silent
    page.mark(Phase.STEP, 3)
    marked = clock_of(page.read(), os.getpid(), started_s=now_s - 30.0, output_s=now_s - 10.0)
    assert marked.age_s < 1.0
    assert (marked.phase, marked.step, marked.is_silent) == (Phase.STEP, 3, False)
    page.close()


@pytest.mark.parametrize(("letter", "told"), [("S", ""), ("R", ""), ("T", "T"), ("D", "D"), ("Z", "Z"), ("t", "t")])
def test_the_state_of_a_process_whatever_its_name(tmp_path: Path, letter: str, told: str) -> None:
    """Row 20: a process in an uninterruptible wait cannot be made on purpose."""
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text(f"77 (a ) D name) {letter} 1 77 77 0 -1 0\n")
    assert idle_state(77, tmp_path) == told
    assert idle_state(78, tmp_path) == "Z"


def test_a_process_that_was_stopped_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert idle_state(child.pid) == ""
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert idle_state(child.pid) == "T"
    finally:
        child.kill()
        child.wait()
