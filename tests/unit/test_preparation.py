"""`prepare`: lines of bash before anything is submitted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import runs_values

from launcher.errors import Refused
from launcher.planning.plan import EnvVar, Plan
from launcher.planning.variables import OFFLINE_ORIGIN
from launcher.preparation import prepare
from launcher.runs.events import read_events
from launcher.runs.rundir import RunDir


def prepared(folder: Path, *lines: str, env: tuple[EnvVar, ...] = ()) -> tuple[list[str], RunDir]:
    run = runs_values.create(folder, prepare=lines, env=env)
    shown: list[str] = []
    prepare(Plan.from_json(run.plan.read_text()), run, show=shown.append)
    return shown, run


def test_lines_share_a_shell_and_their_output_is_kept(tmp_path: Path) -> None:
    """F097"""
    shown, run = prepared(tmp_path, "x=1; cd /", 'echo "$x $PWD $LAUNCH_RUN_DIR"; echo two >&2; printf three')
    assert shown == [f"1 / {run.path}", "two", "three"]
    assert (run.path / "logs" / "prepare.log").read_text() == f"1 / {run.path}\ntwo\nthree\n"
    assert [event["event"] for event in read_events(run.path)] == ["created", "prepared"]


def test_no_lines_are_no_event(tmp_path: Path) -> None:
    shown, run = prepared(tmp_path)
    assert shown == []
    assert not (run.path / "logs" / "prepare.log").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("false", "line 2 (`false`) ended with exit code 1"),
        ("echo on; (exit 7) | cat", "line 2 (`echo on; (exit 7) | cat`) ended with exit code 7: on"),
        ("kill -9 $$", "line 2 (`kill -9 $$`) was ended by SIGKILL"),
        ("echo $undefined", "line 2 (`echo $undefined`) ended with exit code 1: "),
        ("if true; then", "line 2 (`if true; then`) ended with exit code 2: "),
    ],
)
def test_the_first_failure_ends_it_and_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(Refused) as caught:
        prepared(tmp_path, "cd /", line, f"touch {tmp_path}/never")
    assert said in caught.value.problems[0].message
    assert not (tmp_path / "never").exists()


def test_what_is_offline_on_the_nodes_is_not_here(tmp_path: Path) -> None:
    env = (
        EnvVar(name="HF_HUB_OFFLINE", value="1", origin=OFFLINE_ORIGIN),
        EnvVar(name="HF_HOME", value="/shared/hf", origin="recipe:env.HF_HOME"),
    )
    shown, _ = prepared(tmp_path, 'echo "${HF_HUB_OFFLINE:-no} $HF_HOME"', env=env)
    assert shown == ["no /shared/hf"]


def test_what_is_left_running_is_not_waited_for(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    shown, _ = prepared(tmp_path, "sleep 30 & echo $!")
    assert time.monotonic() - begun_s < 20
    os.kill(int(shown[0]), signal.SIGKILL)


def test_a_request_to_stop_ends_the_lines(tmp_path: Path) -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Refused) as caught:
        prepared(tmp_path, "sleep 30")
    assert "SIGTERM" in caught.value.problems[0].message or "143" in caught.value.problems[0].message
