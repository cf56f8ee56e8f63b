"""The parent of the agents on a machine: imports once for workers that are forked, forks the agents (all of a local
run; of a SLURM job the one of this node, see `task.py`), stays single-threaded, and sees them out.

It replaces an agent that was killed (its peers wait), passes signals on, and ends the run when the launcher of a
foreground run is gone. It writes no results: that is the head agent's, in the agent of node 0; but for a run that never
has one, because its `setup` failed or what the workers need cannot be imported.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from launcher import redact
from launcher.agent import channel, memory, proc, scratch, zygote
from launcher.agent.allocation import Allocation
from launcher.agent.causes import LAUNCHER_LOST_GRACE_S, LAUNCHER_LOST_SIGNAL
from launcher.agent.effects import Finish
from launcher.agent.hearing import STOP_SIGNALS, hear_signals
from launcher.agent.logs import say
from launcher.agent.node_setup import SetupFailed, SetupStopped, environment_after, next_start, run_setup
from launcher.agent.result import write_result
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause, RunState

ENGINE = ("torch.distributed.elastic.agent.server.api",)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What SLURM sends where it is asked to warn: the head agent decides what it means. Elsewhere the second is ours."""
GAVE_UP = 1
"""Exit code of an agent that did not find the head agent, or was refused."""
_SENT = (*STOP_SIGNALS, *WARNINGS)
_BACKSTOP_S = 3.0
"""Beyond the grace time: an agent that does not end by then is killed, and its zygote ends its workers."""


def supervise(run: RunDir, *, wait: bool, setup_done: bool = False, watch_fd: int | None = None) -> NoReturn:
    """Run all agents of a local run and exit when they have ended.

    wait: do what needs no plan, or what the plan that is there wants, then wait until standard input says `attached` or
    `detached`. Its end instead means that there will be no run; after `attached`, that the launcher is gone.
    setup_done: this is the same process after the plan's `setup`, in its environment; it has `watch_fd` from before.
    """
    read_end = hear_signals()
    proc.adopt_orphans()
    setup_first = False
    if not run.plan.exists():  # started while the plan is made: for one whose workers need torch here
        zygote.preload(ENGINE)
    else:
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
        setup_first = bool(plan.setup) and not setup_done
        if plan.forks_workers and not setup_first:
            zygote.preload(ENGINE)
    if wait:
        watch_fd = wait_for_go(run)
    elif watch_fd is not None:
        os.set_inheritable(watch_fd, False)
    sys.stdout, sys.stderr = redact.RedactedStream(1), redact.RedactedStream(2)
    plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
    redact.remember(plan.secrets)
    if setup_first:
        _set_up(plan, run, signals=read_end, watch_fd=watch_fd)
    scratch.sweep()
    scratch.make(run.run_id)
    memory.forget()
    if plan.worker.kind == "job":
        memory.sweep()
        memory.make(run.run_id)
    # The head's endpoint is this process's too, so the successor of a lost head takes it over with its backlog.
    listener = channel.listen(plan.nodes[0].address)
    try:
        zygote.preload((plan.worker.preload or ()) if plan.forks_workers else ())
        code = Supervisor(plan, run, listener, read_end, watch_fd=watch_fd).run()
    except zygote.PreloadError as error:
        traceback.print_exception(error.__cause__)
        sys.stderr.flush()
        _end_early(plan, run, Finish(RunState.FAILED, Cause.USAGE, 1, str(error)))
    finally:
        scratch.clear()
        memory.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_up(plan: Plan, run: RunDir, *, signals: int, watch_fd: int | None) -> NoReturn:
    """Run the plan's `setup`, then start this process again in the environment that it leaves."""
    lines, cwd = plan.setup, plan.worker.cwd
    end = run_setup(lines, run, cwd=cwd, signals=signals, stop_signals=STOP_SIGNALS, watch_fd=watch_fd)
    if isinstance(end, SetupFailed):
        fields = {"number": end.number, "line": end.line, "output": list(end.output)}
        _end_early(plan, run, Finish(RunState.FAILED, Cause.SETUP, end.exit_code, str(end)), setup=fields)
    if isinstance(end, SetupStopped) and end.signum is None:
        code = 128 + signal.SIGTERM
        _end_early(plan, run, Finish(RunState.CANCELLED, Cause.LAUNCHER_LOST, code, "the launcher was killed"))
    if isinstance(end, SetupStopped):
        reason = f"{signal.Signals(end.signum or 0).name} during `setup`"
        _end_early(plan, run, Finish(RunState.CANCELLED, Cause.CANCELLED, 128 + (end.signum or 0), reason))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a stop that comes now waits for the handlers of the next
    if watch_fd is not None:
        os.set_inheritable(watch_fd, True)
    argv = next_start(sys.orig_argv, watch_fd=watch_fd)
    os.execve(sys.executable, argv, environment_after(dict(os.environb), end))


