"""The points of a sweep on one machine: as many at a time as fit, each a local run with CPUs and GPUs of its own.

Runs belong to the process of the queue, as runs in the foreground belong to theirs: when it is killed they save and
end, and `launch resume SWEEP` goes on with them and with those that have not begun.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.agent import proc
from launcher.errors import Refused
from launcher.executors.base import JobRef
from launcher.executors.local import LocalExecutor
from launcher.planning.plan import Plan
from launcher.planning.slots import Slot, in_slot
from launcher.runs.create import record_event
from launcher.runs.fold import RunRecord
from launcher.runs.load import read_plan, read_record
from launcher.runs.observed import GONE
from launcher.runs.rundir import RunDir
from launcher.runs.sweep import SweepDir, SweepRecord, make_point

Wait = Callable[[float], Sequence[int]]
"""Waits so many seconds at most, and returns the requests to stop that came."""
Ended = Callable[[int, RunRecord], None]
"""Told of each point that has ended."""

_LOOK_S = 0.1


def queue_ref(pid: int) -> str:
    """The reference of a queue: that of a local job."""
    return str(JobRef("local", f"{socket.gethostname()}:{pid}:{proc.start_time(pid) or 0}"))


class Queue:
    """Runs points of a sweep until none is left, or until it is told to stop."""

    def __init__(self, sweep: SweepDir, record: SweepRecord, indices: Sequence[int], *, ended: Ended) -> None:
        self._sweep, self._ended = sweep, ended
        self._slots = [slot_of(raw) for raw in record.slots] or [Slot(cpus=(), gpus=())]
        self._waiting = deque(indices)
        self._running: dict[int, tuple[int, RunDir, JobRef]] = {}
        self._executor = LocalExecutor()
        self._asked = 0

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._asked > 0

    def run(self, wait: Wait) -> None:
        """Returns when all points have ended, or those that run when a stop came."""
        while self._waiting or self._running:
            for number in range(len(self._slots)):
                while number not in self._running and self._waiting:
                    self._start(number, self._waiting.popleft())
            for signum in wait(_LOOK_S):
                self.stop(signum)
            self._reap()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Begin no more, and pass the request on to what runs. What has not begun can be resumed."""
        self._asked += 1
        self._waiting.clear()
        for _, _, ref in self._running.values():
            self._executor.cancel(ref, signum=signum)

    def _start(self, number: int, index: int) -> None:
        run = self._sweep.point(index)
        try:
            make_point(run)
            plan = read_plan(run)
            plan = in_slot(plan, self._place(plan), self._slots[number])
            _write(run.plan, plan.to_json())
            ref = self._executor.submit(plan, run, attached=True)
        except (OSError, Refused) as error:
            reason = error.problems[0].message if isinstance(error, Refused) else f"{error.filename}: {error.strerror}"
            if run.plan.exists():
                record_event(run, "finished", state="FAILED", cause="refused", exit_code=3, reason=reason)
            self._ended(index, dataclasses.replace(read_record(run, lambda _: GONE), reason=reason))
            return
        record_event(run, "submitted", ref=str(ref))
        self._running[number] = (index, run, ref)

    def _place(self, plan: Plan) -> Slot:
        """The slot that a plan was made for, or had the last time."""
        cpus = {cpu for node in plan.nodes for cpu in node.cpus}
        gpus = {gpu for node in plan.nodes for gpu in node.gpus}
        for slot in self._slots:
            if (cpus or gpus) and cpus <= set(slot.cpus) and gpus <= set(slot.gpus):
                return slot
        return self._slots[0]

    def _reap(self) -> None:
        for number, (index, run, ref) in list(self._running.items()):
            if self._executor.observe(ref).alive is False:
                del self._running[number]
                self._ended(index, read_record(run, lambda _: GONE))


def slot_of(raw: dict[str, Any]) -> Slot:
    """A slot as sweep.json has it."""
    return Slot(cpus=tuple(raw["cpus"]), gpus=tuple(raw["gpus"]), cpu_quota=raw.get("cpu_quota"))


def _write(path: Path, text: str) -> None:
    """Whole, or as it was."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(text, encoding="utf-8")
    made.replace(path)
