"""The terminal: lines above, one live line below, and nothing of that in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from launcher.cli.follow import live_status
from launcher.cli.screen import Screen
from launcher.runs.create import record_event
from launcher.runs.rundir import RunDir


def test_the_live_line_stays_below_the_lines_and_within_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    drawn, clear = b"x" * 19, b"\r\x1b[2K"
    expected = clear + drawn + clear + b"hello\r\n" + drawn + clear
    written = b""
    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        screen = Screen()
        wanted = screen.wants_status
        screen.status("x" * 50)
        screen.status("x" * 50)
        screen.lines(b"hello\n")
        screen.clear()
        patched.undo()
        while len(written) < len(expected):  # a terminal hands its output on in pieces
            written += os.read(reader, 1000)
    os.close(reader)
    assert wanted
    assert written == expected


def test_a_pipe_gets_lines_only(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    assert not screen.wants_status
    screen.lines(b"hello\n")
    screen.clear()
    assert capfd.readouterr().out == "hello\n"


def test_a_reader_that_went_away_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        screen = Screen()
        screen.lines(b"hello\n")
        screen.lines(b"more\n")
        monkeypatch.undo()


def test_the_live_line_is_about_this_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.events.mkdir(parents=True)
    record_event(run, "submitted", ref="x")
    record_event(run, "attempt_started", attempt=1)
    run.metrics.write_text('{"attempt": 1, "step": 314, "samples_seen": 1, "time": 1.0}\n')
    assert live_status(run) == "r  RUNNING  step 314"
    record_event(run, "resumed")
    record_event(run, "submitted", ref="y")
    assert live_status(run) == "r  SUBMITTED"
    record_event(run, "attempt_started", attempt=2)
    assert live_status(run) == "r  RUNNING"
    record_event(run, "progress", attempt=2, step=320)
    assert live_status(run) == "r  RUNNING  step 320"
