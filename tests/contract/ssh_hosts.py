"""Machines as in `hosts.py`, each with an sshd of its own; and one more, without, that `launch` is called on.

What is called there is in its network alone: files and processes are those of the test itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from hosts import Bed, Host
from launched import LIMIT_S

_LOOK_EVERY_S = 0.02
_SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key_{name}
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
"""
_CONFIG = """\
Host {names}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  User root
"""
_RUN = 'mount -t tmpfs tmpfs /run; mkdir -p /run/sshd; exec /usr/sbin/sshd -D -e -f "$0"'
"""sshd wants its folder, which a machine that never started it does not have."""


class SshBed:
    """So many machines with sshd, and `caller` with none."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.bed = Bed(folder, count + 1)
        self.hosts, self.caller = self.bed.hosts[:count], self.bed.hosts[count]
        self.config = folder / "ssh_config"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._set_up()
        except BaseException:
            self.remove()
            raise

    def _set_up(self) -> None:
        make_key(self.folder / "key")
        known = []
        for host in self.hosts:
            key = make_key(self.folder / f"host_key_{host.name}")
            known.append(f"{host.name} {key.with_suffix('.pub').read_text()}")
            fill = {"address": host.address, "folder": self.folder, "name": host.name}
            (self.folder / f"sshd_{host.name}").write_text(_SSHD.format(**fill))
            self.start_sshd(host)
        (self.folder / "known_hosts").write_text("".join(known))
        # Names are those of the machines alone: where the test is they mean nothing.
        lines = [_CONFIG.format(names=" ".join(host.name for host in self.hosts), folder=self.folder)]
        lines += [f"Host {host.name}\n  HostName {host.address}\n  HostKeyAlias {host.name}\n" for host in self.hosts]
        self.config.write_text("".join(lines))

    def start_sshd(self, host: Host) -> None:
        """Let a machine take logins, and wait until it does."""
        config = self.folder / f"sshd_{host.name}"
        self._sshds[host.name] = host.start(
            ["sh", "-c", _RUN, str(config)], env={}, output=self.folder / f"sshd_{host.name}.log"
        )
        deadline_s = time.monotonic() + LIMIT_S
        while 22 not in host.listening():
            assert time.monotonic() < deadline_s, (self.folder / f"sshd_{host.name}.log").read_text()
            time.sleep(_LOOK_EVERY_S)

    def stop_sshd(self, host: Host) -> None:
        """Nothing listens on its port any more; who is logged in stays."""
        for inner in host.pids():
            with contextlib.suppress(OSError):
                if b"-D\0-e" in (Path("/proc") / str(host.pids()[inner]) / "cmdline").read_bytes():
                    host.signal(inner, 15)
        self._sshds.pop(host.name).wait(LIMIT_S)

    def own_disk(self, path: Path) -> None:
        """Each machine, but the caller, gets a file system of its own there: nothing is shared below."""
        for host in self.hosts:
            command = host.inside("sh", "-ec", 'mkdir -p "$0"; mount -t tmpfs -o size=512m tmpfs "$0"', str(path))
            subprocess.run(command, check=True)

    def calling(self) -> tuple[str, ...]:
        """What makes a command one that is called on the caller's machine."""
        return ("nsenter", "-t", str(self.caller.init), "-n", "-u", "--")

    def remove(self) -> None:
        """Switch everything off."""
        self.bed.remove()


def make_key(path: Path) -> Path:
    """A pair of keys without a password."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a test's own", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def has_sshd() -> bool:
    """Whether both ends of OpenSSH are installed."""
    return shutil.which("ssh") is not None and os.access("/usr/sbin/sshd", os.X_OK)


class MakeSshBed(Protocol):
    """`make_ssh_bed(2)`."""

    def __call__(self, count: int) -> SshBed: ...


@pytest.fixture
def make_ssh_bed(tmp_path: Path) -> Iterator[MakeSshBed]:
    """`make_ssh_bed(2)`: so many machines that take logins, on one network with the caller."""
    beds: list[SshBed] = []

    def make(count: int) -> SshBed:
        folder = tmp_path / f"ssh{len(beds)}"
        folder.mkdir()
        beds.append(SshBed(folder, count))
        return beds[-1]

    yield make
    for bed in beds:
        bed.remove()
