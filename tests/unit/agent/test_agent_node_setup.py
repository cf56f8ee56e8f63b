"""`setup`: what its lines leave, and how one that fails is named. Real bash, nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.node_setup import (
    SetupEnd,
    SetupFailed,
    SetupStopped,
    environment_after,
    next_start,
    run_setup,
)
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

SetUp = Callable[..., SetupEnd]


@pytest.fixture
def set_up(tmp_path: Path) -> Iterator[SetUp]:
    """Run lines; `watch_fd` is what would say that the launcher is gone."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)

    def run(*lines: str, watch_fd: int | None = None, signalled: int | None = None) -> SetupEnd:
        if signalled is not None:
            os.write(write_end, bytes([signalled]))
        stops = (signal.SIGTERM,)
        return run_setup(
            lines, RunDir(tmp_path), cwd=str(tmp_path), signals=read_end, stop_signals=stops, watch_fd=watch_fd
        )

    yield run
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)
    os.close(read_end)
    os.close(write_end)


def failed(end: SetupEnd) -> SetupFailed:
    assert isinstance(end, SetupFailed)
    return end


def test_what_is_exported_is_in_the_environment_that_is_left(set_up: SetUp) -> None:
    end = set_up("export A='two\nlines'", "B=not-exported", "source <(echo export C=3)", "unset HOME")
    assert isinstance(end, dict)
    assert (end[b"A"], end[b"C"]) == (b"two\nlines", b"3")
    assert b"B" not in end
    assert b"HOME" not in end
    assert not [name for name in end if b"launch_setup" in name]


def test_our_own_note_is_not_exported_either(set_up: SetUp) -> None:
    end = set_up("set -a", "A=1")
    assert isinstance(end, dict)
    assert end[b"A"] == b"1"
    assert not [name for name in end if b"launch_setup" in name]


@pytest.mark.parametrize("line", ["export PATH=/nowhere", "unset PATH", "env() { false; }"])
def test_the_environment_is_read_whatever_path_it_leaves(set_up: SetUp, line: str) -> None:
    end = set_up(line, "export A=1")
    assert isinstance(end, dict)
    assert end[b"A"] == b"1"


def test_a_large_environment_fits(set_up: SetUp) -> None:
    end = set_up("for i in $(seq 20); do export BIG_$i=$(head -c 20000 /dev/zero | tr '\\0' x); done")
    assert isinstance(end, dict)
    assert sum(len(value) for name, value in end.items() if name.startswith(b"BIG_")) == 400_000


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("false", 1, ()),
        ("exit 7", 7, ()),
        ("false | true", 1, ()),
        ("echo why >&2; (exit 3)", 3, ("why",)),
        ("nosuchcommand", 127, ("setup: line 2: nosuchcommand: command not found",)),
        ("echo $UNSET_VARIABLE", 1, ("setup: line 2: UNSET_VARIABLE: unbound variable",)),
        ("kill -9 $$", 137, ()),
        ("exit 0", 1, ("it left before the end, with exit code 0",)),
        ("source ./nosuchfile", 1, ("setup: line 2: ./nosuchfile: No such file or directory",)),
    ],
)
def test_a_line_that_fails_ends_it_and_is_named(set_up: SetUp, line: str, code: int, said: tuple[str, ...]) -> None:
    end = failed(set_up("true", line, "echo never"))
    assert (end.exit_code, end.output) == (code, said)
    if line != "kill -9 $$":  # then nobody is left to say
        assert (end.number, end.line) == (2, line)
        assert f"line 2 of `setup` (`{line}`) ended with exit code {code}" in str(end)


def test_a_line_may_have_several_lines_and_is_shown_by_its_first(set_up: SetUp) -> None:
    end = failed(set_up("if true; then\n  export A=1\nfi", "for i in 1 2; do\n  false\ndone"))
    assert str(end) == "line 2 of `setup` (`for i in 1 2; do ...`) ended with exit code 1"


def test_what_it_prints_is_kept_and_shown(set_up: SetUp, tmp_path: Path) -> None:
    set_up("echo out", "echo err >&2", "printf 'no line end'")
    assert RunDir(tmp_path).setup_log.read_text() == "out\nerr\nno line end\n"
    assert RunDir(tmp_path).console.read_text() == "setup out\nsetup err\nsetup no line end\n"


def test_a_daemon_that_it_leaves_behind_is_not_waited_for(set_up: SetUp, tmp_path: Path) -> None:
    end = set_up("sleep 600 & echo $! > daemon", "export A=1")
    os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)
    assert isinstance(end, dict)
    assert end[b"A"] == b"1"


def test_a_signal_and_the_end_of_the_launcher_stop_it(set_up: SetUp) -> None:
    assert set_up("sleep 600", signalled=signal.SIGTERM) == SetupStopped(signum=signal.SIGTERM)
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert set_up("sleep 600", watch_fd=read_end) == SetupStopped(signum=None)
    os.close(read_end)


def test_the_next_start_is_the_same_command_with_what_bash_changes_put_back() -> None:
    argv = ["python", "-P", "start.py", "--run-dir", "r", "--local", "--wait"]
    assert next_start(argv, watch_fd=5) == [*argv[:-1], "--setup-done", "--watch-fd", "5"]
    assert next_start(argv, watch_fd=None) == [*argv[:-1], "--setup-done"]
    left = environment_after({b"SHLVL": b"1", b"_": b"/bin/launch"}, {b"SHLVL": b"2", b"_": b"/bin/env", b"A": b"1"})
    assert left == {b"SHLVL": b"1", b"_": b"/bin/launch", b"A": b"1"}
