"""Who comes to the port of a run without its token is refused, and changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launch, Launched, Recipe

pytestmark = pytest.mark.process

AT_ONCE = 200
WORKS = """
import toy
dist = toy.join()
toy.mark("up")
toy.wait_for("go")
import torch
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == toy.WORLD
"""


class Bomb:
    """A pickle that leaves a file wherever it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


def wrong_token(sock: socket.socket) -> bytes:
    """An answer as one of ours would give it, made with another token."""
    nonce = json.loads(sock.recv(4096))["challenge"]
    answer = hmac.new(b"\x00" * 32, f"agent:{nonce}".encode(), hashlib.sha256).hexdigest()
    return json.dumps({"answer": answer, "challenge": "1"}).encode() + b"\n"


def facts(pid: int) -> tuple[int, int]:
    """Descriptors, and memory in bytes, of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * os.sysconf("SC_PAGESIZE")


def refused(run: Launched) -> list[str]:
    return [event["reason"] for event in run.happened("stranger_refused")]


def test_strangers_of_all_kinds_and_two_hundred_at_once_disturb_nobody(
    launch: Launch, recipe: Recipe, tmp_path: Path
) -> None:
    exploded = tmp_path / "exploded"
    os.close(pickle.loads(pickle.dumps(Bomb(exploded))))  # it does
    exploded.unlink()
    run = launch(recipe(WORKS, nodes=2, nproc=1))
    run.wait_for_marks("up", ranks=2)
    channel = run.wait_for_event("supervisor_started")["channel"]
    address = (channel["address"], channel["port"])
    agent = run.wait_for_event("agent_started", node=0)["pid"]
    descriptors, memory_bytes = facts(agent)

    sent: list[bytes | Callable[[socket.socket], bytes]] = [
        wrong_token,
        os.urandom(300) + b"\n",
        b"GET / HTTP/1.1\r\nHost: launch\r\n\r\n",
        pickle.dumps(Bomb(exploded)) + b"\n",
        b'{"answer": ',
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a hello of TLS
        b"x" * 1_000_000,
    ]
    for number, what in enumerate(sent, 1):
        with socket.create_connection(address) as sock:
            with contextlib.suppress(OSError):  # it was refused before the end
                sock.sendall(what(sock) if callable(what) else what)
                sock.shutdown(socket.SHUT_WR)
            run.until(lambda number=number: len(refused(run)) == number)
    assert refused(run)[0] == "does not know the token of this run"
    assert set(refused(run)[1:]) <= {"did not answer the challenge", "[Errno 104] Connection reset by peer"}

    silent = [socket.create_connection(address) for _ in range(AT_ONCE)]  # each with half a handshake, and no more
    for sock in silent:
        with contextlib.suppress(OSError):  # it has made room for another
            sock.sendall(b'{"answer": "')
    run.until(lambda: "too many others wait to be let in" in refused(run))
    assert facts(agent)[0] <= descriptors + 64 + 2
    for sock in silent:
        sock.close()
    run.until(lambda: facts(agent)[0] <= descriptors)
    assert facts(agent)[1] < memory_bytes + (8 << 20)

    run.let("go")
    assert run.wait() == 0, run.text
    assert run.result["restarts"] == 0
    assert not run.happened("failure")
    assert not exploded.exists()
    assert len(refused(run)) <= 100, "a scan of the ports must not fill the disk"
