"""Where a plan runs: everything an executor has to be, and the table that finds one by name."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from launcher.errors import Problem, RecipeError
from launcher.runs.observed import Observation

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

EXECUTORS = {
    "local": "launcher.executors.local:LocalExecutor",
    "slurm": "launcher.executors.slurm:SlurmExecutor",
    "here": "launcher.executors.here:HereExecutor",
    "ssh": "launcher.executors.ssh:SshExecutor",
    "docker": "launcher.executors.docker:DockerExecutor",
    "sky": "launcher.executors.sky:SkyExecutor",
}
"""Name of `--on` -> where its class is, imported on use. A profile is no executor: it names one.

A new executor is one file and one line here.
"""


@dataclass(frozen=True)
class JobRef:
    """A job in the words of its executor: `local:host:pid:start`. Printable, parsable."""

    executor: str
    ident: str
    following: tuple[str, ...] = field(default=(), compare=False)
    """Jobs that were asked for together with it, each of which begins when the one before has ended."""
    said: tuple[str, ...] = field(default=(), compare=False)
    """What its place has said besides: warnings, who pays."""

    def __str__(self) -> str:
        return f"{self.executor}:{self.ident}"

    @classmethod
    def parse(cls, text: str) -> JobRef:
        """Read a printed reference. Raises ValueError for anything else."""
        executor, separator, ident = text.partition(":")
        if not separator or not ident:
            raise ValueError(f"{text!r} is not a job reference such as local:host:1234:5678")
        return cls(executor, ident)


class Executor(Protocol):
    """A place where agents run: four verbs, and a head start for a place where a person waits."""

    name: ClassVar[str]

    def check(self, plan: Plan) -> Sequence[Problem]:
        """Why this plan cannot run here. No side effects."""

    def warm(self, run_dir: Path) -> None:
        """Begin what `submit` for this run directory will need whatever the plan says. Leaves no trace."""

    def drop(self) -> None:
        """Undo `warm` where no `submit` came; else nothing."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Start one agent per node and return at once. Attached: the run ends with this process."""

    def observe(self, ref: JobRef) -> Observation:
        """What the place says now. Never raises for an unknown job."""

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        """The same of many jobs, at the price of one question."""

    def cancel(self, ref: JobRef, *, signum: int, again: bool = False) -> bool:
        """Pass a request to stop (TERM, INT or HUP) on. `again`: it is the second, which ends the run at once.

        False: nothing to stop.
        """


def observe_job(ref: str) -> Observation:
    """What the place of a job says about it now, by its printed reference."""
    return observe_jobs([ref])[ref]


def observe_jobs(refs: Sequence[str]) -> dict[str, Observation]:
    """The same of many jobs, wherever they are: one question to each place."""
    places: dict[str, dict[JobRef, str]] = {}
    for ref in refs:
        job = JobRef.parse(ref)
        places.setdefault(job.executor, {})[job] = ref
    seen: dict[str, Observation] = {}
    for name, jobs in places.items():
        told = get_executor(name).observe_all(list(jobs))
        seen |= {ref: told[job] for job, ref in jobs.items()}
    return seen


_ASK_EVERY_S = {"slurm": 3.0, "sky": 20.0}
"""How often a place is asked about a job that is waited for: each question to a scheduler is one to all its users."""


class Watcher:
    """Asks about jobs again and again, but not more often than their places like. Else it repeats the last answer."""

    def __init__(self, observe: Callable[[str], Observation] = observe_job) -> None:
        self._observe = observe
        self._said: dict[str, tuple[float, Observation]] = {}

    def __call__(self, ref: str) -> Observation:
        """What the place said when it was last asked: now, or some seconds ago."""
        asked_s, seen = self._said.get(ref, (-math.inf, Observation(alive=None)))
        if time.monotonic() - asked_s >= _ASK_EVERY_S.get(JobRef.parse(ref).executor, 0.0):
            seen = self._observe(ref)
            self._said[ref] = time.monotonic(), seen
        return seen

    def forget(self) -> None:
        """Ask again at once: something is known to have changed since."""
        self._said.clear()


def get_executor(name: str) -> Executor:
    """The executor of `--on NAME`. Raises RecipeError for an unknown one."""
    if name not in EXECUTORS:
        raise RecipeError(
            [Problem(where="--on", message=f"{name!r} is not a place", hint=f"one of: {', '.join(EXECUTORS)}")]
        )
    module, _, attribute = EXECUTORS[name].partition(":")
    executor: Executor = getattr(importlib.import_module(module), attribute)()
    return executor
