"""What Docker and ssh have in common: agents on machines, which need nobody, and a watcher on this one."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from launcher.errors import Problem, Refused
from launcher.executors.base import JobRef
from launcher.executors.places import places_of
from launcher.executors.watch_lock import watcher_of
from launcher.planning.plan import Plan
from launcher.runs.observed import Observation
from launcher.runs.rundir import RunDir

_ASK_EVERY_S = 0.5
"""How often the machines are asked, where no watcher knows."""
_UNKNOWN = Observation(alive=None)


class HostedExecutor:
    """An executor whose nodes are in `places`. A job is named by the machine that it was launched on, and its run."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, Observation]] = {}

    def check(self, plan: Plan) -> Sequence[Problem]:
        """Why this plan cannot run here."""
        raise NotImplementedError

    def warm(self, run_dir: Path) -> None:
        """The agents are started elsewhere."""

    def drop(self) -> None:
        """Nothing was begun."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Start the watcher, which starts the nodes. Raises Refused with the reason why it could not.

        `attached` is no matter: nothing of the run ends with this process.
        """
        start_watcher(run, first=True)
        return JobRef(self.name, f"{socket.gethostname()}:{run.path}")

    def observe(self, ref: JobRef) -> Observation:
        """Whether the watcher lives, else whether any node does."""
        try:
            host, run = _parse(ref)
        except ValueError:
            return Observation(alive=None, detail=f"{ref} is no job of this place")
        if host == socket.gethostname() and watcher_of(run) is not None:
            return Observation(alive=True)
        asked_s, seen = self._said.get(ref.ident, (-math.inf, _UNKNOWN))
        if time.monotonic() - asked_s >= _ASK_EVERY_S:
            seen = self._ask(host, run)
            self._said[ref.ident] = time.monotonic(), seen
        return seen

    def _ask(self, host: str, run: RunDir) -> Observation:
        """What the nodes say, where no watcher of this machine does."""
        try:
            plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Observation(alive=None, detail=f"{run.plan} cannot be read here")
        if plan.hosts is None or plan.executor != self.name:
            return Observation(alive=False)  # it was resumed elsewhere since
        if host != socket.gethostname() and not all(node.machine for node in plan.hosts.nodes):
            return Observation(alive=None, detail=f"it runs on {host}, this is {socket.gethostname()}")
        states = places_of(plan, run).states([node.index for node in plan.nodes]).values()
        if any(state.alive for state in states):
            return Observation(alive=True, detail=f"nobody watches it: launch watch {run.run_id}")
        unknown = next((state.detail for state in states if state.alive is None), None)
        if unknown and not run.result.exists():  # else it is over, whatever a machine that is away would say
            return Observation(alive=None, detail=unknown)
        return Observation(alive=False)

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        """One question each."""
        return {ref: self.observe(ref) for ref in refs}

    def cancel(self, ref: JobRef, *, signum: int, again: bool = False) -> bool:
        """Signal the watcher, which passes it on; without one, the agents themselves."""
        try:
            host, run = _parse(ref)
        except ValueError:
            return False
        if host == socket.gethostname() and (pid := watcher_of(run)) is not None:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                return False
            return True
        if self.observe(ref).alive is not True:
            return False
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
        places = places_of(plan, run)
        reached = [places.signal(node.index, signum) for node in plan.nodes]
        return any(reached)


def start_watcher(run: RunDir, *, first: bool) -> None:
    """Start the watcher of a run, a process of its own session. first: it starts the nodes, too.

    Raises Refused where it, or a node, cannot start; then nothing of the run is left on its machines.
    """
    run.agents_log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-P", "-m", "launcher.executors.watch", str(run.path), *(["--start"] if first else [])]
    with run.agents_log.open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log.fileno(),
            start_new_session=True,
            env={**os.environ, "LAUNCH_RUN_ID": run.run_id},
        )
    assert process.stdout is not None
    with process.stdout as answer:
        said = answer.readline()
    if not said:
        code = process.wait()
        message = f"the watcher of the run ended with exit code {code} before it had started anything"
        raise Refused([Problem(where=run.run_id, message=message, hint=_last_line(run))])
    word = json.loads(said)
    if problems := word.get("problems"):
        process.wait()
        raise Refused([Problem(**problem) for problem in problems])


def _last_line(run: RunDir) -> str:
    lines = run.agents_log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else ""


def _parse(ref: JobRef) -> tuple[str, RunDir]:
    host, _, path = ref.ident.partition(":")
    if not path.startswith("/"):
        raise ValueError(ref.ident)
    return host, RunDir(Path(path))
