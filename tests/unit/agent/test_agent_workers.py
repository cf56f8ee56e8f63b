"""The workers of one node, through a real zygote that has imported nothing heavy."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.causes import Failure
from launcher.agent.loop import Loop
from launcher.agent.worker import Attempt
from launcher.agent.workers import Workers
from launcher.planning.plan import Plan, WorkerPlan
from launcher.runs.events import EventWriter, read_events
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause

pytestmark = pytest.mark.process

LIMIT_S = 30.0
MakeRun = Callable[..., tuple[Plan, RunDir]]


class Node:
    """The workers of node 0, whose first zygote is dead before it has begun: they find out, and replace it."""

    def __init__(self, make_run: MakeRun, script: Path, **fields: Any) -> None:
        work = WorkerPlan(
            kind="script",
            module=None,
            script=str(script),
            argv=(),
            cwd=str(script.parent),
            preload=None,
            python=sys.executable,
        )
        self.plan, self.run = make_run(worker=work, **{"nproc_per_node": 2, **fields})
        self.loop = Loop()
        self.events = EventWriter(self.run.path, "node-0")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        self.workers = Workers(self.plan, self.run, node=0, loop=self.loop, events=self.events, zygote_end=ours)
        self.failures: list[Failure] = []
        self.done: list[tuple[int, dict[int, int]]] = []
        self.workers.on_failure = self.failures.append
        self.workers.on_done = lambda attempt, codes: self.done.append((attempt, codes))

    def start(self, attempt: int, **fields: Any) -> dict[int, int]:
        order = Attempt(attempt=attempt, restarts=0, master_addr="127.0.0.1", master_port=1, **fields)
        return self.workers.start(order)

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), timeout_s=LIMIT_S), "it did not happen"

    def zygotes(self) -> list[int]:
        return [e["pid"] for e in read_events(self.run.path) if e["event"] == "zygote_replaced"]

    def end(self) -> None:
        """The zygote sees the end of its socket."""
        self.workers.kill()
        self.workers._zygote.close()
        for pid in self.zygotes():
            with contextlib.suppress(ChildProcessError):  # `subprocess` has seen a killed one out already
                os.waitpid(pid, 0)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_workers_that_were_sent_to_a_dead_zygote_fail_and_the_next_ones_run(make_run: MakeRun, script: Path) -> None:
    script.write_text("print('hello')")
    node = Node(make_run, script)
    node.start(1)
    assert [(f.rank, f.exit_code, f.cause) for f in node.failures] == [(0, 137, Cause.SIGNAL), (1, 137, Cause.SIGNAL)]
    assert len(node.zygotes()) == 1
    node.workers.kill()
    pids = node.start(2)
    assert set(pids) == {0, 1}
    node.until(lambda: node.done)
    assert node.done == [(2, {0: 0, 1: 0})]
    assert node.run.log(attempt=2, node=0, rank=1).read_text() == "hello\n"
    node.end()


def test_a_killed_zygote_takes_the_workers_and_their_children_with_it(make_run: MakeRun, script: Path) -> None:
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    node = Node(make_run, script)
    node.start(1)
    node.workers.kill()
    node.failures.clear()
    node.start(2)
    logs = [node.run.log(attempt=2, node=0, rank=rank) for rank in range(2)]
    node.until(lambda: all(log.read_text() for log in logs))
    children = [os.pidfd_open(int(log.read_text())) for log in logs]
    os.kill(node.zygotes()[-1], signal.SIGKILL)
    node.until(lambda: len(node.failures) == 2)
    for child in children:
        ended, _, _ = select.select([child], [], [], LIMIT_S)
        assert ended, "a child of a worker is left"
        os.close(child)
    node.end()


def test_a_stop_that_comes_while_workers_start_reaches_them(make_run: MakeRun, script: Path) -> None:
    script.write_text("import time\ntime.sleep(600)\n")
    node = Node(make_run, script)
    node.start(1)
    node.workers.kill()
    node.failures.clear()
    node.workers.stop()
    node.start(2)
    node.until(lambda: len(node.failures) == 2)
    assert {failure.exit_code for failure in node.failures} == {143}
    node.end()


def test_a_rank_that_is_left_alone_has_no_peer_to_lose(make_run: MakeRun, script: Path) -> None:
    """One node of two: a connection that it lost was not to another rank, so nobody else's failure is the cause."""
    script.write_text("raise ConnectionResetError(104, 'Connection reset by peer')\n")
    node = Node(make_run, script, nproc_per_node=1)
    node.start(1, members=(0,))
    node.workers.kill()
    node.failures.clear()
    node.start(2, members=(0,))
    node.until(lambda: len(node.failures) == 1)
    node.workers.kill()
    node.start(3, members=(0, 1))
    node.until(lambda: len(node.failures) == 2)
    assert [failure.cause for failure in node.failures] == [Cause.WORKER_ERROR, Cause.PEER_LOST]
    node.end()
