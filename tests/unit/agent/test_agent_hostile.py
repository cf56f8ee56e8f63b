"""What strangers, full disks and odd exceptions do to an agent: nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.causes import classify, describe
from launcher.agent.channel import Connection, Server, connect, listen
from launcher.agent.logs import LineFile
from launcher.agent.loop import Loop
from launcher.runs.events import EventWriter, read_events
from launcher.runs.states import Cause

TOKEN = b"\x01" * 32
NO_TEXT = "no file '\udcff.jpg'"
"""What an exception about a file says whose name is not UTF-8."""


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Leaves this process room for twenty more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(len(used) + 21) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], before[1]))
    yield 20
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_that_use_up_the_descriptors_end_nothing(few_descriptors: int) -> None:
    loop, reasons, admitted = Loop(), list[str](), list[Connection]()
    listener = listen("127.0.0.1")
    Server(
        listener,
        TOKEN,
        loop,
        on_connection=admitted.append,
        on_refused=lambda peer, reason: reasons.append(reason),
    )
    strangers = [socket.create_connection(listener.getsockname()[:2]) for _ in range(few_descriptors - 8)]
    assert loop.run_until(lambda: bool(reasons), timeout_s=20.0)
    assert set(reasons) == {"too many others wait to be let in"}
    for stranger in strangers:
        stranger.close()


def test_silent_strangers_do_not_keep_an_agent_out() -> None:
    loop, admitted, reasons = Loop(), list[Connection](), list[str]()
    listener = listen("127.0.0.1")
    Server(listener, TOKEN, loop, on_connection=admitted.append, on_refused=lambda peer, reason: reasons.append(reason))
    address: tuple[str, int] = listener.getsockname()[:2]
    strangers = [socket.create_connection(address) for _ in range(100)]
    pid = os.fork()
    if pid == 0:
        connect(address, TOKEN, Loop(), timeout_s=20.0)
        os._exit(0)
    assert loop.run_until(lambda: bool(admitted), timeout_s=20.0)
    os.waitpid(pid, 0)
    assert len(reasons) == 100 + 1 - 64
    for stranger in strangers:
        stranger.close()


def test_what_is_no_text_travels_and_is_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "node-0")
    writer.write("failure", message=NO_TEXT)
    writer.close()
    (event,) = read_events(tmp_path)
    assert event["message"] == NO_TEXT

    loop, heard = Loop(), list[Any]()
    listener = listen("127.0.0.1")
    connection = Connection(socket.create_connection(listener.getsockname()[:2]), loop)
    other = Connection(listener.accept()[0], loop)
    other.on_message = heard.append
    connection.send({"message": NO_TEXT})
    assert loop.run_until(lambda: bool(heard), timeout_s=20.0)
    assert heard == [{"message": NO_TEXT}]


def test_a_long_exception_is_cut_and_still_understood() -> None:
    error = {"message": {"message": f"RuntimeError: {'x' * 5_000_000} connection reset"}}
    assert len(describe(1, error)) < 3_000
    assert "(5,000,031 characters)" in describe(1, error)
    assert describe(1, error).endswith("connection reset")
    assert classify(1, error) is Cause.PEER_LOST


@pytest.mark.parametrize("code", [193, 255])
def test_exit_codes_above_the_signals_are_the_scripts_own(code: int) -> None:
    """`sys.exit(-1)` is 255."""
    assert describe(code, None) == f"exited with code {code}"
    assert classify(code, None) is Cause.WORKER_ERROR


def test_a_log_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LineFile(tmp_path / "rank-0.log")
    log.write(b"before\n")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    log.write(b"lost 1\n")
    log.write(b"lost 2\n")
    monkeypatch.setattr(os, "write", write)
    log.write(b"after\n")
    log.close()
    before, empty, note, after = (tmp_path / "rank-0.log").read_text().splitlines()
    assert (before, empty, after) == ("before", "", "after")
    assert note.startswith("launch: the disk was full; ")
    assert json.loads(note.split("; ")[1].split()[0]) >= len("lost 1\nlost 2\n")
