"""Asks the hosts of `ssh.hosts`, all at once, one round trip each. What keeps a run from them is told together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import Problem, Refused
from launcher.executors.machines import Unreachable
from launcher.executors.ssh_machine import SshMachine
from launcher.planning.ssh_facts import SshHost, ask_argv, ssh_host
from launcher.wording import size

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe

_LIMIT_S = 60.0
_MOST_AT_ONCE = 32
_NEEDED_BYTES = 100 << 20
_MAKE = """
folder=$1
while [ -n "$folder" ] && [ ! -d "$folder" ]; do folder=${folder%/*}; done
: >"$folder/$2" && echo "$folder/$2"
"""


def ask_hosts(
    recipe: Recipe, *, python: str, workdir: str, root: Path, destinations: Sequence[str] | None = None
) -> tuple[SshHost, ...]:
    """What is true on the hosts that the recipe needs. root: where run directories are made, here as there.

    destinations: other ones than `ssh.hosts`, whose workers run in an image: their own Python has to have nothing.

    Raises Refused with every reason why one of them will not do. Leaves nothing behind, here or there.
    """
    kind = "image" if destinations is not None else "script" if recipe.is_script else "job"
    destinations = (recipe.ssh.hosts if destinations is None else destinations)[: recipe.resources.max_nodes]
    with _token(root) as token:
        argv = ask_argv(token=str(token), python=python, kind=kind, workdir=workdir, folder=str(root))

        def ask(destination: str) -> SshHost | Problem:
            return _ask(destination, argv, config=recipe.ssh.config, python=python)

        with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(destinations)))) as pool:
            found = list(pool.map(ask, destinations))
    hosts = [host for host in found if isinstance(host, SshHost)]
    problems = [each for each in found if isinstance(each, Problem)]
    problems += [problem for host in hosts for problem in _problems(host, root)]
    if problems:
        raise Refused(problems)
    if len(hosts) < 2 or all(host.shared for host in hosts):
        return tuple(hosts)
    return (hosts[0], *_compared(hosts, config=recipe.ssh.config, root=root))


def _compared(hosts: Sequence[SshHost], *, config: str | None, root: Path) -> Iterator[SshHost]:
    """The hosts but the first, with whether they see its folder of runs: by a file that is written there now."""
    name = f".launch-{secrets.token_hex(8)}"
    machines = [SshMachine(host.destination, config=config) for host in hosts]
    try:
        token = machines[0].run(("sh", "-c", _MAKE, "launch", str(root), name), timeout_s=_LIMIT_S).text
        try:
            for host, machine in zip(hosts[1:], machines[1:], strict=True):
                done = machine.run(("test", "-e", token), timeout_s=_LIMIT_S)
                yield dataclasses.replace(host, sees_first=bool(token) and done.code == 0)
        finally:
            if token:
                machines[0].run(("rm", "-f", "--", token), timeout_s=_LIMIT_S)
    except Unreachable as error:
        raise Refused([Problem(where="ssh.hosts", message=error.sentence, hint=error.hint)]) from error


def _ask(destination: str, argv: Sequence[str], *, config: str | None, python: str) -> SshHost | Problem:
    asked_s = time.time()
    try:
        done = SshMachine(destination, config=config).run(argv, timeout_s=_LIMIT_S)
    except Unreachable as error:
        return Problem(where="ssh.hosts", message=error.sentence, hint=error.hint)
    text = done.out.decode(errors="replace")
    try:
        return ssh_host(destination, text, python=python, asked_s=asked_s, answered_s=time.time())
    except ValueError as error:
        message = f"{destination}: {error}: {done.words}" if done.words else f"{destination}: {error}"
        return Problem(where="ssh.hosts", message=message, hint="a host needs a POSIX shell, and Linux")


def _problems(host: SshHost, root: Path) -> Iterator[Problem]:
    name = host.destination
    elsewhere = "`ssh.python` names the interpreter of the hosts, the same path on each"
    if host.python_fault:
        message = f"{name}: {host.python} cannot be run there: {host.python_fault}"
        yield Problem(where="ssh.python", message=message, hint=elsewhere)
    elif host.missing:
        message = f"{name}: {', '.join(host.missing)}: not installed for {host.python} (Python {host.python_version})"
        hint = f"{host.python} -m pip install {' '.join(host.missing)}, on {name}; or {elsewhere}"
        yield Problem(where="ssh.python", message=message, hint=hint)
    space = next((space for space in host.facts.spaces if space.path == str(root)), None)
    other = "another place for runs, the same path here and on each host: --runs-dir DIR, or `runs_dir`"
    if space is not None and not space.is_writable:
        message = f"{name}: the run directory cannot be made there: {root} cannot be written"
        yield Problem(where="runs_dir", message=message, hint=other)
    elif space is not None and space.free_bytes < _NEEDED_BYTES:
        message = f"{name}: {size(space.free_bytes)} are free for {root}, and a run needs {size(_NEEDED_BYTES)}"
        yield Problem(where="runs_dir", message=message, hint=other)


@contextmanager
def _token(root: Path) -> Iterator[Path]:
    """A file beside the runs, while it is looked for elsewhere. None can be written: no host sees it."""
    folder = next(path for path in (root, *root.parents) if path.is_dir())
    token = folder / f".launch-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        os.close(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)
