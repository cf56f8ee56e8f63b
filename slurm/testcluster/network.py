"""The machines as network namespaces, all on one bridge.

The bridge is in the namespace of `ctl`, where no firewall of this machine and no Docker filters what crosses it.
This machine is on it too, with one cable. Files in the scratch folder hold the namespaces; `ip netns` shows none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testcluster.layout import LINK, LOGIN_ADDRESS, Cluster, ClusterError, Host, running_scratch


def make(cluster: Cluster) -> None:
    """Make the namespaces and the cables between them."""
    (cluster.scratch / "net").mkdir()
    for host in cluster.hosts:
        file = cluster.namespace(host)
        file.touch()
        call(["unshare", f"--net={file}", "true"], "make a network namespace")
    controller = cluster.controller
    _ip(
        cluster,
        controller,
        "link set lo up",
        "link add bridge0 type bridge",
        f"addr add {controller.address}/24 dev bridge0",
        "link set bridge0 up",
        f"link add {LINK} netns {os.getpid()} type veth peer name login",
        "link set login master bridge0 up",
    )
    call(["ip", "link", "set", LINK, "alias", str(cluster.scratch)], "name the cable")
    call(["ip", "addr", "add", f"{LOGIN_ADDRESS}/24", "dev", LINK], "give this machine an address in the cluster")
    call(["ip", "link", "set", LINK, "up"], "switch the cable on")
    for host in cluster.node_hosts:
        _ip(
            cluster,
            controller,
            f"link add {host.name} type veth peer name eth0 netns {cluster.namespace(host)}",
            f"link set {host.name} master bridge0 up",
        )
        _ip(cluster, host, "link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up")


def switch(cluster: Cluster, node: str, *, on: bool) -> None:
    """Cut a node off from all others, or put it back on: its end of the cable at the controller."""
    names = [host.name for host in cluster.node_hosts]
    if node not in names:
        raise ClusterError(f"{node}: there is no such node; they are {', '.join(names)}")
    _ip(cluster, cluster.controller, f"link set {node} {'up' if on else 'down'}")


def remove(scratch: Path) -> None:
    """Remove the cable and let go of the namespaces; without processes they end with that."""
    if running_scratch() == scratch:
        call(["ip", "link", "delete", LINK], "remove the cable")
    for place in sorted(_mounts_below(scratch), reverse=True):
        call(["umount", str(place)], "let go of a namespace")


def is_made(cluster: Cluster) -> bool:
    """Whether every machine has its namespace, and this one its cable."""
    held = set(_mounts_below(cluster.scratch))
    return Path(f"/sys/class/net/{LINK}").exists() and all(cluster.namespace(host) in held for host in cluster.hosts)


class Running(NamedTuple):
    """A process: on which machine of the cluster, and the name of its program."""

    host: str
    program: str


def processes_in(cluster: Cluster) -> dict[int, Running]:
    """All that runs on the machines of the cluster, by pid: daemons, jobs and what those have started."""
    held = _mounts_below(cluster.scratch)
    machines = {
        _identity(cluster.namespace(host)): host.name for host in cluster.hosts if cluster.namespace(host) in held
    }
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if (machine := machines.get(_identity(folder / "ns" / "net"))) is not None:
                found[int(folder.name)] = Running(machine, (folder / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # has ended, or (for who is not root) is another user's
    return found


def call(command: Sequence[str], purpose: str, *, stdin: str = "") -> str:
    """Run a command that has to succeed; return what it prints."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"cannot {purpose}: `{' '.join(command)}` ended with {done.returncode}: {said}")
    return done.stdout


def _ip(cluster: Cluster, host: Host, *lines: str) -> None:
    call(
        ["nsenter", f"--net={cluster.namespace(host)}", "ip", "-batch", "-"],
        f"lay the cables of {host.name}",
        stdin="\n".join(lines) + "\n",
    )


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def _mounts_below(scratch: Path) -> list[Path]:
    places = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place.is_relative_to(scratch)]
