"""Stacks on a signal, asked for only where there is a handler: its default action is the end of a process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import stacks, wrapper
from launcher.agent.stacks import StackTaking
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


WORKER = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("wrapper", sys.argv[1])
wrapper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wrapper)
if sys.argv[2] == "answers":
    wrapper.show_stacks_on_signal()
def here():
    print("up", flush=True) or time.sleep(60)
here()
"""


class Workers:
    """Processes as an agent has them, each with a pipe for its standard error."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "worker.py"
        self._script.write_text(WORKER)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, how: str) -> int:
        """Returns its pid, once it is up."""
        argv = [sys.executable, str(self._script), wrapper.__file__, how]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process.pid

    def feed(self, taking: StackTaking) -> None:
        """Hand on what they write, until all is said."""
        streams = {process.stderr: rank for rank, process in enumerate(self.started)}
        while not taking.done:
            for stream in select.select(list(streams), [], [], 0.05)[0]:
                assert taking.feed(streams[stream], os.read(stream.fileno(), 1 << 16))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_who_answers_is_where_it_says(workers: Workers) -> None:
    taking = StackTaking({0: workers.start("answers")})
    assert taking.awaits(0)
    workers.feed(taking)
    told = taking.result()["0"]
    assert (told["state"], told["trouble"]) == ("", "")
    assert [frame[0] for frame in told["frames"]] == ["here"]
    assert told["line"] == 'print("up", flush=True) or time.sleep(60)'
    assert not taking.awaits(0)
    assert not taking.feed(0, b"a line of its own\n")


def test_who_is_stopped_is_seen_so_and_its_answer_is_known_when_it_comes_late(workers: Workers) -> None:
    """Where it stands, py-spy reads in its memory."""
    pid = workers.start("answers")
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    taking = StackTaking({0: pid})
    workers.feed(taking)
    told = taking.result()["0"]
    assert told["state"] == "T"
    names = [frame[0] for frame in told["frames"]]
    assert names == ["here"] or told["trouble"].startswith(("py-spy", "it does not answer"))
    assert taking.awaits(0), "it answers when it goes on"


def test_who_does_not_know_the_signal_is_not_killed_by_it(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_pyspy", lambda: None)
    taking = StackTaking({0: workers.start("knows nothing")})
    assert taking.done
    told = taking.result()["0"]
    assert (told["frames"], told["trouble"]) == ([], "it does not know the signal")
    assert workers.started[0].poll() is None


def test_nothing_is_left_of_looking_into_the_memory_of_a_worker(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it has answered by itself meanwhile, or nobody asks any more."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 600\n")
    spy.chmod(0o755)
    monkeypatch.setattr(stacks, "find_pyspy", lambda: str(spy))
    pid = workers.start("knows nothing")
    before = len(list(Path("/proc/self/fd").iterdir()))
    taking = StackTaking({0: pid})
    (running,) = [int(each) for each in children() if int(each) != pid]
    taking.close()
    taking.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not Path("/proc", str(running)).exists()


def children() -> list[str]:
    return Path("/proc/thread-self/children").read_text().split()
