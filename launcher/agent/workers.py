"""The workers of one node: started through the zygote, their output and their ends collected."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent import control, memory, proc, zygote
from launcher.agent.causes import STOPPED_EXIT_CODE, Failure, describe
from launcher.agent.cgroup import memory_group
from launcher.agent.clocks import clock_of
from launcher.agent.logs import LineFile, Stream, Streams, prefixed
from launcher.agent.loop import Loop
from launcher.agent.nsight import nsys_command
from launcher.agent.progress import TELL_EVERY_S, StepClock
from launcher.agent.stacks import StackTaking
from launcher.agent.survivors import Survivors
from launcher.agent.worker import Attempt, Worker, failure_of, read_error, suspicion
from launcher.placeholders import attempt_argv
from launcher.planning.plan import Plan
from launcher.planning.worker_env import worker_env
from launcher.runs.clock import FD_VARIABLE, Phase, StepPage
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir

_LOOK_AT_STACKS_S = 0.1
_WAKE_EVERY_S = 1.0
KILLED = 9
"""As a wait status."""


class Workers:
    """Starts, watches and kills the workers of one node. `on_failure` and `on_done` are called from the loop."""

    def __init__(
        self, plan: Plan, run: RunDir, *, node: int, loop: Loop, events: EventWriter, zygote_end: socket.socket
    ) -> None:
        self.on_failure: Callable[[Failure], None] = lambda failure: None
        self.on_suspect: Callable[[Failure], None] = lambda failure: None
        self.on_done: Callable[[int, dict[int, int]], None] = lambda attempt, exit_codes: None
        self.on_stacks: Callable[[int, dict[str, Any]], None] = lambda attempt, ranks: None
        self.spared: Callable[[], set[int]] = set
        """Children of this process that are not of its workers."""
        self._plan, self._run, self._node, self._loop, self._events = plan, run, node, loop, events
        self._console = LineFile(run.console)
        self.survivors = Survivors(loop, disk=str(run.checkpoints))
        self.survivors.on_peer_lost = self._peer_lost
        self._workers: dict[int, Worker] = {}
        self._prepared: dict[int, tuple[zygote.WorkerStart, tuple[int, ...]]] = {}
        """What to start by local rank, with the descriptors that it gets."""
        self._attempt = 0
        self._empty = True
        self._stopping = False
        self._killing = False
        self._stacks: StackTaking | None = None
        self._clock: StepClock | None = None
        self._memory_dir: str | None = None
        if node == 0 and plan.worker.progress_log is not None:
            loop.every(TELL_EVERY_S, lambda: None if self._clock is None else self._clock.flush())
        self._watch_zygote(zygote_end)
        loop.every(_WAKE_EVERY_S, self._wake_zygote)

    def start(self, order: Attempt) -> dict[int, int]:
        """Start one worker per local rank; return their pids by local rank."""
        self._forget_stacks()
        self._attempt, self._empty, self._killing = order.attempt, False, False
        for worker in self._workers.values():
            worker.page.close()
        self._workers, self._prepared = {}, {}
        pattern = self._plan.worker.progress_log
        self._memory_dir = memory.of_node(self._node) if self._plan.worker.kind == "job" else None
        self.survivors.begin(order.attempt, self._memory_dir)
        self._clock = StepClock(pattern, self._tell_step) if self._node == 0 and pattern is not None else None
        for local_rank in range(self._plan.nproc_per_node):
            self._workers[local_rank] = self._prepare(local_rank, order)
        self._begin(order)
        return {worker.local_rank: worker.pid for worker in self._workers.values()}

    def _begin(self, order: Attempt) -> None:
        """Start what was prepared, and wait until it is there."""
        for start, fds in self._prepared.values():
            self._send(start, fds)
        self._loop.run_until(lambda: all(worker.pid for worker in self._workers.values()))
        if self._stopping:
            self.stop()

    def stop(self) -> None:
        """Ask every worker, those of a start in progress included, to save and leave."""
        self._stopping = True
        pids = [worker.pid for worker in self._workers.values() if worker.pid and worker.exit_code is None]
        if pids:
            self._tell({"term": pids})

    def show_stacks(self) -> None:
        """Have every worker that runs write its stacks into its log, and into that alone: they are many lines.

        `on_stacks` is called once with where they are.
        """
        self._forget_stacks()
        self._stacks = taking = StackTaking(self._signalled())
        self._loop.after(_LOOK_AT_STACKS_S, lambda: self._look_at_stacks(taking))

    def _look_at_stacks(self, taking: StackTaking) -> None:
        if self._stacks is not taking:
            return  # of an attempt that is over, or asked for once more
        if not taking.done:
            self._loop.after(_LOOK_AT_STACKS_S, lambda: self._look_at_stacks(taking))
            return
        told = taking.result()
        taking.close()  # what comes late is still known to be an answer
        self.on_stacks(self._attempt, told)

    def _forget_stacks(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    @property
    def attempt(self) -> int:
        """The newest."""
        return self._attempt

    def clocks(self) -> dict[str, list[Any]]:
        """The step clock of each worker that runs, by its rank as text: what a heartbeat carries."""
        return {
            str(each.rank): clock_of(
                each.page.read(), each.pid, started_s=each.started_s, output_s=each.output_s
            ).to_message()
            for each in self._alive()
        }

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pid > 0 and worker.exit_code is None]

    def report(self, attempt: int) -> None:
        """Have those that live let go of their peers, and say what they hold."""
        self.survivors.report(attempt, {worker.rank: worker.pid for worker in self._alive()})

    def keep_alone(self) -> int | None:
        """Have the newest state of those that live kept in memory, though nobody asks. Returns its step."""
        pids = {worker.rank: worker.pid for worker in self._alive()}
        return None if self.holding is None else self.survivors.keep_alone(self.holding, pids)

    def _signalled(self) -> dict[int, int]:
        """The pids of those that know STACKS_SIGNAL, by rank: the pid of a wrapped one is that of another program."""
        return {worker.rank: worker.pid for worker in self._alive() if not worker.is_wrapped}

    @property
    def holding(self) -> int | None:
        """The attempt of the workers that are there and could keep their state; None where there are none."""
        return self._attempt if self._plan.rescue and not self._empty and not self._killing else None

    def kill(self) -> None:
        """End every worker and whatever it left behind; return when nothing is left."""
        if not self._empty:
            self._killing = True
            self._tell({"kill": True})
            self._loop.run_until(lambda: self._empty)

    def exit_codes(self) -> dict[int, int | None]:
        """Exit code by global rank, None for one that runs."""
        return {worker.rank: worker.exit_code for worker in self._workers.values()}

    def failures(self) -> dict[int, tuple[int, int, int, str]]:
        """local rank, pid, exit code and error file of the workers that failed, by global rank."""
        return {
            worker.rank: (worker.local_rank, worker.pid, worker.exit_code, str(worker.error_file))
            for worker in self._workers.values()
            if worker.exit_code is not None and worker.failed
        }

    # ---------------------------------------------------------------- one worker

    def _prepare(self, local_rank: int, order: Attempt) -> Worker:
        plan, node = self._plan, self._plan.nodes[self._node]
        members = range(len(plan.nodes)) if order.members is None else order.members
        rank = members.index(self._node) * plan.nproc_per_node + local_rank
        log = self._run.log(attempt=order.attempt, node=self._node, rank=rank)
        error_file = log.with_suffix(".error.json")
        error_file.unlink(missing_ok=True)
        env = worker_env(
            plan,
            node=self._node,
            local_rank=local_rank,
            attempt=order.attempt,
            restarts=order.restarts,
            master_addr=order.master_addr,
            master_port=order.master_port,
            error_file=str(error_file),
            newest=order.newest,
            members=order.members,
            memory_dir=self._memory_dir,
            memory_counts=order.memory_counts,
        )
        work = plan.worker
        before = nsys_command(plan, self._run, attempt=order.attempt, rank=rank)
        start = zygote.WorkerStart(
            local_rank=local_rank,
            env=env,
            env_unset=plan.env_unset,
            cwd=work.cwd,
            cpus=node.cpus,
            module=work.module,
            script=work.script,
            module_folder=self._module_folder() if work.kind == "script" and work.module is not None else None,
            argv=attempt_argv(work.argv, work.resume_argv, attempt=order.attempt, newest=order.newest),
            python=None if plan.forks_workers and not before else work.python,
            before=before,
            inherits=(FD_VARIABLE, control.FD_VARIABLE) if plan.rescue else (FD_VARIABLE,),
        )
        file = LineFile(log)
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        worker = Worker(
            attempt=order.attempt,
            node=self._node,
            local_rank=local_rank,
            rank=rank,
            is_alone=len(members) * plan.nproc_per_node == 1,
            log=log,
            error_file=error_file,
            file=file,
            streams=Streams(self._loop),
            page=StepPage.create(),
            is_wrapped=bool(before),
        )
        for fd, is_stderr in ((out_read, False), (err_read, True)):
            self._watch_stream(worker, fd, is_stderr=is_stderr)
        more = (self.survivors.add(rank),) if plan.rescue else ()
        self._prepared[local_rank] = (start, (out_write, err_write, os.dup(worker.page.fd), *more))
        return worker

    def _send(self, start: zygote.WorkerStart, fds: Sequence[int]) -> None:
        try:
            # To a zygote that has died: its end is about to be heard, and fails this worker.
            with contextlib.suppress(ConnectionError):
                zygote.send_start(self._zygote, start, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _module_folder(self) -> str:
        """Where a module of the user's is found: in the copy of his code, where there is one."""
        code = self._plan.code
        return str(self._run.code) if code is not None and code.snapshot else self._plan.worker.cwd

    def _watch_stream(self, worker: Worker, fd: int, *, is_stderr: bool) -> None:
        def take(lines: bytes) -> None:
            worker.file.write(lines)
            is_answer = is_stderr and self._stacks is not None and self._stacks.feed(worker.rank, lines)
            worker.words.add(lines, is_stderr=is_stderr and not is_answer)
            if not is_answer if is_stderr else worker.rank == 0:
                self._console.write(prefixed(lines, f"{self._node}:{worker.rank}"))

        def look(data: bytes) -> None:
            if not (is_stderr and self._stacks is not None and self._stacks.awaits(worker.rank)):
                worker.output_s = time.monotonic()  # what we have asked for shows no progress
            if self._clock is not None and worker.rank == 0:
                self._clock.feed(fd, data)

        worker.streams.add(Stream(fd, take, look))

    def _tell_step(self, step: int) -> None:
        self._events.write("progress", attempt=self._attempt, step=step)
        for worker in self._workers.values():
            if worker.rank == 0:
                worker.page.mark(Phase.STEP, step)

    def _ended(self, worker: Worker, status: int) -> None:
        self.survivors.ended(worker.rank)
        worker.streams.close()
        if self._clock is not None:
            self._clock.end() if worker.rank == 0 else self._clock.flush()
        worker.file.close()
        worker.exit_code = proc.exit_code(status)
        error = read_error(worker.error_file) if worker.exit_code else None
        self._events.write(
            "worker_ended",
            attempt=self._attempt,
            node=self._node,
            rank=worker.rank,
            pid=worker.pid,
            exit_code=worker.exit_code,
            error=describe(worker.exit_code, error) if worker.exit_code not in (0, STOPPED_EXIT_CODE) else None,
        )
        if worker.failed:
            self.on_failure(failure_of(worker, error, self._run, by_us=self._killing))
        elif all(other.exit_code in (0, STOPPED_EXIT_CODE) for other in self._workers.values()):
            self.on_done(self._attempt, {other.rank: other.exit_code or 0 for other in self._workers.values()})

    def _peer_lost(self, rank: int, message: str, step: int | None) -> None:
        worker = next(worker for worker in self._workers.values() if worker.rank == rank)
        self.on_suspect(suspicion(worker, message, step, self._run))

    # ---------------------------------------------------------------- the zygote

    def _wake_zygote(self) -> None:
        """A zygote that somebody has stopped neither starts nor ends anything, nor says who has ended."""
        for pid in self._zygotes():
            if proc.is_stopped(pid):
                self._events.write("zygote_woken", node=self._node, pid=pid)
                proc.send_signal(pid, signal.SIGCONT)

    def _zygotes(self) -> list[int]:
        """The pids of those that are there, as far as they have said them."""
        return [self._zygote_pid] if self._zygote_pid else []

    def _watch_zygote(self, zygote_end: socket.socket) -> None:
        self._zygote_pid = 0
        self._zygote = zygote_end
        self._loop.add(zygote_end, self._hear)

    def _hear(self) -> None:
        try:
            data = self._zygote.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._replace_zygote()
            return
        self._on_report(json.loads(data))

    def _on_report(self, message: Mapping[str, Any]) -> None:
        """What a zygote says."""
        if "zygote" in message:
            self._zygote_pid = message["zygote"]
        elif "started" in message:
            worker = self._workers[message["started"]]
            worker.pid = message["pid"]
            worker.memory = memory_group(worker.pid)
            worker.oom_kills = worker.memory.oom_kills() if worker.memory else 0
            self._events.write(
                "worker_started",
                attempt=self._attempt,
                node=self._node,
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.pid,
            )
        elif "ended" in message:
            for worker in self._workers.values():
                if worker.pid == message["ended"] and worker.exit_code is None:
                    self._ended(worker, message["status"])
        elif "empty" in message:
            self._empty = True

    def _replace_zygote(self) -> None:
        """The zygote died, and its workers with it (parent-death signal). Start another from a fresh interpreter."""
        self._loop.remove(self._zygote)
        self._zygote.close()
        proc.sweep(self.spared())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = ("torch", *(self._plan.worker.preload or ())) if self._plan.forks_workers else ()
        argv = zygote.exec_argv(self._plan.worker.python, theirs.fileno(), modules)
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._events.write("zygote_replaced", node=self._node, pid=process.pid)
        self._watch_zygote(ours)
        self._empty = True
        for worker in self._workers.values():
            if worker.exit_code is None:
                if worker.pid:
                    # Its loader processes: they have no parent-death signal, and the supervisor as their parent now.
                    proc.kill_group(worker.pid, of_another=True)
                worker.pid = worker.pid or -1
                self._ended(worker, KILLED)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._zygote.send(json.dumps(message).encode())
        except ConnectionError:
            return  # its end is about to be heard
