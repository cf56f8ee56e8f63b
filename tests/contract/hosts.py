"""Several machines on one: each a set of namespaces (network, pids, name, mounts) with a cable to one switch.

A machine has its own name, its own processes, its own loopback and its own /dev/shm; files are shared, as on a cluster.
It can be cut off, frozen, killed as a whole, and started again. The agent of each is started from the plan's own argv.
Needs root; everything is gone at the end of the test, also of one that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launched import LIMIT_S

from launcher.planning.plan import NodePlan, Plan, node_agent_argv
from launcher.road import Prepared, Request, make_run, prepared
from launcher.runs.events import Event, read_events
from launcher.runs.rundir import RunDir

NETWORK = "198.18.90"
"""Of a range that is for tests of networks alone. The test cluster of SLURM has another part of it."""
PORT = 21000
"""Of the head agent. Each machine has all ports for itself."""
_LOOK_EVERY_S = 0.02
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""A test that is killed takes its machines with it."""
_INIT = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint('up', flush=True)\nwhile 1: signal.pause()"
"""What process 1 of a machine does: it buries the orphans of others."""
_BOOT = """
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
exec "$3" -S -c "$4"
"""


class Host:
    """One machine. It is off until `boot`."""

    def __init__(self, bed: Bed, number: int) -> None:
        self._bed, self.number = bed, number
        self.name, self.address = f"h{number}", f"{NETWORK}.{10 + number}"
        self._unshare: subprocess.Popen[str] | None = None
        self._cable, self._boots = "", 0
        self._disks: dict[Path, Path] = {}
        self.agents: list[subprocess.Popen[bytes]] = []
        """What was started on it: each the `nsenter` of an agent."""

    @property
    def init(self) -> int:
        """Its process 1, seen from outside."""
        assert self._unshare is not None, f"{self.name} is off"
        return int(_children(self._unshare.pid)[0])

    @property
    def is_up(self) -> bool:
        """Whether it is switched on."""
        return self._unshare is not None

    def boot(self) -> None:
        """Switch it on, and plug it in."""
        namespaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts", "--ipc", "--mount")
        boot = ("sh", "-ec", _BOOT, "boot", str(self._bed.hosts_file), self.name, sys.executable, _INIT)
        with (self._bed.folder / f"{self.name}.log").open("a") as log:
            self._unshare = subprocess.Popen(
                [*_WITH_US, "unshare", *namespaces, "--propagation", "private", *boot],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", f"{self.name} did not come up"
        self._boots += 1
        self._cable = f"{self.name}-{self._boots}"
        self._bed.ip(
            f"link add {self._cable} type veth peer name eth0 netns {self.init}",
            f"link set {self._cable} master bridge0 up",
        )
        _call(self.inside("ip", "link", "set", "lo", "up"))
        _call(self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0"))
        _call(self.inside("ip", "link", "set", "eth0", "up"))
        for place, disk in self._disks.items():
            _call(self.inside("mount", "--bind", str(disk), str(place)))

    def give_disk(self, disk: Path, place: Path) -> None:
        """From now on it sees a folder of its own there; that outlives it, as a disk does."""
        self._disks[place] = disk
        _call(self.inside("mount", "--bind", str(disk), str(place)))

    def inside(self, *argv: str) -> list[str]:
        """A command, to be run on this machine."""
        return ["nsenter", "-t", str(self.init), "-n", "-u", "-i", "-m", "-p", "--", *argv]

    def start(self, argv: Sequence[str], *, env: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Run something on it, in the background."""
        with output.open("ab") as log:
            process = subprocess.Popen(
                self.inside(*argv),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.agents.append(process)
        return process

    def pids(self) -> dict[int, int]:
        """What lives on it but its process 1: pids from outside, by those inside."""
        found = {}
        place = (Path("/proc") / str(self.init) / "ns" / "pid").readlink()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, StopIteration):
                if not folder.name.isdecimal() or (folder / "ns" / "pid").readlink() != place:
                    continue
                status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
                if not status["State"].startswith(("Z", "X")):
                    found[int(status["NSpid"].split()[-1])] = int(folder.name)
        return {inner: outer for inner, outer in found.items() if inner != 1}

    def kill(self) -> None:
        """Take its power away: everything on it is gone at once, without a word to anybody."""
        assert self._unshare is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._wake_agents()
        self._unshare.communicate()
        self._unshare = None
        self._await_agents()

    def _await_agents(self) -> None:
        for agent in self.agents:
            agent.wait(LIMIT_S)
        self.agents.clear()

    def freeze(self) -> None:
        """Stop everything on it, its kernel apart: it answers to packets, and nobody reads them."""
        stopped: set[int] = set()
        while new := set(self.pids().values()) - stopped:  # who forks meanwhile
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Let it go on."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._wake_agents()

    def _wake_agents(self) -> None:
        """`nsenter` stops itself when what it runs is stopped, and would not see its end either."""
        for agent in self.agents:
            agent.send_signal(signal.SIGCONT)

    def cut(self) -> None:
        """Pull its cable, at the switch."""
        self._bed.ip(f"link set {self._cable} down")

    def mend(self) -> None:
        """Plug it in again."""
        self._bed.ip(f"link set {self._cable} up")

    def signal(self, inner: int, signum: int) -> None:
        """Signal a process by the pid that it has on this machine, which is the one in events."""
        os.kill(self.pids()[inner], signum)

    def listening(self) -> list[int]:
        """Ports that something listens on."""
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in (Path("/proc") / str(self.init) / "net" / table).read_text().splitlines()[1:]
        ]
        return sorted({int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"})

    def shared_memory(self) -> list[str]:
        """What is in its /dev/shm."""
        return sorted(path.name for path in (Path("/proc") / str(self.init) / "root" / "dev" / "shm").iterdir())


class Bed:
    """All machines, and the switch between them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.hosts_file = folder / "hosts"
        self.hosts = [Host(self, number) for number in range(count)]
        names = [f"{host.address} {host.name}.bed {host.name}" for host in self.hosts]
        self.hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        self._switch = subprocess.Popen(
            [*_WITH_US, "unshare", "--net", "sh", "-c", "echo up; exec sleep infinity"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "up\n"
        self.ip("link add bridge0 type bridge", "link set bridge0 up")
        for host in self.hosts:
            host.boot()

    def ip(self, *lines: str) -> None:
        """Work on the cables, at the switch."""
        command = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "-batch", "-"]
        _call(command, stdin="\n".join(lines) + "\n")

    def remove(self) -> None:
        """Switch everything off."""
        for host in self.hosts:
            if host.is_up:
                host.kill()
        self._switch.kill()
        self._switch.communicate()

    def plan(self, target: Path, *overrides: str, nodes: int | str | None = None, name: str = "r0") -> HostsRun:
        """Plan a recipe for these machines, one node on each; make its run directory, and start nothing.

        The plan is the one of `--on local`: only who the nodes are is another.
        """
        request = Request(
            target=str(target), overrides=overrides, nodes=nodes, name=name, runs_dir=str(self.folder / "runs")
        )
        with prepared(request, warm=False) as ready:
            plan = _on_hosts(ready.plan, self.hosts)
            run = make_run(_with_plan(ready, plan), command=["launch", str(target)])
        run.console.parent.mkdir(exist_ok=True)
        return HostsRun(self, plan, run)


class HostsRun:
    """A run on these machines."""

    def __init__(self, bed: Bed, plan: Plan, run: RunDir) -> None:
        self.bed, self.plan, self.run = bed, plan, run
        self.env: dict[str, str] = {"LAUNCH_RUN_ID": run.run_id}

    def replan(self, plan: Plan) -> None:
        """Change the plan of a run that has not begun."""
        self.plan = plan
        self.run.plan.write_text(plan.to_json())

    def start(self, *nodes: int) -> None:
        """Start the agents of these nodes; none: of all."""
        for node in nodes or range(len(self.plan.nodes)):
            argv = node_agent_argv(self.plan.agent_argv, node, (self.bed.hosts[0].address, PORT))
            self.bed.hosts[node].start(argv, env=self.env, output=self.run.agents_log)

    @property
    def events(self) -> list[Event]:
        """All that has been written down."""
        return read_events(self.run.path)

    @property
    def text(self) -> str:
        """What people see of it, and what the agents said themselves."""
        texts = [path.read_text(errors="replace") for path in (self.run.console, self.run.agents_log) if path.exists()]
        return "\n".join(texts)

    @property
    def result(self) -> dict[str, Any]:
        """result.json."""
        return dict(json.loads(self.run.result.read_text()))

    @property
    def step(self) -> int:
        """The newest one that is written down."""
        last = (
            self.run.metrics.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]
            if self.run.metrics.exists()
            else b""
        )
        return int(json.loads(last).get("step", 0)) if last else 0

    def happened(self, name: str, **fields: Any) -> list[Event]:
        """The events of a name with these fields."""
        return [e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in fields.items())]

    def until(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait until something holds, and return it; the test fails when it does not come to be."""
        deadline_s = time.monotonic() + limit_s
        while True:
            was_over = self.run.result.exists()
            if found := condition():
                return found
            assert not was_over, f"the run is over, and it did not happen:\n{self.text}"
            assert time.monotonic() < deadline_s, f"it did not happen within {limit_s} s:\n{self.text}"
            time.sleep(_LOOK_EVERY_S)

    def wait_for_event(self, name: str, limit_s: float = LIMIT_S, **fields: Any) -> Event:
        """Wait for an event with these fields and return the first one."""
        found: list[Event] = self.until(lambda: self.happened(name, **fields), limit_s)
        return found[0]

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        """Wait until a step is done and written down."""
        self.until(lambda: self.step >= step, limit_s)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the run, and of its agents; its exit code."""
        deadline_s = time.monotonic() + limit_s
        while not self.run.result.exists():
            assert time.monotonic() < deadline_s, f"it did not end within {limit_s} s:\n{self.text}"
            time.sleep(_LOOK_EVERY_S)
        for host in self.bed.hosts:
            for agent in host.agents:
                try:
                    agent.wait(max(1.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pytest.fail(f"an agent on {host.name} did not end within {limit_s} s:\n{self.text}")
        return int(self.result["exit_code"])

    def agent(self, node: int) -> int:
        """The pid of the newest agent of a node, on its machine."""
        return int(self.happened("agent_started", node=node)[-1]["pid"])

    def workers(self, node: int, attempt: int | None = None) -> list[int]:
        """The pids of the workers of a node in an attempt (None: the newest), on its machine."""
        started = self.happened("worker_started", node=node)
        newest = attempt or max(event["attempt"] for event in started)
        return [event["pid"] for event in started if event["attempt"] == newest]


def _on_hosts(plan: Plan, hosts: Sequence[Host]) -> Plan:
    """The plan with these machines as its nodes. What one machine alone decides is left to each node."""
    nodes = tuple(
        NodePlan(index=node.index, host=host.name, address=host.address, cpus=(), gpus=())
        for node, host in zip(plan.nodes, hosts, strict=True)
    )
    env = tuple(each for each in plan.env if not each.name.endswith("_SOCKET_IFNAME"))
    return dataclasses.replace(plan, nodes=nodes, env=env, interface="auto")


def _with_plan(ready: Prepared, plan: Plan) -> Prepared:
    return dataclasses.replace(ready, plan=plan)


def _children(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()


def _call(command: Sequence[str], *, stdin: str = "") -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr or done.stdout}"


MakeBed = Callable[[int], Bed]


@pytest.fixture
def make_bed(tmp_path: Path) -> Iterator[MakeBed]:
    """`make_bed(2)`: so many machines, on one network."""
    beds: list[Bed] = []

    def make(count: int) -> Bed:
        folder = tmp_path / f"bed{len(beds)}"
        folder.mkdir()
        beds.append(Bed(folder, count))
        return beds[-1]

    yield make
    for bed in beds:
        bed.remove()
