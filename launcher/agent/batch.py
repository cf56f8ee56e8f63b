"""The batch side of a SLURM job: once per allocation, on its first node. It starts the agents and outlives them; then
the run goes on in another allocation, or it says how the run has ended.

It never trains and holds no state: what it knows is in the events, so the next allocation needs nothing of this one.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, TypeVar

from launcher import redact
from launcher.agent import allocation, continuing, hostlist, scheduler
from launcher.agent.continuing import AllocationEnd, Progress
from launcher.agent.effects import Finish
from launcher.agent.endpoint import EndpointError, choose_head, head_elsewhere
from launcher.agent.hearing import hear_signals
from launcher.agent.jobstep import LAUNCHER_KILLED, JobStep, JobWatch
from launcher.agent.logs import say
from launcher.agent.result import newest_checkpoint, write_result
from launcher.agent.scheduler import SchedulerError
from launcher.agent.supervisor import wait_for_go
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter, parse_object, read_events
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause, RunState
from launcher.runs.steps import newest_step
from launcher.runs.times import newest_submission

_T = TypeVar("_T")
_REFUSED = 3
_CONTROLLER_S = 600.0
"""How long a controller that is away is asked again for the next allocation."""
_AGAIN_S = 3.0


class BatchError(Exception):
    """The job cannot start as it is."""


def run_batch(run: RunDir, *, wait: bool = False) -> NoReturn:
    """Run one allocation and exit with the run's code; with 0 where the run goes on, or was finished before.

    wait: begin when standard input says so (`attached`: its end means that the launcher is gone), as a local run does.
    """
    signals = hear_signals((signal.SIGUSR1, signal.SIGUSR2))
    watch_fd = wait_for_go(run) if wait else None
    sys.stdout, sys.stderr = redact.RedactedStream(1), redact.RedactedStream(2)
    if _is_over(run):
        say(run.console, "this run is finished: nothing to do (launch resume goes on with it)")
        _leave(0)
    try:
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        _leave(refuse_plan(run, error))
    redact.remember(plan.secrets)
    try:
        number = _number_allocation(run)
        batch = _Batch(plan, run, number, signals, watch_fd)
        code = batch.run()
    except OSError as error:  # its disk is full, read-only or away, or somebody has removed it
        named = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        print(f"launch: the run directory {run.path} cannot be used: {named}", file=sys.stderr)
        code = _REFUSED
    _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_over(run: RunDir) -> bool:
    """By result.json, or by the events where a crash of the machine has spoiled that file. Such a one is put aside."""
    if not run.result.exists():
        return False
    if parse_object(run.result.read_bytes()) is not None:
        return True
    events = read_events(run.path)
    if any(event["event"] == "finished" for event in newest_submission(events) or events):
        return True
    damaged = run.result.with_name("result-damaged.json")
    run.result.rename(damaged)
    say(run.console, f"result.json is damaged, and no event says that the run has ended: it is {damaged.name} now")
    return False


def refuse_plan(run: RunDir, error: Exception) -> int:
    """Say that the plan cannot be read: another version of the launcher is installed by now, or the file is damaged."""
    is_ours = type(error) is ValueError
    why = str(error) if is_ours else f"it is damaged: {error}"
    reason = f"{run.plan} cannot be read: {error.strerror if isinstance(error, OSError) else why}"
    print(f"launch: {reason}", file=sys.stderr)
    if not isinstance(error, OSError):
        number = _number_allocation(run)
        events = EventWriter(run.path, f"batch-{number}")
        events.write("allocation_started", allocation=number, job=job_ident(os.environ), nodes=[])
        end = {"cause": Cause.REFUSED.value, "exit_code": _REFUSED, "reason": reason}
        events.write("allocation_ended", allocation=number, job=job_ident(os.environ), saved=False, **end)
        events.write("finished", state=RunState.FAILED.value, **end)
        say(run.console, f"{RunState.FAILED.value}: {reason}")
    return _REFUSED


def _number_allocation(run: RunDir) -> int:
    """The next number, taken by making the file of its events, which nobody else can then."""
    run.events.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            os.close(os.open(allocation.record_of(run.path, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            number += 1
        else:
            return number


class _Batch:
    def __init__(self, plan: Plan, run: RunDir, number: int, signals: int, watch_fd: int | None) -> None:
        assert plan.slurm is not None
        self._plan, self._run, self._number, self._slurm = plan, run, number, plan.slurm
        self._signals, self._watch_fd = signals, watch_fd
        self._events = EventWriter(run.path, f"batch-{number}")
        self._job = job_ident(os.environ)
        self._watch = JobWatch(self._job, run)
        self._restart_count = _int(os.environ.get("SLURM_RESTART_COUNT"))
        self._said_end = False

    def run(self) -> int:
        """The exit code of the batch script."""
        events = read_events(self._run.path)
        self._close_earlier()
        try:
            refuse_heterogeneous(os.environ)
            hosts = self._hosts()
        except BatchError as error:
            self._events.write("allocation_started", allocation=self._number, job=self._job, nodes=[])
            return self._finish(Finish(RunState.FAILED, Cause.REFUSED, _REFUSED, str(error)))
        if continuing.is_cancelled(events):
            self._events.write("allocation_started", allocation=self._number, job=self._job, nodes=list(hosts))
            reason = "cancelled between two allocations"
            return self._finish(Finish(RunState.CANCELLED, Cause.CANCELLED, 128 + signal.SIGTERM, reason))
        self._run.stop_file.unlink(missing_ok=True)
        left_s = self._ask_end()
        ends_s = None if left_s is None else time.monotonic() + left_s
        try:
            elsewhere = self._plan.executor == "here" and os.environ.get("SLURMD_NODENAME") != hosts[0]
            head = head_elsewhere(hosts) if elsewhere else choose_head(hosts, self._slurm.interface)
        except EndpointError as error:
            self._events.write("allocation_started", allocation=self._number, job=self._job, nodes=list(hosts))
            return self._finish(Finish(RunState.FAILED, Cause.RENDEZVOUS, 1, str(error)))
        address, port = head.endpoint
        where = {"address": address, "port": port, "interface": head.interface}
        started = {"job": self._job, "restart_count": self._restart_count, "nodes": list(hosts), "head": where}
        self._events.write("allocation_started", allocation=self._number, **started, seconds_left=left_s)
        ends = "" if left_s is None else f", {left_s / 60:.0f} min left"
        say(self._run.console, f"allocation {self._number}: job {self._job} on {', '.join(hosts)}{ends}")
        step = JobStep(
            self._plan,
            self._run,
            self._number,
            events=self._events,
            watch=self._watch,
            signals=self._signals,
            watch_fd=self._watch_fd,
            ends_s=ends_s,
        )
        code, said = step.run(head, left_s, nodes=len(hosts))
        return self._after(step, code, said, seconds_left=None if ends_s is None else ends_s - time.monotonic())

    # ---------------------------------------------------------------- before

    def _close_earlier(self) -> None:
        """An allocation whose batch side was lost with its node could not say so."""
        for number in range(1, self._number):
            path = allocation.record_of(self._run.path, number)
            lines = [event for line in path.read_bytes().splitlines() if (event := parse_object(line)) is not None]
            names = [event.get("event") for event in lines]
            others = [allocation.record_of(self._run.path, later) for later in range(number + 1, self._number)]
            mark = f'"allocation_ended", "allocation": {number},'.encode()
            if {"allocation_ended", "finished"} & set(names) or any(mark in other.read_bytes() for other in others):
                continue
            started = next((event for event in lines if event.get("event") == "allocation_started"), {})
            hosts = started.get("nodes") or ["?"]
            fields = {
                "cause": Cause.NODE_LOST.value,
                "reason": f"its first node ({hosts[0]}) was lost, or its batch script was killed there",
                **asdict(self._progress()),
            }
            self._events.write(
                "allocation_ended",
                allocation=number,
                job=started.get("job"),
                saved=False,
                exit_code=1,
                node=0,
                host=hosts[0],
                **fields,
            )

    def _hosts(self) -> tuple[str, ...]:
        """The nodes of the allocation, in its order. Raises BatchError for any number that is not the plan's."""
        text = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST", "")
        wanted = len(self._plan.nodes)
        least = self._plan.min_nodes or wanted
        try:
            hosts = scheduler.host_names(text)
        except SchedulerError:
            try:
                hosts = hostlist.expand(text)
            except ValueError as error:
                if least == 1:
                    return (os.environ.get("SLURMD_NODENAME") or socket.gethostname(),)
                raise BatchError(f"the nodes of the job are not known: {error}") from None
        if self._plan.executor == "here" and len(hosts) > wanted:
            return hosts[:wanted]
        if not least <= len(hosts) <= wanted:
            asked = wanted if least == wanted else f"{least} to {wanted}"
            raise BatchError(f"{asked} nodes were asked for (resources.nodes), and the job has {len(hosts)}: {text}")
        return hosts

    def _ask_end(self) -> float | None:
        try:
            return scheduler.seconds_left(self._job)
        except SchedulerError as error:
            say(self._run.console, f"when the job ends is not known: {error}")
            return None

    # ---------------------------------------------------------------- after

    def _after(self, step: JobStep, srun_exit_code: int | None, srun_said: str, *, seconds_left: float | None) -> int:
        if self._run.result.exists():
            return self._result_code()
        if not self._is_superseded() and not (step.terminated and self._watch.views):
            self._watch.look()  # which takes 15 s where this node is cut off
        if self._is_superseded():
            return 0
        events = read_events(self._run.path)
        if step.user_stop:
            return self._finish(_stopped_by_user(events, step.user_stop))
        end = continuing.end_of_allocation(
            events,
            self._number,
            views=self._watch.views,
            restart_count=self._restart_count,
            seconds_left=seconds_left,
            terminated=step.terminated,
            srun_exit_code=srun_exit_code,
            bad_task=continuing.first_bad_task(srun_said),
            is_elastic=self._plan.is_elastic,
        )
        if isinstance(end, Finish):
            return self._finish(continuing.by_full_disk(end, free_bytes=_free_bytes(self._run.path)))
        if end.cause is Cause.REQUEUED:
            with contextlib.suppress(SchedulerError):
                hosts = self._hosts()
                end = continuing.by_lost_node(end, hosts, scheduler.hosts_down(hosts))
        progress = self._progress()
        self._ended(end.cause, end.reason, saved=end.saved, exit_code=end.exit_code, node=end.node, host=end.host)
        chained = self._next_in_chain(events)
        final = continuing.goes_on(self._plan, end, events, progress, chain_left=chained is not None)
        if final is not None:
            return self._finish(final)
        return self._go_on(end, chained)

    def _is_superseded(self) -> bool:
        """Whether this node was cut off, and the run goes on elsewhere: then nothing of this allocation counts."""
        return allocation.record_of(self._run.path, self._number + 1).exists()

    def _result_code(self) -> int:
        result = parse_object(self._run.result.read_bytes()) or {}
        code = result.get("exit_code")
        reason, cause = str(result.get("reason", "")), str(result.get("cause", ""))
        self._ended(Cause(cause) if cause in set(Cause) else Cause.DONE, reason, exit_code=_int(code))
        return _int(code)

    def _next_in_chain(self, events: Sequence[Mapping[str, object]]) -> str | None:
        """The job that waits for the end of this one."""
        chain = next((event.get("chain") for event in reversed(events) if event.get("chain")), None)
        refs = [str(ref) for ref in chain] if isinstance(chain, list) else []
        own = f"slurm:{self._job}"
        return refs[refs.index(own) + 1] if own in refs[:-1] else None

    def _go_on(self, end: AllocationEnd, chained: str | None) -> int:
        how = "requeue" if end.requeued_already else self._slurm.continue_how
        ref = chained if how == "chain" else f"slurm:{self._job}"
        unreachable = self._watch.unreachable
        if unreachable is not None and end.cause is Cause.NODE_LOST:
            # It may be this node that is lost: nobody is to find a batch script here when it is back.
            return self._not_gone_on(end, how, unreachable)
        try:
            if how == "resubmit":
                ref = f"slurm:{self._persist(end, self._submit, twice=False)}"
            elif how == "requeue" and not end.requeued_already:
                # Written first: SLURM's TERM and KILL may come before the command has ended.
                self._went_on(how, end, ref)
                self._persist(
                    end, lambda: scheduler.requeue(self._job), twice=True
                )  # SLURM has decided by then: who leaves now does not count as completed
                return 0
        except SchedulerError as error:
            if how == "requeue" and self._is_requeued():  # by SLURM, in the meantime
                return 0
            return self._not_gone_on(end, how, error)
        self._went_on(how, end, ref)
        return 0

    def _persist(self, end: AllocationEnd, ask: Callable[[], _T], *, twice: bool) -> _T:
        """Ask the controller until it is back. `twice`: it does no harm if it has heard the question before.

        Not where a node was lost, see above; nor where the run goes on elsewhere already.
        """

        def is_in_vain(error: SchedulerError) -> bool:
            return end.cause is Cause.NODE_LOST or self._is_superseded() or (error.heard and not twice)

        return scheduler.persist(ask, is_in_vain=is_in_vain, limit_s=_CONTROLLER_S, pause_s=_AGAIN_S)

    def _submit(self) -> str:
        return scheduler.submit(self._slurm.script, self._array_flags(), cwd=str(self._run.slurm))

    def _went_on(self, how: str, end: AllocationEnd, ref: str | None) -> None:
        self._events.write("requeued", allocation=self._number, how=how, cause=end.cause.value, ref=ref)
        saved = "saved" if end.saved else "from the newest checkpoint"
        say(self._run.console, f"{end.reason}: goes on in another allocation ({how}, {saved})")

    def _not_gone_on(self, end: AllocationEnd, how: str, error: SchedulerError) -> int:
        if error.unreachable:
            # This node may be cut off, and SLURM requeue the job by itself: a last word from here would be wrong.
            after = "if SLURM does not requeue the job, launch resume"
            say(self._run.console, f"{end.reason}; {how} failed: {error}; {after}")
            return 1
        reason = f"{end.reason}; {how} was refused: {error}"
        state = continuing.NOT_CONTINUED[end.cause]
        return self._finish(Finish(state, end.cause, end.exit_code, reason))

    def _is_requeued(self) -> bool:
        view = self._watch.look()
        return view is not None and view.restarts > self._restart_count

    def _array_flags(self) -> list[str]:
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        return [f"--array={task}"] if task else []

    def _finish(self, finish: Finish) -> int:
        """The run is over, and nobody else has said it."""
        if not self._said_end:
            self._ended(finish.cause, finish.reason, exit_code=finish.exit_code)
        fields = {"state": finish.state.value, "cause": finish.cause.value, "exit_code": finish.exit_code}
        self._events.write("finished", **fields, reason=finish.reason)
        events = read_events(self._run.path)
        attempts = [event["attempt"] for event in events if event["event"] == "attempt_started"]
        restarts = [event["restarts"] for event in events if event["event"] == "restarting"]
        attempt, restart = max(attempts, default=0), max(restarts, default=0)
        write_result(self._run, self._plan, finish, attempt=attempt, restarts=restart, first=None)
        say(self._run.console, f"{finish.state.value}: {finish.reason}")
        print(f"launch: {finish.state.value}: {finish.reason}", file=sys.stderr)
        return finish.exit_code

    def _ended(
        self, cause: Cause, reason: str, *, exit_code: int, saved: bool = False, node: int | None = None, host: str = ""
    ) -> None:
        self._said_end = True
        fields = {"cause": cause.value, "reason": reason, "saved": saved, "exit_code": exit_code}
        place = {"node": node, "host": host, **asdict(self._progress())}
        self._events.write("allocation_ended", allocation=self._number, job=self._job, **fields, **place)

    def _progress(self) -> Progress:
        """The newest step that is known, and a mark of the newest checkpoint."""
        attempts = [event["attempt"] for event in read_events(self._run.path) if event["event"] == "attempt_started"]
        steps = [step for attempt in set(attempts) if (step := newest_step(self._run, attempt)) is not None]
        newest = newest_checkpoint(self._run, self._plan)
        return Progress(step=max(steps, default=None), kept="" if newest is None else _mark(newest))


