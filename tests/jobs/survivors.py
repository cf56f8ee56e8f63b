"""The agent's end of the sockets of some ranks, for tests of what they keep."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

WAIT_S = 60.0

CONNECT = """
import json, os, socket
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(os.environ["AGENT_OF_THIS_TEST"])
sock.send(json.dumps({"rank": int(os.environ["RANK"])}).encode())
os.environ["LAUNCH_CONTROL_FD"] = str(sock.detach())
"""
"""Runs in every rank before its training: an agent would have made the socket before the fork."""


class Agent:
    """Listens; `env` and `load` are for `start`."""

    def __init__(self, folder: Path) -> None:
        script, path = folder / "connect.py", folder / "agent"
        script.write_text(CONNECT)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(WAIT_S)
        self._ranks: dict[int, socket.socket] = {}
        self.env = {"AGENT_OF_THIS_TEST": str(path)}
        self.load = [str(script)]

    def meet(self, ranks: int) -> None:
        """Wait until so many ranks have connected."""
        while len(self._ranks) < ranks:
            sock, _ = self._listener.accept()
            sock.settimeout(WAIT_S)
            self._ranks[json.loads(sock.recv(1 << 16))["rank"]] = sock

    def report(self, ranks: list[int]) -> dict[int, int | None]:
        """What they hold; all are asked before one is heard."""
        for rank in ranks:
            self._send(rank, {"order": "report"})
        return {rank: self._hear(rank, "holds")["holds"] for rank in ranks}

    def keep(self, rank: int, folder: Path) -> dict[str, Any]:
        """Have one write its state; its answer."""
        folder.mkdir(parents=True, exist_ok=True)
        self._send(rank, {"order": "keep", "folder": str(folder)})
        return self._hear(rank, "kept", "not_kept")

    def close(self) -> None:
        """Close everything."""
        for sock in (self._listener, *self._ranks.values()):
            sock.close()

    def _send(self, rank: int, order: dict[str, Any]) -> None:
        self._ranks[rank].send(json.dumps(order).encode())

    def _hear(self, rank: int, *names: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._ranks[rank].recv(1 << 16))
            if message.keys() & set(names):
                return message
