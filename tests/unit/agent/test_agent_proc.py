"""Ends of processes: whole groups, but for those that clean up after the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.agent import proc

JANITOR = "from multiprocessing.resource_tracker import main;main(0)"
"""The real one: it ends at the end of its input."""
FAMILY = f"""
import subprocess, sys
janitor = subprocess.Popen([sys.executable, "-c", "{JANITOR}"], stdin=subprocess.PIPE)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(janitor.pid, other.pid, flush=True)
sys.stdin.read()
"""


def state(pid: int) -> str:
    """R, S, T, Z ..., or nothing for one that is gone."""
    fields = proc._stat(pid)
    return fields[0] if fields else ""


def is_gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    assert select.select([descriptor], [], [], 30)[0], f"{pid} lives"
    os.close(descriptor)


def test_a_group_is_killed_but_for_its_janitor_which_sees_the_end_of_the_others() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    janitor, other = map(int, leader.stdout.readline().split())
    waiting = os.pidfd_open(janitor)
    proc.kill_group(leader.pid)
    assert leader.wait(30) == -signal.SIGKILL
    wait_for_end(other)
    assert is_gone(other)
    import select

    assert select.select([waiting], [], [], 30)[0], "its standard input has ended with the leader"
    os.close(waiting)
    leader.stdout.close()
    assert leader.stdin is not None
    leader.stdin.close()


def test_a_janitor_is_spared_though_the_leader_dies_while_his_group_is_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In that moment his children are handed over to this process: they must be found in one place or the other."""
    leader = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    assert leader.stdin is not None
    janitor, other = map(int, leader.stdout.readline().split())
    real = proc._children_of

    def too_late(pid: int) -> set[int]:
        if pid == leader.pid and not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return real(pid)

    monkeypatch.setattr(proc, "_children_of", too_late)
    proc.adopt_orphans()
    try:
        proc.kill_group(leader.pid)
        assert os.waitpid(other, 0)[1] == signal.SIGKILL
        assert os.waitpid(janitor, 0)[1] == 0, "it has done its work"
    finally:
        proc._prctl(proc._PR_SET_CHILD_SUBREAPER, 0)
        leader.wait()
        leader.stdout.close()
        leader.stdin.close()


def test_a_janitor_that_does_not_end_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "_JANITOR_S", 0.0)
    argv = [sys.executable, "-c", JANITOR]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as janitor:
        proc.kill_group(janitor.pid)
        assert janitor.wait(30) == -signal.SIGKILL


def test_a_janitor_that_works_or_waits_for_a_cpu_is_spared_as_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded machine its start alone may take seconds; killed then, it left a segment in /dev/shm."""
    monkeypatch.setattr(proc, "_JANITOR_S", 0.1)
    program = "while True: pass  # " + JANITOR
    argv = [sys.executable, "-c", program, JANITOR]
    with subprocess.Popen(argv, start_new_session=True) as janitor:
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            proc.kill_group(janitor.pid)
        assert state(janitor.pid) in "RSTt", "it is not killed"
        monkeypatch.setattr(proc, "_JANITOR_MOST_S", 0.0)
        proc.kill_group(janitor.pid)
        assert janitor.wait(30) == -signal.SIGKILL, "not for ever"


def test_shared_memory_with_the_number_of_a_process_goes_when_it_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "_SHARED_MEMORY", tmp_path)
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "raise SystemExit(3)"])
    for name in (f"torch_{pid}_1_2", f"torch_{pid}1_1_2", f"torch_{os.getpid()}_1_2", "psm_123"):
        (tmp_path / name).touch()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert proc.exit_code(proc.reap(pid)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["psm_123", f"torch_{os.getpid()}_1_2", f"torch_{pid}1_1_2"]
    )


def test_a_pid_and_its_start_name_one_process() -> None:
    mine = proc.start_time(os.getpid())
    assert mine is not None
    assert mine == proc.start_time(os.getpid())
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", ""])
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert proc.start_time(pid) is None, "it has ended, though it is not reaped"
    os.waitpid(pid, 0)
