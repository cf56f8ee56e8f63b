"""The workers of one node under torchrun: for a torch whose elastic classes the agent does not know.

torchrun starts one relay per rank, which is a zygote for one worker: it comes to this agent for its order, so output,
signals, exit codes and error files are as without torchrun. What torchrun itself would do about a worker's end it never
gets to see: a relay stays until the agent has no more use for it. Standard library only.

    agent -> zygote -> torchrun -> relays -> workers        each ends with the one before it
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from launcher.agent import proc, zygote
from launcher.agent.last_words import LastWords
from launcher.agent.logs import LineFile, Stream, Streams, prefixed
from launcher.agent.worker import Attempt, Worker
from launcher.agent.workers import KILLED, Workers
from launcher.planning.worker_env import TORCHRUN_NAMES

_RELAY = "LAUNCH_RELAY"
"""Where the relays find the agent: a socket without a file, which only this user's processes may speak to."""
_KEPT_NAMES = frozenset({"OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"})
_THEIRS = TORCHRUN_NAMES - _KEPT_NAMES - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""What torchrun sets is torchrun's: with another torch it may mean something else."""
_TORCHRUN = -1
"""In the place of a local rank."""
_NOTHING = 1 << 8
"""As a wait status: exit code 1."""


class TorchrunWorkers(Workers):
    """Workers that torchrun starts."""

    _listener: socket.socket | None = None
    _torchrun_pid = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._relay_pids: dict[socket.socket, int] = {}
        super().__init__(*args, **kwargs)

    def _begin(self, order: Attempt) -> None:
        """Start torchrun. Its workers come by themselves, or do not: it may have to wait for other nodes."""
        self._orders = {rank: (_without_theirs(start), fds) for rank, (start, fds) in self._prepared.items()}
        self._relays: dict[int, socket.socket] = {}
        self._words = LastWords()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"launch-{self._plan.run_id}-{self._node}-{secrets.token_hex(8)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(self._plan.nproc_per_node)
        self._loop.add(self._listener, self._accept)
        start = self._torchrun(order, name)
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        self._file = LineFile(self._run.torchrun_log(attempt=order.attempt, node=self._node))
        self._streams = Streams(self._loop)
        for fd, is_stderr in ((out_read, False), (err_read, True)):
            self._watch(fd, is_stderr=is_stderr)
        self._send(start, (out_write, err_write))

    def _torchrun(self, order: Attempt, relay: str) -> zygote.WorkerStart:
        """The plan's torchrun line of this node, with a relay in place of the script."""
        plan, python = self._plan, self._plan.worker.python
        members = range(len(plan.nodes)) if order.members is None else order.members
        command = [
            *(python, "-P", "-m", "torch.distributed.run"),
            *("--nnodes", str(len(members)), "--node-rank", str(members.index(self._node))),
            *("--nproc-per-node", str(plan.nproc_per_node)),
            *("--master-addr", order.master_addr, "--master-port", str(order.master_port)),
            *("--max-restarts", "0"),
            *("--no-python", python, "-P", str(Path(__file__).with_name("start.py")), "--relay"),
        ]
        return zygote.WorkerStart(
            local_rank=_TORCHRUN,
            env={**{variable.name: variable.value for variable in plan.env}, _RELAY: relay},
            env_unset=(*plan.env_unset, *sorted(_THEIRS - {variable.name for variable in plan.env})),
            cwd=plan.worker.cwd,
            cpus=plan.nodes[self._node].cpus,
            module=None,
            script=None,
            argv=tuple(command),
            python=python,
        )

    def _watch(self, fd: int, *, is_stderr: bool) -> None:
        def take(lines: bytes) -> None:
            self._file.write(lines)
            self._words.add(lines, is_stderr=is_stderr)
            if is_stderr:
                self._console.write(prefixed(lines, f"{self._node}:torchrun"))

        self._streams.add(Stream(fd, take))

    # ---------------------------------------------------------------- relays

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        connection.setblocking(True)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            connection.close()
            return
        self._loop.add(connection, lambda: self._hear_relay(connection))

    def _hear_relay(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._relay_ended(connection)
            return
        message = json.loads(data)
        if "local_rank" in message:
            self._order(message["local_rank"], connection)
            return
        if "zygote" in message:
            self._relay_pids[connection] = message["zygote"]
            return
        self._on_report(message)
        worker = next((self._workers[rank] for rank, relay in self._relays.items() if relay is connection), None)
        if worker is not None and worker.exit_code is not None and not worker.failed:
            self._let_go(connection)  # torchrun hears of a success
        elif "started" in message and self._stopping:
            self.stop()

    def _order(self, local_rank: int, connection: socket.socket) -> None:
        if local_rank not in self._orders:
            self._let_go(connection)
            return
        self._relays[local_rank] = connection
        start, fds = self._orders.pop(local_rank)
        with contextlib.suppress(ConnectionError):  # its end is about to be heard
            zygote.send_start(connection, start, fds)
        for fd in fds:
            os.close(fd)

    def _relay_ended(self, connection: socket.socket) -> None:
        """It was killed, and its worker with it; or both have ended in order, and were let go."""
        self._let_go(connection)
        for local_rank, relay in list(self._relays.items()):
            if relay is connection:
                del self._relays[local_rank]
                self._give_up(self._workers[local_rank], KILLED)

    def _let_go(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # already
            self._loop.remove(connection)
        self._relay_pids.pop(connection, None)
        connection.close()

    def _give_up(self, worker: Worker, status: int) -> None:
        if worker.exit_code is None:
            worker.pid = worker.pid or -1
            self._ended(worker, status)

    # ---------------------------------------------------------------- the whole node

    def _zygotes(self) -> list[int]:
        """A relay is the zygote of one worker, and can be stopped as well."""
        return [*super()._zygotes(), *self._relay_pids.values()]

    def _on_report(self, message: Mapping[str, Any]) -> None:
        if message.get("started") == _TORCHRUN:
            self._torchrun_pid = message["pid"]
            self._events.write("torchrun_started", attempt=self._attempt, node=self._node, pid=self._torchrun_pid)
        elif self._torchrun_pid and message.get("ended") == self._torchrun_pid:
            self._torchrun_ended(message["status"])
        else:
            super()._on_report(message)

    def _torchrun_ended(self, status: int) -> None:
        """Workers that have begun end with it; those that have not never will, and what it said last is why."""
        self._torchrun_pid = 0
        self._streams.close()
        for local_rank, worker in self._workers.items():
            if local_rank in self._orders and worker.exit_code is None:
                worker.words = self._words
                self._give_up(worker, status or _NOTHING)

    def stop(self) -> None:
        """Ask every worker to save and leave; those that are still to come, once they are there."""
        self._stopping = True
        for local_rank, relay in self._relays.items():
            worker = self._workers[local_rank]
            if worker.pid > 0 and worker.exit_code is None:
                with contextlib.suppress(ConnectionError):
                    relay.send(json.dumps({"term": [worker.pid]}).encode())

    def kill(self) -> None:
        """End torchrun and all below it."""
        super().kill()
        self._close()

    def _replace_zygote(self) -> None:
        super()._replace_zygote()
        self._close()

    def _close(self) -> None:
        """Nothing is left of the attempt but what it has written."""
        if self._listener is None:
            return
        self._loop.remove(self._listener)
        self._listener.close()
        self._listener = None
        for relay in self._relays.values():
            self._let_go(relay)
        self._relays.clear()
        for worker in self._workers.values():
            self._give_up(worker, KILLED)
        for _, fds in self._orders.values():
            for fd in fds:
                os.close(fd)
        self._orders.clear()
        if self._torchrun_pid:
            self._torchrun_ended(KILLED)
        self._file.close()


def _without_theirs(start: zygote.WorkerStart) -> zygote.WorkerStart:
    return replace(start, env={name: value for name, value in start.env.items() if name not in _THEIRS})


def relay() -> NoReturn:
    """What torchrun starts for each rank: fetch the order of the agent, and be the zygote of one worker."""
    proc.die_with_parent(os.getppid())
    name = os.environ.pop(_RELAY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{name}")
        sock.send(json.dumps({"local_rank": int(os.environ["LOCAL_RANK"])}).encode())
    except OSError as error:
        sys.exit(f"launch: the agent of this node is gone: {error.strerror}")
    zygote.serve(sock)