def _end_early(plan: Plan, run: RunDir, end: Finish, **more: object) -> NoReturn:
    """End a run that has no agent yet, which could say so."""
    fields = {"state": end.state.value, "cause": end.cause.value, "exit_code": end.exit_code, "reason": end.reason}
    EventWriter(run.path, f"supervisor-{os.getpid()}").write("finished", **fields, **more)
    say(run.console, end.reason)
    write_result(run, plan, end, attempt=0, restarts=0, first=None)
    proc.sweep_all()
    scratch.clear()
    memory.clear()
    os._exit(0)


def wait_for_go(run: RunDir) -> int | None:
    """Returns the descriptor to watch, None for a detached run. From here on output goes into the run's log."""
    word = b""
    while not word.endswith(b"\n"):
        word += (byte := os.read(0, 1))
        if not byte:
            os._exit(0)
    log = os.open(run.agents_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    watch_fd = os.dup(0) if word == b"attached\n" else None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return watch_fd


class Supervisor:
    """Forks the agents of these nodes (None: of all), replaces those that are killed, and sees them out.

    `listener`: where agents come to the head agent, on the machine that has node 0. `head`: its address and port, where
    there are other machines. `signals`: see `hear_signals`.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        listener: socket.socket | None,
        signals: int,
        *,
        watch_fd: int | None = None,
        nodes: Sequence[int] | None = None,
        head: tuple[str, int] | None = None,
        allocation: Allocation | None = None,
    ) -> None:
        self._plan, self._run, self._listener, self._head = plan, run, listener, head
        self._signals, self._watch_fd = signals, watch_fd
        self._nodes = [node.index for node in plan.nodes] if nodes is None else nodes
        self._allocation = allocation
        # One writer per file, on all nodes together: two machines may have the same pid.
        writer = "supervisor" if head is None else f"supervisor-{self._nodes[0]}"
        self._events = EventWriter(run.path, f"{writer}-{os.getpid()}")
        self._agents: dict[int, int] = {}
        self._gave_up = False
        self._replaced = 0
        self._stop_by_s: float | None = None
        self._crashed = False
        self._over = False

    def run(self) -> int:
        """Fork, watch, see out; 0 when the agents ended in order (result.json says how the run did), else 70.

        1 where an agent has not found its head agent on another machine.
        """
        address, port = self._endpoint()
        channel_at = {"address": address, "port": port}
        self._events.write("supervisor_started", pid=os.getpid(), host=socket.gethostname(), channel=channel_at)
        for node in self._nodes:
            self._fork(node)
        while self._agents:
            self._wait()
            self._reap()
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                for pid in self._agents.values():
                    proc.send_signal(pid, signal.SIGKILL)
        left = proc.sweep_all()
        code = 70 if self._crashed else GAVE_UP if self._gave_up else 0
        self._events.write("supervisor_ended", exit_code=code, swept=left)
        return code

    def _endpoint(self) -> tuple[str, int]:
        """Of the head agent."""
        if self._head is not None:
            return self._head
        assert self._listener is not None
        address, port = self._listener.getsockname()[:2]
        return address, port

    def _fork(self, node: int) -> None:
        parent = os.getpid()
        # Our handlers do nothing in the agent: a stop stays pending there until it has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SENT)
        pid = os.fork()
        if pid == 0:
            proc.die_with_parent(parent)
            self._close()
            _run_agent(
                self._plan,
                self._run,
                node,
                listener=self._listener,
                endpoint=self._endpoint(),
                allocation=self._allocation,
                is_alone=self._head is not None,
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
        self._agents[node] = pid

    def _close(self) -> None:
        """In a forked agent: what is the supervisor's own is not for the agent, nor for its workers."""
        os.close(signal.set_wakeup_fd(-1))
        os.close(self._signals)
        self._events.close()
        if self._watch_fd is not None:
            os.close(self._watch_fd)

    def _wait(self) -> None:
        fds = [self._signals] + ([self._watch_fd] if self._watch_fd is not None else [])
        timeout_s = None if self._stop_by_s is None else max(0.0, self._stop_by_s - time.monotonic()) + 0.01
        ready, _, _ = select.select(fds, [], [], timeout_s)
        if self._signals in ready:
            for signum in os.read(self._signals, 64):
                if signum in STOP_SIGNALS:
                    self._stop(signum, self._plan.limits.grace_s)
                elif signum in WARNINGS:
                    for pid in self._agents.values():
                        proc.send_signal(pid, signum)
        if self._watch_fd in ready and not os.read(self._watch_fd, 1):
            os.close(self._watch_fd)
            self._watch_fd = None
            self._stop(LAUNCHER_LOST_SIGNAL, LAUNCHER_LOST_GRACE_S)

    def _stop(self, signum: int, grace_s: float) -> None:
        self._end_within(grace_s + _BACKSTOP_S)
        for pid in self._agents.values():
            proc.send_signal(pid, signum)

    def _end_within(self, limit_s: float) -> None:
        by_s = time.monotonic() + limit_s
        self._stop_by_s = by_s if self._stop_by_s is None else min(by_s, self._stop_by_s)

    def _reap(self) -> None:
        while (pid := proc.next_ended_child()) is not None:
            status = proc.reap(pid)
            node = next((index for index, agent in self._agents.items() if agent == pid), None)
            if node is None:
                continue  # an orphan of a killed agent
            del self._agents[node]
            if status != 0:
                self._lost(node, pid, status)
            elif node == 0:
                # The run is over. Who has not joined yet is refused now, instead of waiting for a head.
                self._over = True
                if self._listener is not None:
                    self._listener.close()
                self._end_within(_BACKSTOP_S)

    def _lost(self, node: int, pid: int, status: int) -> None:
        self._events.write("agent_lost", node=node, pid=pid, status=status)
        if self._over:
            return
        killed = os.WIFSIGNALED(status)
        if killed and self._stop_by_s is None and self._replaced <= self._plan.limits.max_restarts:
            self._replaced += 1
            self._fork(node)
            return
        if killed and self._stop_by_s is not None and 0 in self._agents:
            return  # the head agent has another node save what it holds, and ends the run
        if self._head is not None and os.waitstatus_to_exitcode(status) == GAVE_UP:
            self._gave_up = True
            return
        # A crash of ours, or a kill of the head agent during a stop: the others cannot finish without it.
        self._crashed = True
        self._stop(signal.SIGTERM, 0.0)


def _run_agent(
    plan: Plan,
    run: RunDir,
    node: int,
    *,
    listener: socket.socket | None,
    endpoint: tuple[str, int],
    allocation: Allocation | None,
    is_alone: bool,
) -> NoReturn:
    """The forked agent: first its zygote, while this process has neither thread nor socket of its own."""
    from launcher.agent.node import NodeAgent

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    zygote_end = zygote.fork_zygote(close=[] if listener is None else [listener])
    if listener is not None and node != 0:
        listener.close()
    agent = NodeAgent(plan, run, node, zygote_end=zygote_end, head_endpoint=endpoint, allocation=allocation)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
    agent.serve(listener if node == 0 else None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(GAVE_UP if agent.gave_up and is_alone else 0)
