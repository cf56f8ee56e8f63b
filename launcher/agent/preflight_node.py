"""The preflight on a node: a process that listens where the collectives will, measures, and reaches for its peers.

It is a process of its own since a question to a driver may hang. It speaks with its agent in lines of JSON: first it
says where it listens and what this node gives; when it is told who the others are, it connects to each, sends to the
next one, and says what came of it. Nothing of torch is needed. The head agent judges (`preflight.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from launcher.agent import addresses, proc
from launcher.agent.gpumeter import GpuMeter, NoMeterError
from launcher.agent.loop import Loop
from launcher.planning.plan import Plan

Report = dict[str, Any]
_CPU_WINDOW_S = 0.2
_CONNECT_S = 2.0
"""A peer on any network that trains is reached in a hundredth of it."""
_SEND_S = 0.3
_ANSWER_S = 3.0
"""How long the last bytes may take; beyond it nothing large gets through."""
_CHUNK = bytes(1 << 18)
_NONCE_BYTES = 16
_MOST_AT_ONCE = 64
_SIOCGIFMTU = 0x8921


class NodePreflight:
    """The process, seen from the agent. `on_report` hears each line; a process that dies says that."""

    def __init__(self, plan: Plan, node: int, loop: Loop, on_report: Callable[[Report], None]) -> None:
        self._plan, self._node, self._loop, self._on_report = plan, node, loop, on_report
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    @property
    def pids(self) -> set[int]:
        """Of the process, while there is one."""
        return set() if self._process is None else {self._process.pid}

    def begin(self, nonce: str) -> None:
        """Start it; returns at once."""
        self.stop()
        order = {"agent": os.getpid(), "nonce": nonce, **way_of(self._plan, self._node, os.environ)}
        if self._plan.device == "cuda":
            gpus = self._plan.nodes[self._node].gpus
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") if self._plan.slurm else ",".join(map(str, gpus)) or None
            order["gpus"] = {"visible": visible, "wanted": self._plan.nproc_per_node}
        argv = [sys.executable, "-P", str(Path(__file__).with_name("start.py")), "--preflight", json.dumps(order)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._loop.add(self._process.stdout, self._read)

    def tell(self, peers: Sequence[Mapping[str, Any]]) -> None:
        """Who the others are."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has died, and that is said
                self._process.stdin.write(json.dumps(list(peers)).encode() + b"\n")
                self._process.stdin.flush()

    def stop(self) -> None:
        """End it, if there is one."""
        if self._process is None:
            return
        process, self._process, self._buffer = self._process, None, b""
        assert process.stdout is not None
        assert process.stdin is not None
        with contextlib.suppress(KeyError):  # at its end it is not watched any more
            self._loop.remove(process.stdout)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is left to the kernel
            process.wait(0.5)
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        data = self._process.stdout.read(1 << 16)
        if not data:
            self._loop.remove(self._process.stdout)
            self._on_report({"kind": "fault", "fault": "its process for the preflight has ended, see logs/agents.log"})
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._on_report(json.loads(line))


def way_of(plan: Plan, node: int, env: Mapping[str, str]) -> dict[str, Any]:
    """By which address and interface the workers of this node will meet the others, and who has said so."""
    name = "NCCL_SOCKET_IFNAME" if plan.backend == "nccl" else "GLOO_SOCKET_IFNAME"
    given = next((each for each in plan.env if each.name == name), None)
    value, origin = (env.get(name, ""), "the node's environment") if given is None else (given.value, given.origin)
    known = addresses.own_addresses()
    head = plan.nodes[0].address
    own = plan.nodes[node].address
    chosen = [each for each in known if _names(value, each.interface, nccl=plan.backend == "nccl")]
    chosen = [each for each in known if each.address == own] if not value or value.startswith("^") else chosen
    same_family = [each for each in chosen if (":" in each.address) == (":" in head)]
    best = next(iter([*same_family, *chosen]), None)
    return {
        "address": own if best is None else best.address,
        "interface": "" if best is None else best.interface,
        "said_by": f"{name}={value} ({origin})" if value else "the way to node 0",
        "known": addresses.listed(known),
    }


def _names(value: str, interface: str, *, nccl: bool) -> bool:
    """Whether a value of the variable means an interface: NCCL takes beginnings of names, unless there is a `=`."""
    exact = not nccl or value.startswith("=")
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    return interface in names if exact else any(name and interface.startswith(name) for name in names)


# ---------------------------------------------------------------- in the process


