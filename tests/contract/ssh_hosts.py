"""Machines as in `hosts.py`, each with an sshd of its own; and one more, without, that `launch` is called on.

What is called there is in its network alone: files and processes are those of the test itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hosts import Bed, Host
from launched import LAUNCH, LIMIT_S
from sshd import SSHD

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
SetEnv HOME={folder}/home
"""
"""A home of its own: what the shell of this machine's user does at a login may take long, and is not ours to test."""
_CONFIG = """\
Host {names}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  User root
"""
_RUN = f'mount -t tmpfs tmpfs /run; mkdir -p /run/sshd; exec {SSHD} -D -e -f "$0"'
"""sshd wants its folder, which a machine that never started it does not have."""


class SshBed:
    """So many machines with sshd, and `caller` with none."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.bed = Bed(folder, count + 1)
        self.hosts, self.caller = self.bed.hosts[:count], self.bed.hosts[count]
        self.config, self.profile = folder / "ssh_config", folder / "lab.yaml"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._set_up()
        except BaseException:
            self.remove()
            raise

    def _set_up(self) -> None:
        (self.folder / "home").mkdir()
        make_key(self.folder / "key")
        known = []
        for host in self.hosts:
            key = make_key(self.folder / f"host_key_{host.name}")
            known.append(f"{host.name} {key.with_suffix('.pub').read_text()}")
            fill = {"address": host.address, "folder": self.folder, "name": host.name}
            (self.folder / f"sshd_{host.name}").write_text(_SSHD.format(**fill))
            self.start_sshd(host)
        (self.folder / "known_hosts").write_text("".join(known))
        self.config.write_text(self.config_text())
        self.write_profile()

    def config_text(self, *, extra: Callable[[Host], str] = lambda host: "") -> str:
        """Of ssh: what is known of each machine, by its name. extra: further lines of a machine."""
        lines = [_CONFIG.format(names=" ".join(host.name for host in self.hosts), folder=self.folder)]
        for host in self.hosts:
            lines.append(f"Host {host.name}\n  HostName {host.address}\n  HostKeyAlias {host.name}\n{extra(host)}")
        return "".join(lines)

    def write_profile(self, *, hosts: Sequence[str] = (), **keys: str) -> Path:
        """The profile of these machines, with these keys of `ssh`."""
        section = {"hosts": list(hosts) or [host.name for host in self.hosts], "config": str(self.config), **keys}
        self.profile.write_text(json.dumps({"executor": "ssh", "ssh": section}))  # JSON is YAML
        return self.profile

    def config_from_outside(self) -> Path:
        """A config for processes that are not in this network: they come to each machine by a tunnel."""
        tunnel = self.folder / "tunnel.py"
        tunnel.write_text(_TUNNEL)
        config = self.folder / "ssh_config_outside"
        way = f"nsenter -t {self.caller.init} -n -- {sys.executable} {tunnel}"
        config.write_text(self.config_text(extra=lambda host: f"  ProxyCommand {way} {host.address} 22\n"))
        return config

    def start_sshd(self, host: Host) -> None:
        """Let a machine take logins, and wait until it does."""
        config, log = self.folder / f"sshd_{host.name}", self.folder / f"sshd_{host.name}.log"
        self._sshds[host.name] = host.start(["sh", "-c", _RUN, str(config)], env={}, output=log)
        deadline_s = time.monotonic() + LIMIT_S
        while 22 not in host.listening():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(_LOOK_EVERY_S)

    def stop_sshd(self, host: Host) -> None:
        """Nothing listens on its port any more; who is logged in stays."""
        for pid in host.pids().values():
            with contextlib.suppress(OSError):
                if b"sshd -D -e" in (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" "):
                    os.kill(pid, 15)
        self._sshds.pop(host.name).wait(LIMIT_S)

    def own_disk(self, path: Path) -> None:
        """Each machine, but the caller, gets a file system of its own there: nothing is shared below."""
        for host in self.hosts:
            self.on(host, "sh", "-ec", 'mkdir -p "$0"; mount -t tmpfs -o size=512m tmpfs "$0"', str(path))

    def on(self, host: Host, *argv: str) -> str:
        """What a command says that is run on a machine, not by ssh."""
        return subprocess.run(host.inside(*argv), check=True, capture_output=True, text=True).stdout

    def calling(self) -> tuple[str, ...]:
        """What makes a command one that is called on the caller's machine."""
        return ("nsenter", "-t", str(self.caller.init), "-n", "--")

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `launch` there, to its end."""
        return subprocess.run(
            [*self.calling(), LAUNCH, *arguments],
            cwd=self.folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def busy(self, host: Host) -> list[str]:
        """The command lines of what runs on a machine, but for its sshd and who is logged in."""
        lines = []
        for pid in host.pids().values():
            with contextlib.suppress(OSError):
                line = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                lines.append(line)
        return [line for line in lines if line and not line.startswith(("sshd", SSHD))]

    def remove(self) -> None:
        """Switch everything off."""
        self.bed.remove()


_TUNNEL = """
import os, select, socket, sys
other = socket.create_connection((sys.argv[1], int(sys.argv[2])))
ways = {0: other.sendall, other.fileno(): lambda data: os.write(1, data)}
while True:
    for readable in select.select(list(ways), [], [])[0]:
        data = os.read(readable, 65536)
        if not data:
            sys.exit()
        ways[readable](data)
"""


def make_key(path: Path) -> Path:
    """A pair of keys without a password."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a test's own", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


MakeSshBed = Callable[[int], SshBed]


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
