"""The agent's end of the control socket of a worker: orders of a rescue, and what it says. Standard library only.

One AF_UNIX SOCK_SEQPACKET socket per worker of the built-in job, made before the fork, so that nobody else can connect.
Each datagram is one JSON object:

    agent -> worker   {"order": "report"}   let go of your peers: a blocked collective fails; answer what you hold
                      {"order": "keep", "folder": path}                   write the state of the newest step there
    worker -> agent   {"holds": step or null}     {"kept": name}     {"not_kept": reason}
                      {"peer_lost": message, "step": n}    it has lost a peer, and waits for orders
                      {"saved": step}                      rank 0: a checkpoint is complete on disk
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from launcher.agent.loop import Loop

FD_VARIABLE = "LAUNCH_CONTROL_FD"
"""Where a worker finds its end."""
MAX_DATAGRAM_BYTES = 1 << 16

Message = dict[str, Any]


class ControlSocket:
    """To one worker. `close` it when the worker has ended: what it still said is heard first."""

    def __init__(self, loop: Loop, on_message: Callable[[Message], None]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.worker_fd = theirs.detach()
        """Its end: to be closed here once the worker has it."""
        self._loop, self._on_message, self._open = loop, on_message, True
        loop.add(self._ours, self._on_ready)

    def send(self, message: Message) -> None:
        """Order something of it. One that has gone, or is frozen with its socket full, will not answer either."""
        if self._open:
            with contextlib.suppress(ConnectionError, BlockingIOError):
                self._ours.send(json.dumps(message).encode())

    def close(self) -> None:
        """Hear what it has said, then close."""
        while self._open and self._hear():
            pass
        self._end()

    def _on_ready(self) -> None:
        self._hear()

    def _hear(self) -> bool:
        """One message; False where there is none (any more)."""
        try:
            data = self._ours.recv(MAX_DATAGRAM_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._end()
            return False
        self._on_message(json.loads(data))
        return True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove(self._ours)
            self._ours.close()
