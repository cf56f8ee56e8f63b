"""Run directories of hosts that do not share a file system with this machine: what they need is sent there before the
start, and what is new there comes home, while it runs and at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.agent import home
from launcher.agent.home import Frame, checkpoint_of, checkpoints_of, checksum, files_of, grows
from launcher.errors import RecipeError
from launcher.executors.machines import Unreachable
from launcher.runs.checkpoints import find_checkpoint

if TYPE_CHECKING:
    from launcher.executors.ssh_machine import SshMachine
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_LIMIT_S = 30.0
_TRAVEL_LIMIT_S = 3600.0
"""A checkpoint of a large model over a slow line."""
CONSOLE = "logs/console.log"
"""Every agent writes one, and at home there is one of all: whose bytes are in it already is written down."""
_WITH_CHECKPOINT = (0, 1)
"""Nodes that are given what a resume goes on from: the first, and the one that has the second copy."""
_COMING = ".tmp-home-"
"""Of the name of a checkpoint that is not whole; the node follows: two may send the same one at a time."""
_SEES = '[ -e "$1" ] && echo yes; exit 0'
_UNPACK = """
mkdir -p "${1%/*}" && umask 077 && mkdir -p "$1/checkpoints" "$1/logs" && cd "$1" && exec tar -xpf -
"""
_MARK = '[ -d "$1" ] || exit 0; ( : >"$1/$2" ) 2>/dev/null && echo made || echo "cannot be made"'
_REMOVE = 'rm -rf -- "$1"'


class Home:
    """The way between this run directory and those of the hosts."""

    def __init__(self, plan: Plan, run: RunDir, machines: Sequence[SshMachine]) -> None:
        self._plan, self._run, self._machines = plan, run, machines
        self._shared: dict[int, bool] = {}
        self._is_home: dict[int, bool] = {}

    def shares(self, node: int) -> bool:
        """Whether a host sees this very run directory: it finds a file that is written here now. Raises Unreachable."""
        if node not in self._shared:
            mark = self._run.path / f".{secrets.token_hex(8)}"
            mark.touch()
            try:
                done = self._machines[node].run(("sh", "-c", _SEES, "launch", str(mark)), timeout_s=_LIMIT_S)
            finally:
                mark.unlink(missing_ok=True)
            self._shared[node] = done.text == "yes"
        return self._shared[node]

    def send(self, node: int) -> str:
        """Copy what a node needs. Returns why not, empty where it is there. Raises Unreachable."""
        if self.shares(node):
            return ""
        names = list(self._needed(node))
        with tempfile.TemporaryFile() as errors:
            packing = subprocess.Popen(
                ["tar", "-C", str(self._run.path), "-cf", "-", "--", *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            assert packing.stdout is not None
            argv = ("sh", "-c", _UNPACK, "launch", str(self._run.path))
            try:
                done = self._machines[node].run(argv, source=packing.stdout, timeout_s=_TRAVEL_LIMIT_S)
            finally:
                packing.stdout.close()
                code = packing.wait()
            if code and not done.code:
                errors.seek(0)
                return errors.read().decode(errors="replace").strip() or "tar has failed here"
        if done.code:
            return done.words or f"exit code {done.code}"
        (self._run.hosts / f"console-{node}").unlink(missing_ok=True)  # its console begins anew there
        return ""

    def fetch(self, node: int) -> bool:
        """Bring home what is new. False: the host does not answer, or does not say it to the end."""
        try:
            if self.shares(node):
                return True
            with tempfile.TemporaryFile(dir=self._run.path) as spool:
                python = self._plan.worker.python
                argv = (python, "-P", str(self._run.agent_start), home.FLAG, "--run-dir", str(self._run.path))
                asked = json.dumps(self._known(node)).encode()
                done = self._machines[node].run(argv, input=asked, target=spool, timeout_s=_TRAVEL_LIMIT_S)
                spool.seek(0)
                self._is_home[node] = done.code == 0 and self._take(node, spool)
        except Unreachable:
            return False
        except OSError as error:  # of this machine: its disk is full. Nothing is lost, it is fetched again
            print(f"launch: node {node}: the run does not come home: {error}", file=sys.stderr, flush=True)
            return False
        return self._is_home[node]

    def forget(self, node: int, *, unused: bool = False) -> bool:
        """Remove the run directory of a host, when all of it is home or it was not used. False: it is still there."""
        try:
            self._shared.pop(node, None)
            if self.shares(node):
                return True
            if not unused and not self._is_home.get(node, False):
                return False
            # Proved the other way round, too, since what is removed cannot be had back.
            mark = f".{secrets.token_hex(8)}"
            made = self._machines[node].run(
                ("sh", "-c", _MARK, "launch", str(self._run.path), mark), timeout_s=_LIMIT_S
            )
            if not made.text:
                return True  # it is gone
            # Where nothing can be written any more it is a full disk, and not this one: here a file was made just now.
            if (self._run.path / mark).exists():
                (self._run.path / mark).unlink()
                return True
            argv = ("sh", "-c", _REMOVE, "launch", str(self._run.path))
            return self._machines[node].run(argv, timeout_s=_LIMIT_S * 4).code == 0
        except Unreachable:
            return False

    def _needed(self, node: int) -> Iterator[str]:
        """Names in the run directory: all but logs, and what only the newest checkpoint and the best are needed of."""
        for path in sorted(self._run.path.iterdir()):
            if path.name not in ("logs", "hosts", "checkpoints", "devices", home.RESULT) and path.name[:1] != ".":
                yield path.name
        for which in ("latest", "best") if node in _WITH_CHECKPOINT else ():
            with contextlib.suppress(RecipeError):  # there is none
                path = find_checkpoint(self._run, which)
                if path.parent == self._run.checkpoints:
                    yield f"checkpoints/{path.name}"

    def _known(self, node: int) -> dict[str, tuple[int, int, int | None]]:
        """What is here already. Of the console the bytes that came from this node."""
        known: dict[str, tuple[int, int, int | None]] = {}
        for path in files_of(self._run.path):
            found = (self._run.path / path).stat()
            mark = checksum(self._run.path / path, found.st_size) if grows(path) else None
            known[path] = found.st_size, found.st_mtime_ns, mark
        known[CONSOLE] = self._console_of(node), 0, None
        return known

    def _take(self, node: int, spool: IO[bytes]) -> bool:
        """Write the frames of an answer where they belong. False: it ends too early."""
        while line := spool.readline():
            raw = json.loads(line)
            if raw.get("end"):
                self._settle_checkpoints(node, raw["checkpoints"])
                return True
            frame = Frame(**raw)
            if frame.path == home.METRICS and node:
                spool.seek(frame.size, os.SEEK_CUR)  # a copy that it was given: rank 0 writes them
            else:
                self._write(node, frame, spool)
        return False

    def _write(self, node: int, frame: Frame, spool: IO[bytes]) -> None:
        target = self._run.path / frame.path
        step = checkpoint_of(frame.path)
        if step is not None:  # it is not there before it is whole
            coming = self._run.checkpoints / f"{step}{_COMING}{node}"
            target = coming / Path(frame.path).relative_to("checkpoints", step)
        if not target.resolve().is_relative_to(self._run.path.resolve()):
            raise ValueError(f"a path of another folder: {frame.path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if frame.path == CONSOLE:
            with target.open("ab") as file:
                _copy(spool, file, frame.size)
            self._note_console(node, frame.offset + frame.size)
        elif frame.offset:
            with target.open("r+b") as file:
                file.seek(frame.offset)
                _copy(spool, file, frame.size)
        else:
            new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            with new.open("wb") as file:
                _copy(spool, file, frame.size)
            new.chmod(frame.mode)
            os.utime(new, ns=(frame.mtime_ns, frame.mtime_ns))
            new.rename(target)

    def _settle_checkpoints(self, node: int, whole: Sequence[str]) -> None:
        """Those that came are there now, those that the host has removed since are not."""
        for name in whole:
            coming = self._run.checkpoints / f"{name}{_COMING}{node}"
            if coming.is_dir() and not (self._run.checkpoints / name).exists():
                with contextlib.suppress(OSError):  # another node's copy of it was first
                    coming.rename(self._run.checkpoints / name)
        for path in self._run.checkpoints.glob(f"*{_COMING}{node}"):
            shutil.rmtree(path, ignore_errors=True)
        newest = max(map(_step_of, whole), default=-1)
        for name in checkpoints_of(self._run.path):
            if name not in whole and _step_of(name) < newest:
                gone = self._run.checkpoints / f"{name}{_COMING}{node}"
                with contextlib.suppress(FileNotFoundError):  # it is being removed already
                    (self._run.checkpoints / name).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _console_of(self, node: int) -> int:
        path = self._run.hosts / f"console-{node}"
        return int(path.read_text(encoding="ascii")) if path.exists() else 0

    def _note_console(self, node: int, size: int) -> None:
        self._run.hosts.mkdir(exist_ok=True)
        (self._run.hosts / f"console-{node}").write_text(str(size), encoding="ascii")


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    left = size
    while left:
        data = source.read(min(left, 1 << 20))
        if not data:
            raise EOFError("the answer of a host ends in the middle of a file")
        target.write(data)
        left -= len(data)
