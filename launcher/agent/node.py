"""The agent: one process per node. It joins, starts the workers, watches, stops and restarts them as the head orders.

On node 0 the same process, in the same loop, is the head.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections import deque
from typing import Any

from launcher.agent import addresses, binding, channel, scratch
from launcher.agent.allocation import NUMBER, Allocation
from launcher.agent.causes import LAUNCHER_LOST_GRACE_S, LAUNCHER_LOST_SIGNAL, Failure
from launcher.agent.devices import BEGIN_S, DeviceWatch
from launcher.agent.logs import say
from launcher.agent.loop import Loop
from launcher.agent.members import FROZEN_S, RETURN_S, SILENCE_S
from launcher.agent.office import HeadOffice
from launcher.agent.past import attempt_seen
from launcher.agent.preflight_node import NodePreflight
from launcher.agent.torchrun import TorchrunWorkers
from launcher.agent.worker import Attempt
from launcher.agent.workers import Workers
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause

HEARTBEAT_S = 1.0
RECONNECT_S = 0.2
HOLD_S = RETURN_S
"""How long workers are held for a successor of a head agent that is lost. After that it may go on without this node."""
REACH_S = 10.0
"""In an allocation: how long the head node may be silent. One that refuses is up, and does not listen yet."""
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_REASONS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "TERM",
    signal.SIGHUP: "HUP",
    LAUNCHER_LOST_SIGNAL: "the launcher was killed",
}


class NodeAgent:
    """Implements `elastic.Node`."""

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        node: int,
        *,
        zygote_end: socket.socket,
        head_endpoint: tuple[str, int],
        allocation: Allocation | None = None,
    ) -> None:
        self.run_id, self.node, self.node_count = plan.run_id, node, len(plan.nodes)
        self.nproc, self.max_restarts = plan.nproc_per_node, plan.limits.max_restarts
        self.exit_code: int | None = None
        self.gave_up = False
        self._plan, self._run, self._endpoint, self._allocation = plan, run, head_endpoint, allocation
        self._has_joined = False
        self._loop = Loop()
        self._seen = {"attempt": attempt_seen(run, node), "restarts": 0}
        """What this node knows of the attempts, for a head agent whose disk is lost."""
        self._events = EventWriter(run.path, f"node-{node}")
        self._orders: deque[dict[str, Any]] = deque()
        self._head: channel.Connection | None = None
        self._heard_s = self._beat_s = time.monotonic()
        self._office: HeadOffice | None = None
        workers = TorchrunWorkers if plan.engine == "torchrun" else Workers
        self._workers = workers(plan, run, node=node, loop=self._loop, events=self._events, zygote_end=zygote_end)
        self._workers.on_failure = self._report_failure
        self._workers.on_suspect = self._report_suspect
        self._workers.on_done = self._report_done
        self._workers.on_stacks = self._report_stacks
        self._workers.survivors.on_message = self._tell
        self._devices = DeviceWatch(plan, run, node)
        self._preflight = NodePreflight(plan, node, self._loop, self._report_preflight)
        self._workers.spared = lambda: self._devices.pids | self._preflight.pids
        self._loop.on_signals({*_REASONS, *(_WARNINGS if allocation else ())}, self._on_signal)
        self._pending_stops: list[dict[str, Any]] = []

    def serve(self, listener: socket.socket | None) -> None:
        """Run until the head says that the run is over. `listener`: this is node 0, and the head too."""
        me = self._plan.nodes[self.node]
        host = socket.gethostname()
        self._events.write("agent_started", node=self.node, pid=os.getpid(), host=host)
        bound = {"host": host, "address": me.address, "cpus": me.cpus, "gpus": me.gpus}
        given = {name: os.environ[name] for name in (*scratch.VARIABLES, NUMBER) if name in os.environ}
        given |= {variable.name: variable.value for variable in self._plan.env if variable.origin == binding.ORIGIN}
        self._events.write("node_bound", node=self.node, **bound, env=given)
        if listener is not None:
            self._office = HeadOffice(
                self._plan, self._run, self._loop, listener, to_self=self._on_message, allocation=self._allocation
            )
        self._join()
        self._loop.every(HEARTBEAT_S, self._beat)
        self._loop.after(BEGIN_S, self._devices.start)
        if self._plan.forks_workers:
            from launcher.agent.elastic import run_elastic_agent

            run_elastic_agent(self)
        else:
            self._run_without_torch()
        self._preflight.stop()
        self._devices.stop()

    def _run_without_torch(self) -> None:
        """What `elastic.NodeElasticAgent` does, for workers that torch need not be imported for here."""
        while (attempt := self.next_attempt()) is not None:
            self.start_workers(attempt)
            goes_on = self.wait_for_order()
            self.kill_workers()
            if not goes_on:
                return

    # ---------------------------------------------------------------- elastic.Node

    def next_attempt(self) -> Attempt | None:
        """Wait for a start; None when the run is over."""
        while True:
            self._loop.run_until(lambda: bool(self._orders))
            order = self._orders.popleft()
            if order["type"] == "start":
                self._seen = {name: order[name] for name in self._seen}
                return Attempt.from_order(order)
            if order["type"] == "end":
                return None
            self.kill_workers()
            if order["type"] == "rejoin":
                self._join()
            else:  # welcome, kill
                self._tell({"type": "ready"})

    def start_workers(self, attempt: Attempt) -> dict[int, int]:
        """Start one worker per local rank."""
        self._preflight.stop()
        return self._workers.start(attempt)

    def wait_for_order(self) -> bool:
        """True: kill and be ready for the next attempt; the order stays for `next_attempt`. False: over."""
        while True:
            self._loop.run_until(lambda: bool(self._orders))
            if self._orders[0]["type"] != "rejoin" or self._workers.holding is None:
                return bool(self._orders[0]["type"] != "end")
            self._orders.popleft()
            self._join()  # with the workers as they are: what they hold may be the newest there is

    def kill_workers(self) -> None:
        """End the workers and what they left behind."""
        self._preflight.stop()
        self._workers.kill()

    def exit_codes(self) -> dict[int, int | None]:
        """By global rank."""
        return self._workers.exit_codes()

    def failures(self) -> dict[int, tuple[int, int, int, str]]:
        """By global rank."""
        return self._workers.failures()

    # ---------------------------------------------------------------- the head

    def _join(self) -> None:
        if self._office is not None:
            self._office.join_self(socket.gethostname())
            return
        begun_s = time.monotonic()
        token = bytes.fromhex(self._run.token.read_text())
        while self._head is None:
            held_s = begun_s + HOLD_S - time.monotonic()
            if self._workers.holding is not None and held_s <= 0:
                # Of a range of nodes the others may go on without this one from now on: what it holds is old then.
                kept = None if self._plan.is_elastic else self._workers.keep_alone()
                self._events.write("workers_given_up", node=self.node, waited_s=HOLD_S, kept=kept)
                self.kill_workers()
            limit_s = REACH_S if self._workers.holding is None else held_s
            try:
                self._head = channel.connect(self._endpoint, token, self._loop, timeout_s=limit_s)
            except channel.ChannelError as error:
                self._give_up(str(error))
                return
            except OSError as error:
                if self._pending_stops:  # and a head that is gone: the stop is what ended it
                    self._leave()
                    return
                if time.monotonic() - begun_s > self._patience_s(error):
                    self._give_up(self._not_reached(error, time.monotonic() - begun_s))
                    return
                self._loop.run_until(lambda: bool(self._pending_stops), timeout_s=RECONNECT_S)
        self._has_joined = True
        self._head.on_message = self._on_message
        self._head.on_end = self._on_head_lost
        self._heard_s = time.monotonic()
        join = {"type": "join", "node": self.node, "host": socket.gethostname(), "pid": os.getpid()}
        self._tell({**join, "holds": self._workers.holding, "seen": self._seen})
        for stop in self._pending_stops:
            self._tell(stop)

    def _patience_s(self, error: OSError) -> float:
        """How long to try. The node of a head agent that only refuses is up; and whoever was there is soon again."""
        if self._allocation is None or (error.errno == errno.ECONNREFUSED and not self._has_joined):
            return self._plan.limits.join_timeout_s
        return REACH_S - RECONNECT_S

    def _not_reached(self, error: OSError, waited_s: float) -> str:
        where = f"the head agent at {self._endpoint[0]}:{self._endpoint[1]} was not reached"
        if self._allocation is None:
            return f"{where}: {error}"
        me, known = self._plan.nodes[self.node], addresses.own_addresses()
        own = f"{addresses.interface_of(me.address, known)} ({me.address})"
        return (
            f"{where} in {waited_s:.0f} s from {own}: {error.strerror or error}; interfaces: {addresses.listed(known)}"
        )

    def _give_up(self, reason: str) -> None:
        host = self._plan.nodes[self.node].host
        if self._allocation is not None and not self._has_joined:
            fields = {"cause": Cause.RENDEZVOUS.value, "exit_code": 1, "message": reason}
            self._events.write("node_failed", node=self.node, host=host, **fields)
        who = f"node {self.node}" if self._allocation is None else f"node {self.node} ({host})"
        say(self._run.console, f"{who}: {reason}")
        self.gave_up = True
        self._leave()

    def _leave(self) -> None:
        self.exit_code = 1
        self._orders.append({"type": "end"})

    def _on_head_lost(self, reason: str) -> None:
        """The head's process has ended; its successor waits for us on the same endpoint."""
        if self.exit_code is None:
            self._head = None
            self._events.write("head_lost", node=self.node, reason=reason)
            self._orders.append({"type": "rejoin"})

    def _beat(self) -> None:
        """Say that this agent is alive; notice a head agent that is not, or is cut off."""
        clocks = {"attempt": self._workers.attempt, "clocks": self._workers.clocks()}
        self._tell({"type": "heartbeat", **clocks})
        now_s, before_s = time.monotonic(), self._beat_s
        self._beat_s = now_s
        if now_s - before_s > FROZEN_S:
            self._heard_s += now_s - before_s
        if self._head is not None and now_s - self._heard_s > SILENCE_S:
            self._head.end(f"nothing heard for {SILENCE_S:g} s")

    def _tell(self, message: dict[str, Any]) -> None:
        if self._office is not None:
            self._office.hear_self(message)
        elif self._head is not None:
            self._head.send(message)

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        self._heard_s = time.monotonic()
        if kind == "beat":
            return
        if kind == "stop":
            self._workers.stop()
        elif kind == "report":
            self._workers.report(message["attempt"])
        elif kind == "keep":
            to_disk = message.get("to_disk", False)
            self._workers.survivors.keep(message["attempt"], message["rank"], to_disk=to_disk)
        elif kind == "stacks":
            self._workers.show_stacks()
        elif kind == "preflight":
            self._preflight.begin(message["nonce"])
        elif kind == "preflight_go":
            self._preflight.tell(message["peers"])
        elif kind == "end":
            self.exit_code = message["exit_code"]
            self._orders.append(message)
        elif kind == "refused":
            self._give_up(message["reason"])
        else:
            self._orders.append(message)

    def _on_signal(self, signum: int) -> None:
        if self._allocation is not None and signum in _WARNINGS:
            self._tell({"type": "warned", "signum": signum})
            return
        if signum not in _REASONS:
            return  # SIGCHLD of a replaced zygote
        grace_s = LAUNCHER_LOST_GRACE_S if signum == LAUNCHER_LOST_SIGNAL else None
        told = signal.SIGTERM if signum == LAUNCHER_LOST_SIGNAL else signum
        stop = {"type": "stop", "reason": _REASONS[signal.Signals(signum)], "signum": int(told), "grace_s": grace_s}
        if self._office is None and self._head is None:
            self._pending_stops.append(stop)
        self._tell(stop)

    def _report_failure(self, failure: Failure, kind: str = "failed") -> None:
        self._tell({"type": kind, "failure": failure.to_record()})

    def _report_preflight(self, report: dict[str, Any]) -> None:
        self._tell({"type": "preflight", "report": report})

    def _report_suspect(self, failure: Failure) -> None:
        self._report_failure(failure, "suspect")

    def _report_stacks(self, attempt: int, ranks: dict[str, Any]) -> None:
        self._tell({"type": "stacks", "attempt": attempt, "ranks": ranks})

    def _report_done(self, attempt: int, exit_codes: dict[int, int]) -> None:
        codes = {str(rank): code for rank, code in exit_codes.items()}
        self._tell({"type": "done", "attempt": attempt, "exit_codes": codes})
