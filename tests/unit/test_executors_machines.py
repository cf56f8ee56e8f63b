"""Commands on this machine: what comes back, and what does not end."""

from __future__ import annotations

import sys

import pytest

from launcher.executors.machines import NOT_EXECUTABLE, NOT_FOUND, Done, ThisMachine, Unreachable


def test_a_command_is_told_something_and_says_something() -> None:
    done = ThisMachine().run(["sh", "-c", "cat; echo ' oh'; echo bad >&2; exit 3"], input=b"a\0b", timeout_s=30)
    assert done == Done(3, b"a\0b oh\n", b"bad\n")
    assert (done.text, done.words) == ("a\0b oh", "bad")


def test_missing_and_forbidden_programs_have_the_codes_of_a_shell() -> None:
    assert ThisMachine().run(["no-such-program"], timeout_s=30).code == NOT_FOUND
    assert ThisMachine().run(["/etc/passwd"], timeout_s=30).code == NOT_EXECUTABLE


def test_a_killed_command_has_the_code_of_its_signal() -> None:
    kill = "import os; os.kill(os.getpid(), 9)"
    assert ThisMachine().run([sys.executable, "-c", kill], timeout_s=30).code == 128 + 9


def test_a_command_that_does_not_end_is_ended() -> None:
    with pytest.raises(Unreachable, match=r"`sleep 60` has not answered within 0 s on this machine"):
        ThisMachine().run(["sleep", "60"], timeout_s=0.05)
