"""The job step of an allocation: one task on each node, started by srun and seen out; and what is heard meanwhile.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from launcher.agent import allocation, scheduler
from launcher.agent.endpoint import Head
from launcher.agent.logs import say
from launcher.agent.scheduler import JobView, SchedulerError
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter, read_lines, time_of
from launcher.runs.rundir import RunDir
from launcher.wording import signal_name

LAUNCHER_KILLED = "the launcher was killed"
_LOOK_S = 0.5
_SRUN_LATE_S = 15.0
"""How long tasks may still be there once the head agent has said how it ended."""
_LAST_WORD_S = 2.0
"""Before SLURM's KILL: by then the end is written down, whether the tasks have left or not."""
_TAIL_BYTES = 4096
_OWN_WORDS = 3
"""`srun --nodes=N --ntasks=N`: what follows may hold words of the user's."""


class JobWatch:
    """What SLURM says of the job, each time that it is asked."""

    def __init__(self, job: str, run: RunDir) -> None:
        self._job, self._run = job, run
        self.views: list[JobView] = []
        """Oldest first."""
        self.unreachable: SchedulerError | None = None
        """Why SLURM could not be asked the last time."""

    def look(self) -> JobView | None:
        """Ask now. None: there is no answer."""
        try:
            view = scheduler.job_view(self._job)
        except SchedulerError as error:
            self.unreachable = error if error.unreachable else None
            say(self._run.console, f"SLURM cannot be asked about this job: {error}")
            return None
        self.unreachable = None
        self.views.append(view)
        return view


class JobStep:
    """The step of the allocation of this number.

    signals: see `supervisor.hear_signals`. watch_fd: its end means that the launcher is gone; None where there is none.
    ends_s: when SLURM ends the job, by the monotonic clock.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        number: int,
        *,
        events: EventWriter,
        watch: JobWatch,
        signals: int,
        watch_fd: int | None,
        ends_s: float | None,
    ) -> None:
        assert plan.slurm is not None
        self._plan, self._run, self._number, self._slurm = plan, run, number, plan.slurm
        self._events, self._watch, self._ends_s = events, watch, ends_s
        self._signals, self._watch_fd = signals, watch_fd
        self._kill_by_s: float | None = None
        self._begun_s = 0.0
        self.user_stop = ""
        """Why the user's own terminal has ended it, with `--on here`; empty: it has not."""

    @property
    def terminated(self) -> bool:
        """Whether SLURM has sent TERM to the batch script to end the job."""
        return self._kill_by_s is not None

    def run(self, head: Head, left_s: float | None, *, nodes: int) -> tuple[int | None, str]:
        """Start the agents and see them out: srun's exit code (None: it was not waited for) and its standard error.

        nodes: how many the job has.
        """
        self._begun_s = time.time()
        folder = self._run.slurm
        folder.mkdir(exist_ok=True)
        said = folder / f"srun-{self._number}.log"
        told = allocation.to_environment(self._number, head.endpoint, left_s, nodes=nodes)
        env = {**os.environ, **told, "LAUNCH_RUN_ID": self._plan.run_id}
        argv = on_nodes(self._slurm.srun, nodes)
        with said.open("ab") as log:
            try:
                srun = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log, env=env, start_new_session=True)
            except OSError as error:
                return 127, f"{argv[0]}: {error.strerror}"
        code = self._see_out(srun)
        if head.holder is not None:
            head.holder.close()
        return code, said.read_text(encoding="utf-8", errors="replace")

    def _see_out(self, srun: subprocess.Popen[bytes]) -> int | None:
        late_s: float | None = None
        while (code := srun.poll()) is None:
            self._wait(srun)
            if not self._watch.views and self._run.stop_file.exists():
                self._watch.look()
            now_s = time.monotonic()
            if self._kill_by_s is not None and now_s > self._kill_by_s:
                return None
            if late_s is None:
                late_s = self._late_s(now_s)
            if late_s is not None and now_s > late_s:
                return _end(srun)
        return code

    def _wait(self, srun: subprocess.Popen[bytes]) -> None:
        fds = [self._signals] + ([self._watch_fd] if self._watch_fd is not None else [])
        ready, _, _ = select.select(fds, [], [], _LOOK_S)
        if self._signals in ready:
            with contextlib.suppress(BlockingIOError):
                for signum in os.read(self._signals, 64):
                    self._heard(signum, srun)
        if self._watch_fd is not None and self._watch_fd in ready and not os.read(self._watch_fd, 1):
            os.close(self._watch_fd)
            self._watch_fd = None
            self.user_stop = LAUNCHER_KILLED
            self._ask_to_stop(self.user_stop)

    def _heard(self, signum: int, srun: subprocess.Popen[bytes]) -> None:
        """SLURM signals the tasks itself, but where it was told to signal only us."""
        if signum == signal.SIGCHLD:
            return
        name = signal_name(signum)
        left_s = None if self._ends_s is None else round(self._ends_s - time.monotonic(), 1)
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            ignored = left_s is not None and left_s > 2 * self._plan.limits.grace_s
            self._events.write("signal_heard", signal=name, seconds_left=left_s, ignored=ignored)
            srun.send_signal(signum)  # srun passes these on; the head agent decides
            return
        self._events.write("signal_heard", signal=name, seconds_left=left_s, ignored=False)
        if self._plan.executor == "here":
            if self.user_stop:
                srun.send_signal(signal.SIGTERM)  # the second one: at once (srun kills on TERM)
            self.user_stop = self.user_stop or {signal.SIGINT: "Ctrl-C"}.get(signal.Signals(signum), name)
            self._ask_to_stop(self.user_stop)
            return
        view = self._watch.look()
        if view is None or view.state == "RUNNING":
            self._ask_to_stop(name)
        if view is None or view.state != "RUNNING":
            by_s = time.monotonic() + self._slurm.kill_wait_s - _LAST_WORD_S
            self._kill_by_s = by_s if self._kill_by_s is None else min(by_s, self._kill_by_s)

    def _ask_to_stop(self, reason: str) -> None:
        """Never by TERM to srun: that kills its tasks at once."""
        path = allocation.stop_request(self._run.path, self._number)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(f"{reason}\n")
        unfinished.rename(path)

    def _late_s(self, now_s: float) -> float | None:
        """When the tasks are late, once the head agent has said how it ended. Those of a lost node never leave."""
        if self._run.result.exists():
            return now_s + _SRUN_LATE_S
        if self._plan.is_elastic and self._has_no_head():  # a step of a fixed size is ended by srun
            return now_s
        path = self._run.events / "head.jsonl"
        mark = f'"allocation": {self._number}'
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in file:
                if b'"stopped"' in line and mark.encode() in line:
                    return now_s + (_LOOK_S if b'"node_lost"' in line else _SRUN_LATE_S)
        return None

    def _has_no_head(self) -> bool:
        """Whether node 0, which is this one, could not begin in this allocation."""
        said = read_lines(self._run.events / "node-0.jsonl")
        return any(event.get("event") == "node_failed" and time_of(event) >= self._begun_s for event in said)


def on_nodes(srun: Sequence[str], nodes: int) -> list[str]:
    """The plan's line for as many nodes as the job has: of MIN:MAX, perhaps fewer than the most."""
    sizes = ("--nodes=", "--ntasks=")
    own = [f"{word.partition('=')[0]}={nodes}" if word.startswith(sizes) else word for word in srun[:_OWN_WORDS]]
    return [*own, *srun[_OWN_WORDS:]]


def _end(srun: subprocess.Popen[bytes]) -> int | None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        srun.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return srun.wait(2)
    return None