def _stopped_by_user(events: Sequence[Mapping[str, object]], reason: str) -> Finish:
    stopped = next((event for event in reversed(events) if event["event"] == "stopped"), {})
    cause = Cause.LAUNCHER_LOST if reason == LAUNCHER_KILLED else Cause.CANCELLED
    return Finish(RunState.CANCELLED, cause, _int(stopped.get("exit_code"), 128 + signal.SIGTERM), reason)


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _mark(checkpoint: Path) -> str:
    try:
        return f"{checkpoint.name}:{checkpoint.stat().st_mtime_ns}"
    except OSError:
        return checkpoint.name


def _int(value: object, default: int = 0) -> int:
    if isinstance(value, str):
        return int(value) if value.isdecimal() else default
    return value if isinstance(value, int) else default


def job_ident(env: Mapping[str, str]) -> str:
    """The job in SLURM's words; of an array, `JOB_TASK`."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID", "?")


def refuse_heterogeneous(env: Mapping[str, str]) -> None:
    """A job of several components has several lists of nodes. Raises BatchError."""
    found = sorted(name for name in env if name == "SLURM_HET_SIZE" or "_HET_GROUP_" in name or "_PACK_GROUP_" in name)
    if found:
        raise BatchError(
            f"this is a part of a heterogeneous job ({found[0]} is set), and all nodes of a run are alike: "
            f"submit it as a job of its own"
        )
