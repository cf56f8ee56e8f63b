"""The containers of one run: see `places.py`. By the docker CLI of each machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, Refused
from launcher.executors.docker_words import refusal
from launcher.executors.machines import Done, Machine, ThisMachine, Unreachable
from launcher.executors.places import NodeState
from launcher.executors.ssh_home import Home
from launcher.executors.ssh_machine import SshMachine
from launcher.executors.watch_lock import watcher_of
from launcher.planning.docker import (
    FOLDER_LABEL,
    RUN_LABEL,
    SECRETS_FILE,
    SECRETS_FOLDER,
    USER_LABEL,
    network_of,
    secrets_folder,
)
from launcher.runs.rundir import RunDir
from launcher.runs.states import is_signal
from launcher.wording import signal_name

if TYPE_CHECKING:
    from launcher.planning.plan import HostNode, Plan

ASK_S = 30.0
START_S = 180.0
PULL_S = 3600.0
_LISTED = '[{{json .Names}}, {{json .State}}, {{json (.Label "%s")}}, {{json (.Label "%s")}}]'
_STATE = "{{json .Name}} {{json .State}}"
_WITH_THE_ENGINE = 255
_KILLED = (128 + signal.SIGKILL, _WITH_THE_ENGINE)
_WORDS_LINES = "40"


class DockerPlaces:
    """One container per node. Implements `places.Places`."""

    def __init__(self, plan: Plan, run: RunDir) -> None:
        assert plan.hosts is not None
        self._plan, self._hosts, self._run = plan, plan.hosts, run
        config = (plan.recipe.get("ssh") or {}).get("config")
        far = [SshMachine(node.machine, config=config) for node in plan.hosts.nodes if node.machine]
        self._machines: dict[str, Machine] = {"": ThisMachine(), **{machine.name: machine for machine in far}}
        self._home = Home(plan, run, far) if far else None

    def prepare(self) -> None:
        """Fetch the image, make the network. What runs of this user have left whose watcher was killed is removed."""
        if self._home is None:
            sweep(ThisMachine())
        elif faults := [fault for node in self._hosts_range() if (fault := self._send(self._home, node)) is not None]:
            self.clear()
            raise Refused(faults)
        for argv in self._hosts.before:
            limit_s = PULL_S if "pull" in argv[:3] else START_S
            try:
                done = ThisMachine().run(argv, timeout_s=limit_s)
            except Unreachable as error:
                self.clear()
                raise Refused([Problem(where="docker", message=error.sentence, hint=error.hint)]) from None
            if done.code and "already exists" not in done.words:  # the network of a run whose watcher was killed
                self.clear()
                raise Refused([self._problem(done, what=shlex.join(argv[:3]))])

    def start(self, node: int) -> None:
        """`docker run`, after what an earlier container of that name has left."""
        host = self._hosts.nodes[node]
        machine = self._machine(host)
        try:
            self._remove(machine, host)
            self._leave_secrets(machine, host)
            done = machine.run(host.start, timeout_s=START_S)
            if done.code:
                self._remove(machine, host)
        except Unreachable as error:
            raise Refused([Problem(where=host.machine or "docker", message=error.sentence, hint=error.hint)]) from None
        if done.code:
            raise Refused([self._problem(done, machine=host.machine, what=f"docker run {host.name}")])

    def states(self, nodes: Sequence[int]) -> dict[int, NodeState]:
        """One question to each machine."""
        by_machine: dict[str, list[int]] = {}
        for node in nodes:
            by_machine.setdefault(self._hosts.nodes[node].machine, []).append(node)
        found: dict[int, NodeState] = {}
        for name, members in by_machine.items():
            try:
                found |= self._states_on(self._machine_named(name), members)
            except Unreachable as error:
                found |= {node: NodeState(alive=None, detail=error.sentence) for node in members}
        return found

    def signal(self, node: int, signum: int) -> bool:
        """`docker kill --signal`, to its process 1."""
        host = self._hosts.nodes[node]
        argv = ["docker", "kill", "--signal", signal.Signals(signum).name.removeprefix("SIG"), host.name]
        try:
            return self._machine(host).run(argv, timeout_s=ASK_S).code == 0
        except Unreachable:
            return False

    def words(self, node: int) -> str:
        """The last lines that the agent of a node has printed."""
        host = self._hosts.nodes[node]
        try:
            done = self._machine(host).run(["docker", "logs", "--tail", _WORDS_LINES, host.name], timeout_s=ASK_S)
        except Unreachable:
            return ""
        return (done.out + done.err).decode(errors="replace").strip() if done.code == 0 else ""

    def remove(self, node: int) -> bool:
        """`docker rm --force`."""
        host = self._hosts.nodes[node]
        try:
            return self._remove(self._machine(host), host)
        except Unreachable:
            return False

    def clear(self) -> bool:
        """Remove the network of the run, and copies of its directory that have come home."""
        home = self._home
        forgotten = [home.forget(node) for node in self._hosts_range()] if home is not None else []
        clean = all(forgotten)
        for argv in self._hosts.after:
            try:
                done = ThisMachine().run(argv, timeout_s=ASK_S)
            except Unreachable:
                return False
            clean = clean and (done.code == 0 or "not found" in done.words or "No such" in done.words)
        return clean

    def bring_home(self) -> bool:
        """Copy what is new there, from each host that has a run directory of its own."""
        home = self._home
        fetched = [home.fetch(node) for node in self._hosts_range()] if home is not None else []
        return all(fetched)

    def _send(self, home: Home, node: int) -> Problem | None:
        """Give a host what a node needs, where it does not see the run directory. Why not, if so."""
        host = self._hosts.nodes[node]
        try:
            said = home.send(node)
        except Unreachable as error:
            return Problem(where=host.machine, message=error.sentence, hint=error.hint)
        return Problem(where=host.machine, message=f"the run cannot be copied there: {said}") if said else None

    def _hosts_range(self) -> range:
        return range(len(self._hosts.nodes))

    # ---------------------------------------------------------------- one container

    def _states_on(self, machine: Machine, nodes: Sequence[int]) -> dict[int, NodeState]:
        names = {self._hosts.nodes[node].name: node for node in nodes}
        done = machine.run(["docker", "inspect", "--type", "container", "--format", _STATE, *names], timeout_s=ASK_S)
        seen = {name: state for name, state in _read_states(done.text) if name in names}
        if len(seen) < len(names) and not _all_missing(done, len(names) - len(seen)):
            detail = refusal(done.words, machine=machine.name).message
            return {node: NodeState(alive=None, detail=detail) for node in nodes}
        gone = NodeState(alive=False, there=False, killed=True, detail="its container was removed")
        return {node: state_of(seen[name]) if name in seen else gone for name, node in names.items()}

    def _remove(self, machine: Machine, host: HostNode) -> bool:
        done = machine.run(["docker", "rm", "--force", "--volumes", host.name], timeout_s=ASK_S)
        if folder := _secrets(host):
            machine.run(["rm", "-rf", "--", folder], timeout_s=ASK_S)
        return done.code == 0 or "no such container" in done.words.lower()

    def _leave_secrets(self, machine: Machine, host: HostNode) -> None:
        """In a file that only this user reads, on a file system in memory; the agent removes it when it has read it."""
        folder = _secrets(host)
        if not folder:
            return
        values = {name: os.environ[name] for name in self._plan.secrets if name in os.environ}
        words = shlex.join([f"{folder}/{SECRETS_FILE}"])
        script = f"umask 077 && mkdir -- {shlex.quote(folder)} && cat > {words}"
        done = machine.run(["sh", "-c", script], input=json.dumps(values).encode(), timeout_s=ASK_S)
        if done.code:
            message = f"the secrets of the run cannot be left in {folder}: {done.words}"
            raise Refused([Problem(where=host.machine or "docker", message=message)])

    def _machine(self, host: HostNode) -> Machine:
        return self._machine_named(host.machine)

    def _machine_named(self, name: str) -> Machine:
        return self._machines[name]

    def _problem(self, done: Done, *, what: str, machine: str = "") -> Problem:
        return refusal(done.words, machine=machine, image=self._hosts.image, what=what)


def sweep(machine: Machine) -> None:
    """Remove ended containers, and the networks, of runs of this user that nobody watches and that have ended."""
    mine = ["--filter", f"label={USER_LABEL}={os.getuid()}"]
    try:
        listed = machine.run(
            ["docker", "ps", "--all", *mine, "--format", _LISTED % (RUN_LABEL, FOLDER_LABEL)], timeout_s=ASK_S
        )
        rows = [json.loads(line) for line in listed.text.splitlines()] if listed.code == 0 else []
        alive = {run for _, state, run, _ in rows if state in ("running", "paused", "restarting")}
        left = [row for row in rows if row[2] not in alive and watcher_of(RunDir(Path(row[3]))) is None]
        for name in [row[0] for row in left]:
            machine.run(["docker", "rm", "--force", "--volumes", name], timeout_s=ASK_S)
            machine.run(["rm", "-rf", "--", secrets_folder(name, os.getuid())], timeout_s=ASK_S)
        for run in dict.fromkeys(row[2] for row in left):
            machine.run(["docker", "network", "rm", network_of(run)], timeout_s=ASK_S)
    except Unreachable:
        return  # whoever has asked for it finds that out, too


def state_of(state: Mapping[str, Any]) -> NodeState:
    """What `docker inspect` says of a container's state."""
    status, code = str(state.get("Status", "")), state.get("ExitCode")
    if status in ("running", "paused", "restarting"):
        return NodeState(alive=True, detail="paused" if status == "paused" else "")
    error = str(state.get("Error") or "")
    if status == "created" and not error:
        return NodeState(alive=True)  # it is being started
    exit_code = code if isinstance(code, int) else 1
    return NodeState(
        alive=False, exit_code=exit_code, killed=exit_code in _KILLED, detail=_how_ended(exit_code, state, error)
    )


def _how_ended(code: int, state: Mapping[str, Any], error: str) -> str:
    """In words, of a container that has ended by itself or was killed; empty in order."""
    if state.get("OOMKilled"):
        return "its container was killed: out of memory"
    if code == _WITH_THE_ENGINE:
        return "its container ended with its engine, or with the machine"
    if is_signal(code):
        return f"its container was killed by {signal_name(code - 128)}"
    return f"its container ended with exit code {code}" + (f": {error}" if error else "") if code else ""


def _read_states(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in text.splitlines():
        name, _, state = line.partition(" ")
        if name.startswith('"/'):
            yield str(json.loads(name)).removeprefix("/"), dict(json.loads(state))


def _all_missing(done: Done, number: int) -> bool:
    """Whether all that the engine could not tell of are containers that it does not have."""
    return done.err.decode(errors="replace").lower().count("no such ") >= number


def _secrets(host: HostNode) -> str:
    return next((mount.source for mount in host.mounts if mount.target == SECRETS_FOLDER), "")
