"""A place where nothing runs: each look at a job plays the next moment of a recorded run into its directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from launcher.errors import Problem
from launcher.executors.base import JobRef
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.observed import Observation
from launcher.runs.rundir import RunDir


@dataclass(frozen=True)
class Happens:
    """One event of a writer."""

    writer: str
    event: str
    fields: dict[str, Any]

    def play(self, run: RunDir) -> None:
        writer = EventWriter(run.path, self.writer)
        writer.write(self.event, **self.fields)
        writer.close()


@dataclass(frozen=True)
class Prints:
    """Text on the console of the run, or on the log of one rank."""

    text: str
    log: str = "console.log"

    def play(self, run: RunDir) -> None:
        path = run.path / "logs" / self.log
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(self.text)


@dataclass(frozen=True)
class Ends:
    """The head agent writes result.json and says that the run has finished."""

    state: str
    cause: str
    exit_code: int
    fields: dict[str, Any] = field(default_factory=dict)

    def play(self, run: RunDir) -> None:
        said = {"state": self.state, "cause": self.cause, "exit_code": self.exit_code}
        run.result.write_text(json.dumps({**_RESULT, **said, **self.fields}))
        Happens("head", "finished", said).play(run)


_RESULT: dict[str, Any] = {
    "first_failure": None,
    "step": None,
    "samples_seen": None,
    "world_size": 2,
    "metrics": {},
    "weights_sha256": None,
    "attempts": 1,
    "restarts": 0,
    "time": {"total_s": 21.2, "start_s": 1.3},
    "samples_per_s": None,
    "checkpoint": {"latest": None, "best": None},
    "stop_reason": None,
}

Moment = Happens | Prints | Ends

STARTS: tuple[Moment, ...] = (
    Happens("supervisor-1", "supervisor_started", {"pid": 1, "host": "here"}),
    *(Happens(f"node-{k}", "agent_started", {"node": k, "pid": 10 + k, "host": "here"}) for k in (0, 1)),
    *(Happens("head", "node_joined", {"node": k}) for k in (0, 1)),
    Happens("head", "attempt_started", {"attempt": 1, "master_addr": "::1", "master_port": 5, "world_size": 2}),
    *(
        Happens(f"node-{k}", "worker_started", {"attempt": 1, "node": k, "rank": k, "local_rank": 0, "pid": 20 + k})
        for k in (0, 1)
    ),
)
SUCCEEDS: tuple[Moment, ...] = (*STARTS, Prints("0:0 hello\n"), Ends("SUCCEEDED", "done", 0))
STOPS: tuple[Moment, ...] = (Prints("0:0 saved\n"), Ends("CANCELLED", "cancelled", 75))


class FakeExecutor:
    """Plays `script`; a request to stop goes on with `when_stopped`, a second one ends the job at once."""

    name: ClassVar[str] = "local"
    script: ClassVar[Sequence[Moment]] = SUCCEEDS
    when_stopped: ClassVar[Sequence[Moment]] = STOPS
    refusals: ClassVar[Sequence[Problem]] = ()
    elsewhere: ClassVar[bool] = False
    """Whether jobs cannot be seen from here."""
    stays: ClassVar[bool] = False
    """Whether a job goes on after the last moment, until it is stopped."""
    jobs: ClassVar[dict[str, list[Moment]]] = {}
    runs: ClassVar[dict[str, RunDir]] = {}
    plans: ClassVar[list[Plan]] = []
    attached: ClassVar[list[bool]] = []
    signals: ClassVar[list[int]] = []

    def check(self, plan: Plan) -> Sequence[Problem]:
        return self.refusals

    def warm(self, run_dir: Path) -> None:
        """Nothing takes long here."""

    def drop(self) -> None:
        """Nothing was begun."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        ident = str(len(self.plans))
        self.plans.append(plan)
        self.attached.append(attached)
        self.jobs[ident], self.runs[ident] = list(self.script), RunDir(Path(run.path))
        return JobRef(self.name, ident)

    def observe(self, ref: JobRef) -> Observation:
        if self.elsewhere:
            return Observation(alive=None)
        moments = self.jobs.get(ref.ident, [])
        if moments:
            moments.pop(0).play(self.runs[ref.ident])
        return Observation(alive=bool(moments) or (self.stays and ref.ident in self.jobs and not self.signals))

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        return {ref: self.observe(ref) for ref in refs}

    def cancel(self, ref: JobRef, *, signum: int, again: bool = False) -> bool:
        self.signals.append(signum)
        self.jobs[ref.ident] = list(self.when_stopped) if len(self.signals) == 1 else []
        return True
