"""Nodes on hosts that are reached by ssh. Each agent was started detached there, and says who it is in the run
directory of its host (`agent/detached.py`); it is never taken for another process that has its pid by now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import Problem, Refused
from launcher.executors.machines import Done, Unreachable
from launcher.executors.places import NodeState
from launcher.executors.ssh_home import Home
from launcher.executors.ssh_machine import SshMachine
from launcher.wording import signal_name

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

T = TypeVar("T")

_LIMIT_S = 60.0
"""Of a command on a host that has too much to do. One that is away is known as such after 10 to 25 s, by ssh itself."""
_START_LIMIT_S = 60.0
"""An interpreter on a file system that is cold takes its time."""
_MOST_AT_ONCE = 32
_SIGNALLED = 128
"""Exit codes above it are of signals."""
_WORDS_LINES = "40"
_ALIVE = r"""
alive() {
    read -r pid start boot <"$1.pid" 2>/dev/null || return 1
    read -r now </proc/sys/kernel/random/boot_id
    [ "$boot" = "$now" ] || return 1
    line=$(cat "/proc/$pid/stat" 2>/dev/null) || return 1
    set -- ${line##*) }
    [ "${20}" = "$start" ] && [ "$1" != Z ] && [ "$1" != X ]
}
"""
"""Field 22 of /proc/PID/stat is the start time; the name before it may have blanks and brackets."""
_STATE = f"""{_ALIVE}
if alive "$1"; then echo alive
elif [ -e "$1.exit" ]; then echo "ended $(cat "$1.exit")"
elif [ -e "$1.pid" ]; then echo lost
else echo nothing; fi
tail -n 1 "$2" 2>/dev/null
exit 0
"""
_SIGNAL = f"""{_ALIVE}
if alive "$1"; then kill -s "$2" "$pid"; else exit 3; fi
"""
_REMOVE = f"""{_ALIVE}
tries=0
while alive "$1"; do
    kill -s KILL "$pid"; tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1
    sleep 0.05
done
rm -f "$1.pid" "$1.exit" "$1.pid.new" "$1.exit.new"
rmdir "${{1%/*}}" 2>/dev/null
exit 0
"""
"""The workers of a killed agent end by themselves: see `agent/zygote.py`."""


class SshPlaces:
    """The nodes of a plan on their hosts."""

    def __init__(self, plan: Plan, run: RunDir) -> None:
        assert plan.hosts is not None
        self._plan, self._run, self._hosts = plan, run, plan.hosts
        config = (plan.recipe.get("ssh") or {}).get("config")
        self._machines = [SshMachine(node.machine, config=config) for node in self._hosts.nodes]
        self._home = Home(plan, run, self._machines)

    def prepare(self) -> None:
        """Copy the run directory to the hosts that do not see it. Raises Refused."""
        self._keep()
        problems = [problem for problem in self._each(self._all(), self._prepare) if problem is not None]
        if problems:
            self._each(self._all(), lambda node: self._home.forget(node, unused=True))
            raise Refused(problems)

    def start(self, node: int) -> None:
        """Run the line of the plan. Raises Refused."""
        self._try(node, _REMOVE)  # what one has left that was there before: who asks now asks about this one
        if problem := self._send_again(node):
            raise Refused([problem])
        given = json.dumps({name: os.environ[name] for name in self._plan.secrets if name in os.environ})
        try:
            done = self._machines[node].run(
                self._hosts.nodes[node].start, input=given.encode(), timeout_s=_START_LIMIT_S
            )
        except Unreachable as error:
            raise Refused([Problem(where=self._where(node), message=error.sentence, hint=error.hint)]) from error
        if done.code:
            said = done.words.removeprefix("launch: ") or f"its start ended with exit code {done.code}"
            raise Refused([Problem(where=self._where(node), message=f"{self._name(node)}: {said}")])

    def states(self, nodes: Sequence[int]) -> dict[int, NodeState]:
        """One question to each host, all at once."""
        return dict(zip(nodes, self._each(nodes, self._state), strict=True))

    def signal(self, node: int, signum: int) -> bool:
        """Signal the agent, and nobody else."""
        done = self._try(node, _SIGNAL, signal_name(signum).removeprefix("SIG"))
        return done is not None and done.code == 0

    def words(self, node: int) -> str:
        """The last lines of its log."""
        done = self._try(node, 'exec tail -n "$2" "$3"', _WORDS_LINES, str(self._run.node_log(node)))
        return "" if done is None or done.code else done.text

    def remove(self, node: int) -> bool:
        """Kill the agent if it lives, and forget who it was."""
        done = self._try(node, _REMOVE)
        return done is not None and done.code == 0

    def clear(self) -> bool:
        """Remove the copies of the run directory that have come home."""
        return all(self._each(self._all(), self._home.forget))

    def bring_home(self) -> bool:
        """Copy what is new there, from each host that has a run directory of its own."""
        self._keep()
        return all(self._each(self._all(), self._home.fetch))

    def _keep(self) -> None:
        """Who prepares the hosts, or brings things home again and again, speaks with them for long."""
        for machine in self._machines:
            machine.keeps = True

    def _prepare(self, node: int) -> Problem | None:
        try:
            said = self._home.send(node)
        except Unreachable as error:
            return Problem(where=self._where(node), message=error.sentence, hint=error.hint)
        if said:
            return Problem(
                where=self._where(node), message=f"{self._name(node)}: the run cannot be copied there: {said}"
            )
        return None

    def _state(self, node: int) -> NodeState:
        log = self._run.node_log(node)
        try:
            done = self._on(node, _STATE, str(log))
        except Unreachable as error:
            return NodeState(alive=None, detail=error.sentence)
        first, _, last = done.out.decode(errors="replace").partition("\n")
        word, _, code = first.strip().partition(" ")
        if word == "alive":
            return NodeState(alive=True)
        if word == "ended" and code.isdecimal():
            detail = last.strip() if code != "0" else ""
            return NodeState(alive=False, exit_code=int(code), detail=detail, killed=int(code) > _SIGNALLED)
        if word in ("lost", "ended"):  # with what stood beside it: by hand, or its machine was started anew
            return NodeState(alive=False, detail=last.strip() or "nobody saw how it ended", killed=True)
        if word == "nothing":  # of one that was started: its disk was lost, and so was its machine
            return NodeState(alive=False, there=False, killed=True, detail="its run directory is gone")
        return NodeState(alive=None, detail=f"{self._name(node)}: {done.words or f'exit code {done.code}'}")

    def _send_again(self, node: int) -> Problem | None:
        """To a host whose disk was lost since; the one that it comes home to has what it needs."""
        done = self._try(node, '[ -e "$2" ] || exit 3', str(self._run.agent_start))
        return self._prepare(node) if done is not None and done.code == 3 else None

    def _try(self, node: int, script: str, *arguments: str) -> Done | None:
        """None: the host does not answer."""
        try:
            return self._on(node, script, *arguments)
        except Unreachable:
            return None

    def _on(self, node: int, script: str, *arguments: str) -> Done:
        me = str(self._run.node_pid(node).with_suffix(""))
        return self._machines[node].run(("sh", "-c", script, "launch", me, *arguments), timeout_s=_LIMIT_S)

    def _each(self, nodes: Sequence[int], what: Callable[[int], T]) -> list[T]:
        if len(nodes) < 2:
            return [what(node) for node in nodes]
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(nodes))) as pool:
            return list(pool.map(what, nodes))

    def _all(self) -> Sequence[int]:
        return range(len(self._hosts.nodes))

    def _name(self, node: int) -> str:
        return self._hosts.nodes[node].machine

    def _where(self, node: int) -> str:
        return f"node {node}"
