"""A machine that is reached by the system's OpenSSH: with the user's own config, keys, agent and jump hosts.

Host keys are checked as the user's config says; nothing here makes that weaker. Who speaks with a machine for long
keeps the connection, by a master of ssh in a private folder: a login takes several times longer than a command.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from launcher.executors.machines import Done, Unreachable
from launcher.planning import calls
from launcher.planning.ssh import ssh_argv

CONNECT_S = 10
"""How long a machine may take to answer to a new connection."""
_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",  # banners are not answers
    # What the user's config may ask for when a person logs in, and what would be in the way of a command.
    "ClearAllForwardings": "yes",
    "ForwardX11": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
_ALONE = [("ControlMaster", "no"), ("ControlPath", "none")]
"""A connection for one command."""
_PERSIST_S = 20
"""How long a kept connection waits for the next command. A process of ours that ends in order ends it at once."""
_MOST_BYTES = 100
"""Of the path of a socket, as far as every system takes it."""
_FAILED = 255
"""Exit code of ssh itself."""
_REASONS = (
    (
        r"Permission denied",
        "it does not let you in: {said}",
        "`{line} true` has to work without a password: a key it knows, in your agent or as IdentityFile in your config",
    ),
    (r"Could not resolve hostname", "there is no such machine: {said}", "a name of your ssh config, or of DNS"),
    (r"Connection refused", "nothing listens there: {said}", "is sshd started, and is it the right Port?"),
    (
        r"timed out|No route to host|Network is unreachable",
        "it does not answer: {said}",
        "is it switched on, and does a firewall let ssh through?",
    ),
    (
        r"IDENTIFICATION HAS CHANGED",
        "its host key is another one than before: it was set up anew, or somebody is in between",
        "where you know that it was set up anew: `ssh-keygen -R {name}`, then `{line}` once by hand",
    ),
    (
        r"Host key verification failed|No \w+ host key is known",
        "its host key is not known here",
        "`{line}` once by hand, and compare the key; `StrictHostKeyChecking accept-new` in your config takes new ones",
    ),
)


class SshMachine:
    """A machine by its ssh destination: a name of the user's config, a host name, an address, `user@host`.

    config: a file in place of `~/.ssh/config`. keeps: whether this process keeps the connection; one that does ends by
    sys.exit, or calls `close_connections`.
    """

    def __init__(self, name: str, *, config: str | None = None, keeps: bool = False) -> None:
        self._name, self._config, self.keeps = name, config, keeps

    @property
    def name(self) -> str:
        """The destination."""
        return self._name

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002 - as subprocess
        source: IO[bytes] | None = None,
        target: IO[bytes] | None = None,
        timeout_s: float,
    ) -> Done:
        """Run a command there, by the login shell, which gets it quoted. Raises Unreachable.

        source: a file in place of `input`, target: one for the output; what is large need not be in memory.
        """
        options = [*_OPTIONS.items(), *(_kept(self._name, self._config) if self.keeps else _ALONE)]
        command = ssh_argv(self._name, argv, config=self._config, options=[f"{key}={value}" for key, value in options])
        # Not a pipe: the process that keeps the connection has it, too, with an older OpenSSH.
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if source is None else source,
                    stdout=subprocess.PIPE if target is None else target,
                    stderr=errors,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise Unreachable("there is no `ssh` on this machine", "install OpenSSH's client") from None
            try:
                out, _ = calls.answer(process, limit_s=timeout_s, told=None if source is not None else input)
            except subprocess.TimeoutExpired:
                sentence = f"{self._name}: it has not answered within {timeout_s:.0f} s"
                raise Unreachable(sentence, "is it switched on, and not out of memory or of processes?") from None
            except KeyboardInterrupt:
                calls.end(process)
                raise
            errors.seek(0)
            err = errors.read()
        if process.returncode == _FAILED:
            raise self._unreachable(err.decode(errors="replace"))
        return Done(process.returncode if process.returncode >= 0 else 128 - process.returncode, out or b"", err)

    def _unreachable(self, said: str) -> Unreachable:
        lines = [line.strip().removeprefix("ssh: ") for line in said.splitlines() if line.strip()]
        fill = {"said": lines[-1] if lines else "ssh says nothing", "name": self._name, "line": self._by_hand()}
        for pattern, message, hint in _REASONS:
            if re.search(pattern, said):
                return Unreachable(f"{self._name}: {message.format(**fill)}", hint.format(**fill))
        return Unreachable(f"{self._name}: no connection: {fill['said']}", f"try `{fill['line']} true` by hand")

    def _by_hand(self) -> str:
        return " ".join(ssh_argv(self._name, (), config=self._config))


_masters: set[tuple[int, Path, str]] = set()
"""Sockets of kept connections, each with the process that it is of, and its destination."""


def _kept(name: str, config: str | None) -> list[tuple[str, str]]:
    """Options that keep the connection of this process. None where there is no private place for its socket."""
    folder = _private_folder()
    # Not ssh's own %C: that is the same for another config, which may mean another key or another machine.
    mark = hashlib.sha256(f"{name}\0{config}".encode()).hexdigest()[:16]
    path = None if folder is None else folder / f"{os.getpid()}-{mark}"
    if path is None or len(os.fsencode(path)) > _MOST_BYTES - 20:  # ssh makes it under a longer name, first
        return _ALONE
    if not _masters:
        atexit.register(close_connections)
    _masters.add((os.getpid(), path, name))
    return [("ControlMaster", "auto"), ("ControlPath", str(path)), ("ControlPersist", str(_PERSIST_S))]


def close_connections() -> None:
    """End the connections that this process has kept."""
    for pid, path, name in list(_masters):
        _masters.discard((pid, path, name))
        if pid == os.getpid() and path.exists():
            argv = ["ssh", "-F", "none", "-o", f"ControlPath={path}", "-O", "exit", "--", name]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it ends by itself, some seconds later
                calls.run(argv, limit_s=5.0)


def _private_folder() -> Path | None:
    """Of this user alone. None where the place is somebody else's, or cannot be made."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"launch-ssh-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_ours else None
