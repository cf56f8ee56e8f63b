"""The watcher of a run on machines: `python -P -m launcher.executors.watch RUN_DIR`, one detached process where the run
was launched.

It starts the nodes, replaces those that are killed, passes requests to stop on, brings home what is written elsewhere,
and removes what has ended. The run does not need it: without one it goes on, and another can take over any time.
It says on its standard output, once, whether the nodes were started; then it says nothing there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher import redact
from launcher.agent import continuing
from launcher.agent.effects import Finish
from launcher.agent.hearing import STOP_SIGNALS, hear_signals
from launcher.agent.logs import say
from launcher.agent.result import write_result
from launcher.errors import Problem, Refused
from launcher.executors.places import NodeState, Places, places_of
from launcher.executors.watch_lock import take_lock
from launcher.executors.watching import Action, Lost, Signal, Watching, earlier, finish_of
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter, read_events
from launcher.runs.rundir import RunDir

LOOK_EVERY_S = 1.0
LOOK_FAR_S = 2.0
"""At nodes on other machines."""
HOME_EVERY_S = 3.0
"""How often what is new in the run directories of other machines is brought home."""
_REMOVE_S = 300.0
"""How long a machine that does not answer is asked again to remove what has ended there."""
_PAUSE_S = 5.0
_MANY = 16
"""So many machines are spoken with at a time."""


def main() -> int:
    """Watch a run until it has ended and nothing of it is left on its machines."""
    parser = argparse.ArgumentParser(prog="launcher.executors.watch", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--start", action="store_true", help="start the nodes first")
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    signals = hear_signals()
    lock = take_lock(run)
    if lock is None:
        _tell({"problems": [{"where": run.run_id, "message": "it is being watched already", "hint": ""}]})
        return 0
    plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
    redact.remember(plan.secrets)
    watcher = Watcher(plan, run, places_of(plan, run), signals)
    if options.start:
        try:
            watcher.start()
        except Refused as error:
            run.watcher.unlink(missing_ok=True)
            _tell({"problems": [vars(problem) for problem in error.problems]})
            return 0
    _tell({"pid": os.getpid()})
    _log_to(run)
    watcher.watch()
    run.watcher.unlink(missing_ok=True)
    return 0


def _tell(word: dict[str, Any]) -> None:
    """To the command that has started this process, which may be gone."""
    try:
        os.write(1, json.dumps(word).encode() + b"\n")
    except BrokenPipeError:
        return


def _log_to(run: RunDir) -> None:
    """From here on output goes into the run's log, if there is any."""
    log = os.open(run.agents_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = redact.RedactedStream(1), redact.RedactedStream(2)


class Watcher:
    """Watches the nodes of a plan in their places. `signals`: see `hear_signals`."""

    def __init__(self, plan: Plan, run: RunDir, places: Places, signals: int) -> None:
        assert plan.hosts is not None
        self._plan, self._run, self._places, self._signals = plan, run, places, signals
        self._nodes = tuple(node.index for node in plan.nodes)
        self._is_far = any(node.machine for node in plan.hosts.nodes)
        self._watching = Watching(
            nodes=self._nodes,
            max_replaced=plan.limits.max_restarts + 1,
            grace_s=plan.limits.grace_s,
            least=plan.min_nodes,
            replaced=earlier(read_events(run.path)),
        )
        self._words = ""
        self._home_s = time.monotonic()
        self._unknown: dict[int, str] = {}

    @functools.cached_property
    def _events(self) -> EventWriter:
        """Made when it is needed first: a file that travels to the hosts would come home again, over the one here."""
        return EventWriter(self._run.path, f"watch-{socket.gethostname()}-{os.getpid()}")

    def start(self) -> None:
        """Start all nodes. Raises Refused, with nothing left behind."""
        self._places.prepare()
        with ThreadPoolExecutor(_MANY) as pool:
            found = list(pool.map(self._try_start, self._nodes))
        if problems := [problem for each in found for problem in each]:
            self._remove_all(limit_s=0.0)
            raise Refused(list(dict.fromkeys(problems)))
        self._events.write("watcher_started", pid=os.getpid(), host=socket.gethostname())

    def _try_start(self, node: int) -> Sequence[Problem]:
        """Why a node could not be started."""
        try:
            self._places.start(node)
        except Refused as error:
            return error.problems
        return ()

    def watch(self) -> None:
        """Until all nodes have ended, or were killed too often; then write what nobody else has, and clean up."""
        while not self._watching.is_over:
            self._wait()
            states = self._places.states([node for node in self._nodes if node not in self._watching.ended])
            # Read after the question, so that the last words of a head agent that has ended are there.
            self._note_unknown(states)
            self._bring_home(ended=any(state.alive is False for state in states.values()))
            known = {"has_result": self._run.result.exists(), "stop_asked": self._run.stop_file.exists()}
            for action in self._watching.look(states, **known, now_s=time.monotonic()):
                self._do(action)
        wait_s = 0.0 if self._watching.silent else _REMOVE_S
        by_s = time.monotonic() + wait_s
        while not self._places.bring_home() and self._is_far and time.monotonic() < by_s:
            time.sleep(_PAUSE_S)
        if not self._run.result.exists():
            self._finish()
        left = self._remove_all(limit_s=wait_s)
        for node in left:
            text = f"node {node}: its machine does not answer, so what is left of the run there is not removed"
            say(self._run.console, f"{text}: launch watch {self._run.run_id}")
        self._events.write("watcher_ended", left=left)
        self._events.close()

    def _wait(self) -> None:
        """Until it is time for another look, or somebody has asked to stop. The end of a child is neither."""
        until_s = time.monotonic() + (LOOK_FAR_S if self._is_far else LOOK_EVERY_S)
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._signals], [], [], left_s)
            asked = [signum for signum in os.read(self._signals, 64) if signum in STOP_SIGNALS] if ready else []
            for signum in asked:
                for action in self._watching.stop(signum, time.monotonic()):
                    self._do(action)
            if asked:
                return

    def _do(self, action: Action) -> None:
        if isinstance(action, Signal):
            with ThreadPoolExecutor(_MANY) as pool:
                list(pool.map(lambda node: self._places.signal(node, action.signum), action.nodes))
            return
        node, state = action.node, action.state
        self._keep_words(node)
        code = 1 if state.exit_code is None else state.exit_code
        status = code - 128 if code > 128 else code << 8
        self._events.write("agent_lost", node=node, pid=None, status=status, detail=state.detail)
        if isinstance(action, Lost):
            return
        say(self._run.console, f"node {node} was lost: {state.detail}: another agent is started in its place")
        try:
            self._places.start(node)
        except Refused as error:
            problem = error.problems[0]
            say(self._run.console, f"node {node} cannot be started again: {problem.message}")
            self._watching.ended[node] = NodeState(alive=False, exit_code=1, detail=problem.message, there=False)
            self._watching.lost = self._watching.lost or (node, self._watching.ended[node])
            for following in self._watching.stop(signal.SIGTERM, time.monotonic()):
                self._do(following)
            self._watching.stop_signum = 0
            return
        self._events.write("node_replaced", node=node)

    def _keep_words(self, node: int) -> None:
        """What the agent has printed goes into the run's log, before it is removed with its container."""
        if words := self._places.words(node):
            self._words = self._words or words
            print(f"launch: the last lines of node {node}:\n{words}", flush=True)

    def _note_unknown(self, states: dict[int, NodeState]) -> None:
        """Say once that a machine does not answer, and once that it does again."""
        for node, state in states.items():
            if state.alive is None and node not in self._unknown:
                self._unknown[node] = state.detail
                self._events.write("machine_silent", node=node, detail=state.detail)
                say(self._run.console, f"node {node}: {state.detail}; the run goes on without being watched")
            elif state.alive is not None and self._unknown.pop(node, None) is not None:
                self._events.write("machine_answers", node=node)
                say(self._run.console, f"node {node}: its machine answers again")

    def _bring_home(self, *, ended: bool) -> None:
        if ended or time.monotonic() - self._home_s >= HOME_EVERY_S:
            self._places.bring_home()
            self._home_s = time.monotonic()

    def _finish(self) -> None:
        """Nobody has said how the run has ended."""
        events = read_events(self._run.path)
        hosts = {node.index: node.host for node in self._plan.nodes}
        disk = os.statvfs(self._run.path)
        free_bytes = disk.f_bavail * disk.f_frsize
        finish = continuing.by_full_disk(finish_of(events, self._watching, hosts, self._words), free_bytes=free_bytes)
        self._write_finish(finish)

    def _write_finish(self, finish: Finish) -> None:
        fields = {"state": finish.state.value, "cause": finish.cause.value, "exit_code": finish.exit_code}
        self._events.write("finished", **fields, reason=finish.reason)
        events = read_events(self._run.path)
        attempt = max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)
        restarts = max((event["restarts"] for event in events if event["event"] == "restarting"), default=0)
        write_result(self._run, self._plan, finish, attempt=attempt, restarts=restarts, first=None)
        say(self._run.console, f"{finish.state.value}: {finish.reason}")

    def _remove_all(self, *, limit_s: float) -> list[int]:
        """Remove what is left on the machines; the nodes of those that do not answer in that time."""
        by_s, left = time.monotonic() + limit_s, list(self._nodes)
        while True:
            with ThreadPoolExecutor(_MANY) as pool:
                removed = list(pool.map(self._places.remove, left))
            left = [node for node, is_gone in zip(left, removed, strict=True) if not is_gone]
            if not left or time.monotonic() >= by_s:
                self._places.clear()
                return left
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
