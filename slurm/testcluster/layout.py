"""Where everything of the test cluster is, and what its machines are called."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LINK = "launch-slurm"
"""The one thing outside the scratch folder: this machine's end of the cable. Its alias says where the scratch is."""
NETWORK = "198.18.77"
LOGIN_ADDRESS = f"{NETWORK}.1"
MAX_NODES = 16
SOCKET_PATH_BYTES = 107
_RECORD = "cluster.json"


class ClusterError(Exception):
    """A sentence for the user: what is wrong, and what to do."""


class Host(NamedTuple):
    """A machine of the cluster."""

    name: str
    address: str


@dataclass(frozen=True)
class Cluster:
    """One test cluster: its scratch folder and what it was started with."""

    scratch: Path
    nodes: int = 4
    accounting: bool = True
    max_array_size: int = 1001
    """SLURM's own default. An array has at most one task less."""

    @property
    def controller(self) -> Host:
        """The machine of slurmctld, of slurmdbd and of the database."""
        return Host("ctl", f"{NETWORK}.10")

    @property
    def node_hosts(self) -> list[Host]:
        """The machines that jobs run on."""
        return [Host(f"n{number}", f"{NETWORK}.{10 + number}") for number in range(1, self.nodes + 1)]

    @property
    def hosts(self) -> list[Host]:
        """Every machine."""
        return [self.controller, *self.node_hosts]

    @property
    def config(self) -> Path:
        """What SLURM_CONF has to say."""
        return self.scratch / "etc" / "slurm.conf"

    @property
    def hosts_file(self) -> Path:
        """What the machines see as /etc/hosts."""
        return self.scratch / "etc" / "hosts"

    @property
    def munge_socket(self) -> Path:
        """Where clients prove who they are."""
        return self.scratch / "munge" / "socket"

    @property
    def database_socket(self) -> Path:
        """Where slurmdbd finds the database."""
        return self.scratch / "db" / "socket"

    def namespace(self, host: Host) -> Path:
        """The file that holds the network namespace of a machine."""
        return self.scratch / "net" / host.name

    def log(self, daemon: str) -> Path:
        """What a daemon of SLURM writes."""
        return self.scratch / "log" / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """What any daemon prints, before it has a log among it."""
        return self.scratch / "log" / f"{daemon}.out"

    def write_record(self) -> None:
        """Mark the scratch folder as ours."""
        (self.scratch / _RECORD).write_text(json.dumps(dataclasses.asdict(self), default=str))


def default_scratch() -> Path:
    """Where a cluster goes that was given no folder: below TMPDIR, named after the user."""
    return Path(tempfile.gettempdir()) / f"launch-slurm-{pwd.getpwuid(os.geteuid()).pw_name}"


def running_scratch() -> Path | None:
    """The scratch folder of the cluster that is up (or half up) on this machine."""
    try:
        alias = Path(f"/sys/class/net/{LINK}/ifalias").read_text().strip()
    except FileNotFoundError:
        return None
    return Path(alias) if alias else default_scratch()


def read_record(scratch: Path) -> Cluster | None:
    """The cluster that a scratch folder belongs to; None where it is not there, or empty.

    What is not ours is never used, nor removed later: a folder of another user's may hold anything.
    """
    if not scratch.is_symlink() and not scratch.exists():
        return None
    if scratch.is_symlink() or not scratch.is_dir() or scratch.stat().st_uid not in (0, os.geteuid()):
        raise ClusterError(f"{scratch} is not a folder of yours or root's; name another one with --scratch")
    try:
        said = json.loads((scratch / _RECORD).read_text())
    except FileNotFoundError:
        if any(scratch.iterdir()):
            raise ClusterError(
                f"{scratch} holds other things than a test cluster ({_RECORD} is not there); "
                "remove it, or name a folder that does not exist yet with --scratch"
            ) from None
        return None
    return Cluster(**{**said, "scratch": scratch})
