"""Namespaces for an engine: a network, processes and mounts of its own, and one cable to this machine. Needs root."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

NETWORK = "198.18.92"
"""Of the cables between this machine and engines, of a range that is for tests of networks alone."""
READY_S = 60.0
LIMIT_S = 120.0
ENOUGH_BYTES = 12 << 30
"""With so much memory free, images are in memory: some 4 GB, gone with the mount. From a disk they go file by file."""
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = ("--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount", "--propagation", "private")
_INIT = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint('up', flush=True)\nwhile 1: signal.pause()"
"""Process 1: it buries the orphans of others, and all end with it."""
_BOOT = """
mkdir -p /run/containerd /run/docker
mount -t tmpfs tmpfs /run/containerd
mount -t tmpfs tmpfs /run/docker
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
exec "$1" -S -c "$2"
"""


class Box:
    """One set of namespaces. It is not there until `make`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "dockerd.log"
        self._unshare: subprocess.Popen[str] | None = None
        self._number = -1  # no cable yet

    @property
    def init(self) -> int:
        """Its process 1, seen from outside."""
        assert self._unshare is not None, "the engine is off"
        return children(self._unshare.pid)[0]

    @property
    def address(self) -> str:
        """Its own, on the cable between it and this machine."""
        return f"{NETWORK}.{4 * self._number + 2}"

    @property
    def outside(self) -> str:
        """The address of this machine on that cable. Containers reach it, and nothing behind it."""
        return f"{NETWORK}.{4 * self._number + 1}"

    @property
    def _cable(self) -> str:
        return f"lte{self._number}"

    def inside(self, *argv: str) -> list[str]:
        """A command, to be run in it."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "--", *argv]

    def make(self) -> None:
        """Make the namespaces and the cable."""
        with self.log.open("a") as log:
            self._unshare = subprocess.Popen(
                [*_WITH_US, "unshare", *_NAMESPACES, "sh", "-ec", _BOOT, "boot", sys.executable, _INIT],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=plain_environment(),
            )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", self.log.read_text()
        (self.folder / "data").mkdir()
        if _memory_bytes() >= ENOUGH_BYTES:
            _must(*self.inside("mount", "-t", "tmpfs", "-o", "size=80%", "tmpfs", str(self.folder / "data")))
        self._plug_in()
        # Nobody answers there, and containers hear so at once; one that cannot be reached they would wait for.
        (self.folder / "resolv.conf").write_text(f"nameserver {self.outside}\n")
        _must(*self.inside("mount", "--bind", str(self.folder / "resolv.conf"), "/etc/resolv.conf"))

    def _plug_in(self) -> None:
        """A cable from this machine. Each engine that runs here has the next free number."""
        for self._number in range(64):
            end = ("type", "veth", "peer", "name", "eth0", "netns", str(self.init))
            made = call("ip", "link", "add", self._cable, *end)
            if made.returncode == 0:
                break
            assert "File exists" in made.stderr, made.stderr
        _must("ip", "addr", "add", f"{self.outside}/30", "dev", self._cable)
        _must("ip", "link", "set", self._cable, "up")
        _must(*self.inside("ip", "addr", "add", f"{self.address}/30", "dev", "eth0"))
        _must(*self.inside("ip", "link", "set", "eth0", "up"))
        _must(*self.inside("ip", "route", "add", "default", "via", self.outside))

    def unmake(self) -> None:
        """End everything in it: with process 1 all processes, and with these the mounts and the network."""
        if self._unshare is None:
            return
        for pid in children(self._unshare.pid):  # one; none where somebody else has ended it
            init = os.pidfd_open(pid)
            signal.pidfd_send_signal(init, signal.SIGKILL)
            select.select([init], [], [], READY_S)  # it is over when all in its namespaces are
            os.close(init)
        self._unshare.communicate()
        self._unshare = None
        call("ip", "link", "del", self._cable)  # else the kernel does, some time later


def plain_environment() -> dict[str, str]:
    """Without the mark by which a test finds its own processes: the engine outlives the test that asked for it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("LAUNCH_", "DOCKER_"))}


def children(pid: int) -> list[int]:
    """Of a process."""
    return [int(word) for word in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()]


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another one."""
    while pid > 1 and pid != ancestor:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def call(
    *argv: str, stdin: str = "", env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command, whatever comes of it."""
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, env=env, timeout=limit_s)


def _must(*argv: str) -> None:
    done = call(*argv)
    assert done.returncode == 0, f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr or done.stdout}"


def _memory_bytes() -> int:
    """What is free, or could be at once."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
