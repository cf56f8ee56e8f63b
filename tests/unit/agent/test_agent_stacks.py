"""Stacks on a signal, asked for only where there is a handler: its default action is the end of a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launcher.agent import stacks
from launcher.agent.wrapper import STACKS_SIGNAL


def proc_of(tmp_path: Path, caught: str) -> Path:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "status").write_text(f"Name:\tx\nSigIgn:\tffffffffffffffff\nSigCgt:\t{caught}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("caught", "signum", "expected"),
    [
        ("1000000100000000", 61, True),
        ("1000000100000000", 60, False),
        ("0000000000000001", 1, True),
        ("8000000000000000", 64, True),
        ("0000000000000000", 61, False),
    ],
)
def test_the_handlers_of_a_process_are_read(tmp_path: Path, caught: str, signum: int, expected: bool) -> None:
    assert stacks.catches(7, signum, proc_of(tmp_path, caught)) is expected


def test_a_process_that_is_gone_catches_nothing(tmp_path: Path) -> None:
    assert stacks.catches(7, STACKS_SIGNAL, tmp_path) is False


def test_who_has_no_handler_is_not_asked() -> None:
    """This process has none: the signal would end the tests."""
    assert not stacks.catches(os.getpid(), STACKS_SIGNAL)
    assert stacks.request([os.getpid()]) == set()


def test_the_signal_is_a_real_time_one_that_the_c_library_leaves_to_programs() -> None:
    assert signal.SIGRTMIN < STACKS_SIGNAL < signal.SIGRTMAX