def main(text: str) -> NoReturn:
    """Follow the order of an agent until that has ended, or ends this process."""
    order: dict[str, Any] = json.loads(text)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # they are meant for the agent
    proc.die_with_parent(order["agent"])
    nonce = bytes.fromhex(order["nonce"])
    family = socket.AF_INET6 if ":" in order["address"] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((order["address"], 0))
        listener.listen(_MOST_AT_ONCE * 4)
    except OSError as error:
        _say({"kind": "fault", "fault": f"nothing can listen at {order['address']}: {error.strerror}"})
        signal.pause()
    threading.Thread(target=_serve, args=(listener, nonce), daemon=True).start()
    rate, share = _cpu_rate()
    here = {name: order[name] for name in ("address", "interface", "said_by", "known")}
    link = Path("/sys/class/net") / order["interface"]
    _say(
        {
            "kind": "here",
            **here,
            "port": listener.getsockname()[1],
            "mtu": _mtu(listener, order["interface"]),
            "speed_mbps": _number(link / "speed") if (link / "device").exists() else None,
            "cpu_rate": rate,
            "cpu_share": share,
            "gpus": _gpus(order.get("gpus")),
        }
    )
    line = sys.stdin.readline()
    if line:
        _say(_links(json.loads(line), order["address"], nonce))
    signal.pause()  # others may still measure the way to here
    sys.exit(0)


def _say(report: Report) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def _cpu_rate() -> tuple[float, float]:
    """Rounds of arithmetic per second in a short time, and how much of a CPU that time has brought."""
    begin_s, begin_cpu_s, rounds = time.monotonic(), time.process_time(), 0
    while (past_s := time.monotonic() - begin_s) < _CPU_WINDOW_S:
        total = 0
        for number in range(2_000):
            total = (total * 31 + number) & 0xFFFFFFFF
        rounds += 1
    return round(rounds / past_s, 1), round((time.process_time() - begin_cpu_s) / past_s, 3)


def _gpus(order: Mapping[str, Any] | None) -> dict[str, Any]:
    """What NVML says of the GPUs of the workers; a reason where nobody can be asked."""
    if order is None:
        return {}
    try:
        return {"wanted": order["wanted"], "values": GpuMeter(order["visible"]).measure()}
    except NoMeterError as error:
        return {"wanted": order["wanted"], "note": str(error)}


def _mtu(sock: socket.socket, interface: str) -> int | None:
    """By the kernel: /sys may show another network than the one that this process is in."""
    try:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFMTU, struct.pack("16si12x", interface.encode()[:15], 0))
    except OSError:
        return None
    return int(struct.unpack("16si12x", answer)[1])


def _number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _serve(listener: socket.socket, nonce: bytes) -> NoReturn:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_answer, args=(sock, nonce), daemon=True).start()


def _answer(sock: socket.socket, nonce: bytes) -> None:
    """Take what comes until its end, and say how much it was in which time."""
    with sock, contextlib.suppress(OSError):
        sock.settimeout(_CONNECT_S + _ANSWER_S + _SEND_S)
        if sock.recv(_NONCE_BYTES, socket.MSG_WAITALL) != nonce:
            return
        sock.sendall(b"+")
        buffer, count, begin_s = bytearray(1 << 20), 0, 0.0
        while got := sock.recv_into(buffer):
            begin_s = begin_s or time.monotonic()
            count += got
            end_s = time.monotonic()
        if count:
            sock.sendall(json.dumps({"bytes": count, "took_s": end_s - begin_s}).encode())


def _links(peers: Sequence[Mapping[str, Any]], own: str, nonce: bytes) -> Report:
    """Reach for every peer at once; then send to the first of them, as all others do to theirs."""
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(peers)))) as pool:
        tried = list(pool.map(lambda peer: _reach(peer, own, nonce), peers))
    failed = {str(peer["node"]): error for peer, (_, error) in zip(peers, tried, strict=True) if error}
    report: Report = {"kind": "links", "failed": failed, "to": None, "bytes_per_s": None}
    first = tried[0][0] if tried else None
    if first is not None:
        report |= {"to": peers[0]["node"], **_send(first)}
    for sock, _ in tried:
        if sock is not None:
            sock.close()
    report["cpu_rate"], report["cpu_share"] = _cpu_rate()
    return report


def _reach(peer: Mapping[str, Any], own: str, nonce: bytes) -> tuple[socket.socket | None, str]:
    """A connection, or why there is none."""
    try:
        sock = socket.create_connection((peer["address"], peer["port"]), _CONNECT_S, source_address=(own, 0))
    except TimeoutError:
        return None, f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return None, os.strerror(error.errno) if error.errno else str(error)
    try:
        sock.sendall(nonce)
        if sock.recv(1) == b"+":
            return sock, ""
    except OSError as error:
        sock.close()
        return None, os.strerror(error.errno) if error.errno else "no answer"
    sock.close()
    return None, "somebody else listens there"


def _send(sock: socket.socket) -> Report:
    """What the other side has received per second; what was only buffered here does not count."""
    sock.settimeout(_ANSWER_S)
    end_s = time.monotonic() + _SEND_S
    try:
        while time.monotonic() < end_s:
            sock.sendall(_CHUNK)
        sock.shutdown(socket.SHUT_WR)
        told = json.loads(sock.recv(200))
    except (OSError, ValueError):
        return {"bytes_per_s": 0.0}
    return {"bytes_per_s": round(told["bytes"] / max(told["took_s"], 1e-6))}
