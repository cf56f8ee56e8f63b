"""Where the head's decisions meet the world: connections in, effects out. Lives in the agent of node 0."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.agent import allocation as allocations
from launcher.agent.allocation import Allocation
from launcher.agent.causes import Failure
from launcher.agent.channel import Connection, Server
from launcher.agent.effects import Effect, Finish, Leave, Record, Say, Send
from launcher.agent.head import Head
from launcher.agent.limits import limit_of
from launcher.agent.logs import LineFile
from launcher.agent.loop import Loop
from launcher.agent.members import FROZEN_S
from launcher.agent.newest import find_newest
from launcher.agent.past import past_of
from launcher.agent.patience import Limits
from launcher.agent.preflight import Preflight
from launcher.agent.result import newest_checkpoint, write_result
from launcher.agent.watch import Watch, places_below
from launcher.planning.plan import WITH_CLOCK, Plan
from launcher.planning.worker_env import FLIGHT_RECORDER
from launcher.runs.events import EventWriter, read_events
from launcher.runs.rundir import RunDir
from launcher.runs.steps import newest_step
from launcher.runs.sync import find_parts
from launcher.wording import count

_TICK_S = 0.25
_BEAT_S = 1.0
"""How often the other agents hear something: a head agent that is silent is lost."""
_LOOK_S = 1.0
"""How often the head agent looks for what the batch side has to say."""
_MAX_REFUSALS = 100
"""That are written down."""


class HeadOffice:
    """Carries messages to the head and its effects out. `to_self` hears what is sent to node 0, in the same process."""

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        loop: Loop,
        listener: socket.socket,
        *,
        to_self: Callable[[dict[str, Any]], None],
        allocation: Allocation | None = None,
    ) -> None:
        self._plan, self._run, self._to_self, self._allocation = plan, run, to_self, allocation
        self._events = EventWriter(run.path, "head")
        self._console = LineFile(run.console)
        self._connections: dict[int, Connection] = {}
        self._agents: dict[int, tuple[str, object]] = {}
        """Host and pid of each that has joined by a connection."""
        self._port_holder: socket.socket | None = None
        self._refused_count = 0
        self._ticked_s = time.monotonic()
        self._marks: list[str] = []
        """Of the newest checkpoints since a node has come that waits to be taken in."""
        self._asked_to_stop = False
        number = None if allocation is None else allocation.number
        events = read_events(run.path)
        past = past_of(events, allocation=number)
        self._head = Head(
            node_count=len(plan.nodes),
            workers_per_node=plan.nproc_per_node,
            min_nodes=plan.min_nodes,
            rescues=plan.rescue,
            members_before=past.members,
            present_nodes=None if allocation is None else allocation.nodes,
            max_restarts=plan.limits.max_restarts,
            resumable=plan.resumable,
            grace_s=plan.limits.grace_s,
            join_timeout_s=plan.limits.join_timeout_s,
            pick_port=self._pick_port,
            hosts={node.index: node.host for node in plan.nodes},
            master_addr=plan.nodes[0].address,
            now_s=time.monotonic(),
            find_newest=self._find_newest,
            placed=self._placed,
            watch=_watch_of(plan, run),
            preflight=Preflight(nonce=secrets.token_hex(16)) if plan.preflight else None,
            attempt=past.attempt,
            restarts=past.restarts,
            previous=past.failure,
            allocation=number,
            all_signalled=plan.sky is not None,
            ends_s=None if allocation is None else allocation.ends_s,
            limit=limit_of(plan, events, now_s=time.monotonic(), time_s=time.time()),
        )
        if past.is_interrupted:
            self._do(self._head.succeed())
        elif plan.engine_reason:  # it is slower than the user may expect
            self._do([Say(plan.engine_reason)])
        token = bytes.fromhex(run.token.read_text())
        Server(listener, token, loop, on_connection=self._greet, on_refused=self._refused)
        loop.every(_TICK_S, self._tick)
        loop.every(_BEAT_S, self._beat)
        if plan.is_elastic and not plan.rescue:
            loop.every(_LOOK_S, self._look_for_checkpoint)
        if allocation is not None:
            loop.every(_LOOK_S, self._look)

    def join_self(self, host: str) -> None:
        """Node 0 joins without a socket."""
        self._do(self._head.joined(0, host))

    def hear_self(self, message: dict[str, Any]) -> None:
        """A message of node 0's own agent."""
        self._hear(0, message)

    # ---------------------------------------------------------------- in

    def _greet(self, connection: Connection) -> None:
        connection.on_message = lambda message: self._join(connection, message)
        connection.on_end = lambda reason: None

    def _refused(self, peer: str, reason: str) -> None:
        self._refused_count += 1
        if self._refused_count <= _MAX_REFUSALS:  # a scan of the ports must not fill the disk
            self._events.write("stranger_refused", peer=peer, reason=reason)

    def _join(self, connection: Connection, message: dict[str, Any]) -> None:
        node, host = message.get("node"), str(message.get("host"))
        if message.get("type") != "join" or not isinstance(node, int) or not 0 <= node < len(self._plan.nodes):
            connection.send({"type": "refused", "reason": f"there is no node {node!r} in this plan"})
            connection.end("not a node of this run")
            return
        if node in self._connections:
            self._connections[node].check()  # it may be the successor of one whose end is not noticed yet
        if node in self._connections and self._comes_again(node, host, message.get("pid")):
            self._connections[node].end("its agent has come again")
        if node == 0 or node in self._connections:
            reason = f"node rank {node} is taken; two agents were given the same rank"
            connection.send({"type": "refused", "reason": reason})
            connection.end(reason)
            self._do(self._head.duplicate(node, host))
            return
        self._connections[node], self._agents[node] = connection, (host, message.get("pid"))
        connection.on_message = lambda heard: self._hear(node, heard)
        connection.on_end = lambda reason: self._lost(node, connection, reason)
        seen = message.get("seen", {"attempt": 0, "restarts": 0})
        self._do(self._head.recall(node, host, **seen, holds=message.get("holds")))
        self._do(self._head.joined(node, host, holds=message.get("holds")))

    def _comes_again(self, node: int, host: str, pid: object) -> bool:
        """Whether it is the agent that we knew, or its successor: after a cut link nobody tells us of the old end.

        SLURM starts one task on a node, so in an allocation a host has one agent.
        """
        known_host, known_pid = self._agents[node]
        same = host == known_host and (self._allocation is not None or (pid is not None and pid == known_pid))
        return same or self._head.is_lost(node)

    def _lost(self, node: int, connection: Connection, reason: str) -> None:
        if self._connections.get(node) is connection:
            del self._connections[node]
            self._tick_clock()
            if not self._head.is_lost(node):  # by its silence before
                self._do(self._head.lost(node, reason))

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        self._tick_clock()
        head = self._head
        head.heard(node)
        kind = message["type"]
        if kind == "ready":
            self._do(head.ready(node))
        elif kind == "preflight":
            self._do(head.preflighted(node, message["report"]))
        elif kind == "failed":
            self._do(head.failed(self._placed(Failure.from_record(message["failure"]))))
        elif kind == "suspect":
            self._do(head.suspected(self._placed(Failure.from_record(message["failure"]))))
        elif kind == "holds":
            steps = {int(rank): step for rank, step in message["steps"].items()}
            self._do(head.holds(node, message["attempt"], steps))
        elif kind == "kept":
            self._do(head.kept(message["attempt"], message["rank"], message.get("error")))
        elif kind == "saved":
            self._do(head.saved(message["attempt"]))
        elif kind == "done":
            codes = {int(rank): code for rank, code in message["exit_codes"].items()}
            self._do(head.done(node, message["attempt"], codes))
        elif kind == "heartbeat":
            head.watch.hear(node, message["attempt"], message["clocks"], head.now_s)
        elif kind == "stacks":
            head.watch.answer(node, message["attempt"], message["ranks"])
        elif kind == "stop":
            self._do(head.stop(node, message["reason"], message["signum"], message["grace_s"]))
        elif kind == "warned":
            self._do(head.warned(message["signum"]))

    def _tick(self) -> None:
        before_s = self._ticked_s
        self._tick_clock()
        self._ticked_s = self._head.now_s
        if self._ticked_s - before_s > FROZEN_S:
            self._head.frozen(self._ticked_s - before_s)
        self._head.heard(0)
        self._do(self._head.tick())

    def _beat(self) -> None:
        for connection in list(self._connections.values()):  # one that breaks is taken out
            connection.send({"type": "beat"})

    def _look_for_checkpoint(self) -> None:
        """A script does not say that it has saved. A checkpoint that has come, and stays as it is, is whole."""
        if not self._head.members.newcomers:
            self._marks = []
            return
        mark = _mark(newest_checkpoint(self._run, self._plan))
        if not self._marks or mark != self._marks[-1]:
            self._marks.append(mark)
        elif len(self._marks) > 1:
            self._marks = []
            self._tick_clock()
            self._do(self._head.saved(self._head.attempt))

    def _look(self) -> None:
        """A wish of the batch side, and whether the run goes on elsewhere while this node was cut off."""
        assert self._allocation is not None
        self._tick_clock()
        path, number = self._run.path, self._allocation.number
        if allocations.record_of(path, number + 1).exists():
            self._do(self._head.superseded())
        with contextlib.suppress(FileNotFoundError):
            # A listing asks the server of a network file system, where the lack of one file is remembered for long.
            if (asked := allocations.stop_request(path, number)).name not in os.listdir(asked.parent):  # noqa: PTH208
                return
            reason = asked.read_text(encoding="utf-8").strip()
            if reason and not self._asked_to_stop:
                self._asked_to_stop = True
                self._do(self._head.stop(0, reason, signal.SIGTERM))

    def _tick_clock(self) -> None:
        self._head.now_s = time.monotonic()

    # ---------------------------------------------------------------- out

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Record):
                if effect.event == "stop_requested":
                    self._run.stop_file.touch()
                if effect.event == "finished":
                    self._name_offline_parts()
                self._events.write(effect.event, **effect.fields)
                if effect.event == "attempt_started" and self._plan.is_elastic:
                    self._weigh_limit(effect.fields["nodes"])
            elif isinstance(effect, Say):
                self._say(effect.text)
            elif isinstance(effect, Leave):
                number = None if self._allocation is None else self._allocation.number
                self._events.write("stopped", **{**asdict(effect), "cause": effect.cause.value, "allocation": number})
            elif isinstance(effect, Finish):
                head = self._head
                first = head.first_failure
                write_result(self._run, self._plan, effect, attempt=head.attempt, restarts=head.restarts, first=first)

    def _weigh_limit(self, nodes: int) -> None:
        """Fewer nodes use up GPU hours more slowly."""
        now = {"now_s": time.monotonic(), "time_s": time.time()}
        self._head.set_limit(limit_of(self._plan, read_events(self._run.path), **now, nodes=nodes))

    def _name_offline_parts(self) -> None:
        """A script talks to W&B itself; what it has left here, and the command that uploads it, is named."""
        waiting = [part for part in find_parts(self._run.path / "wandb") if not part.synced]
        if self._plan.worker.kind == "script" and waiting:
            reason = count(len(waiting), "part")
            wandb = {"mode": "offline", "reason": reason, "sync": f"launch sync {self._run.run_id}"}
            self._events.write("tracking", attempt=self._head.attempt, wandb=wandb)

    def _send(self, effect: Send) -> None:
        for node in range(len(self._plan.nodes)) if effect.node is None else [effect.node]:
            if node == 0:
                self._to_self(effect.message)
            elif node in self._connections:
                self._connections[node].send(effect.message)

    def _placed(self, failure: Failure) -> Failure:
        """Where in the training a failure came, as far as it can be told from here."""
        step = newest_step(self._run, failure.attempt) if failure.step is None else failure.step
        return replace(failure, step=step, kept=_mark(newest_checkpoint(self._run, self._plan)))

    def _find_newest(self) -> str | None:
        """Look for a checkpoint of the script's own, and say what was found."""
        pattern = self._plan.worker.resume_newest
        if pattern is None:
            return None
        found = find_newest(pattern)
        if found is not None:
            self._say(f"resumes from {self._shown(found)}")
        elif self._head.attempt > 1:
            self._say(f"nothing to resume from matches {self._shown(pattern)}: starts from the beginning")
        return found

    def _shown(self, path: str) -> str:
        """A path of the run directory without it."""
        return path.removeprefix(f"{self._run.path}/")

    def _say(self, text: str) -> None:
        self._console.write(f"launch | {text}\n".encode(errors="backslashreplace"))

    def _pick_port(self) -> int:
        """A free port for this attempt, held by a bound socket that does not listen until the next attempt.

        While it is held nobody else is given the port, and the workers' store, which sets SO_REUSEADDR too, can listen.
        """
        if self._plan.master_port is not None:
            return self._plan.master_port
        if self._port_holder is not None:
            self._port_holder.close()
        family = socket.AF_INET6 if ":" in self._plan.nodes[0].address else socket.AF_INET
        self._port_holder = socket.socket(family, socket.SOCK_STREAM)
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        port: int = self._port_holder.getsockname()[1]
        return port


def _mark(checkpoint: Path | None) -> str:
    """Another one where there is another checkpoint."""
    if checkpoint is None:
        return ""
    return f"{checkpoint}:{checkpoint.stat().st_mtime_ns}" if checkpoint.exists() else str(checkpoint)


def _watch_of(plan: Plan, run: RunDir) -> Watch:
    """What is watched, by the limits of the plan."""
    asked, is_job = plan.limits, plan.worker.kind == "job"
    limits = Limits(
        timeout_s=asked.hang_timeout_s,
        learns=asked.learns_hang_timeout,
        restarts=asked.on_hang == "restart",
        restarts_with_clock=asked.on_hang == WITH_CLOCK,
        has_phases=is_job,
    )
    roots = (str(run.code), plan.worker.cwd, "" if plan.code is None else plan.code.root)
    trace = next((variable.value for variable in plan.env if variable.name == FLIGHT_RECORDER), "")
    return Watch(limits=limits, shown=places_below(*roots), trace=f"{trace}*" if trace else "")
