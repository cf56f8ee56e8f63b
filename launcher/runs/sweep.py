"""The directory of a sweep, and the run directories of its points, which are made when they are needed.

    RUNS/SWEEP/            sweep.json  base.json  points.jsonl    what the points are
                           recipe.yaml  launch.json  code.json    as in a run directory, once for all points
                           code/  agent/                          the one copy of the code; our agent, where it travels
                           events/  slurm/  logs/                 what was submitted; batch scripts; the local queue
    RUNS/SWEEP.INDEX/      an ordinary run directory

A thousand folders with their files take longer than a thousand jobs: a point gets its own when it starts, on whichever
machine, or when somebody asks for it. It appears whole, or not at all. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import redact
from launcher.planning.plan import Plan
from launcher.planning.points import Line, plan_of, point_id, split_point_id
from launcher.runs.events import Event, parse_object, read_events, time_of
from launcher.runs.rundir import RunDir
from launcher.wording import ranges

SWEEP_VERSION = 1
_SHARED = ("recipe.yaml", "launch.json", "code.json", "code")
"""Of the sweep; its points have links to them."""


@dataclass(frozen=True)
class SweepDir:
    """Paths of one sweep."""

    path: Path

    @property
    def sweep_id(self) -> str:
        """The folder's name is the id."""
        return self.path.name

    @property
    def run(self) -> RunDir:
        """The names that it shares with a run directory."""
        return RunDir(self.path)

    @property
    def record(self) -> Path:
        """What all points share: who, when, where, which keys."""
        return self.path / "sweep.json"

    @property
    def base(self) -> Path:
        """The plan of point 0."""
        return self.path / "base.json"

    @property
    def points(self) -> Path:
        """One line for each point, in order."""
        return self.path / "points.jsonl"

    @property
    def queue_log(self) -> Path:
        """What the queue of a sweep on one machine says."""
        return self.path / "logs" / "queue.log"

    @property
    def is_there(self) -> bool:
        """Whether it is a sweep, and was not moved or deleted."""
        return os.path.isfile(self.record)  # noqa: PTH113 - Path.is_file raises for a name that no file can have

    def point(self, index: int) -> RunDir:
        """Where the run directory of a point is, or will be."""
        return RunDir(self.path.with_name(point_id(self.sweep_id, index)))


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The content of sweep.json."""

    version: int = SWEEP_VERSION
    sweep_id: str
    name: str
    executor: str
    created_s: float
    """Seconds since the epoch."""
    points: int
    """How many."""
    keys: tuple[str, ...]
    """What is varied, in the order in which it was written."""
    metric: str | None
    """`eval/loss min`: what the points are compared by; None: what the newest evaluation says."""
    max_parallel: int | None
    command: tuple[str, ...] = ()
    user: str = ""
    host: str = ""
    slots: tuple[dict[str, Any], ...] = ()
    """On one machine: `{cpus, gpus, cpu_quota}` of each point that may run at a time."""
    secrets: tuple[str, ...] = ()

    def to_json(self) -> str:
        """As text."""
        return json.dumps(vars(self), indent=1, ensure_ascii=False) + "\n"


def read_sweep(sweep: SweepDir) -> SweepRecord | None:
    """What is known of a sweep; None where it is none, is spoiled, or is one of another version."""
    try:
        raw = parse_object(sweep.record.read_bytes())
        if raw is None or raw.get("version") != SWEEP_VERSION:
            return None
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        return SweepRecord(**values)
    except (FileNotFoundError, NotADirectoryError, TypeError):
        return None


def sweep_of(run: RunDir) -> tuple[SweepDir, int] | None:
    """The sweep that a run directory is, or would be, a point of, and its index."""
    parts = split_point_id(run.run_id)
    if parts is None:
        return None
    sweep = SweepDir(run.path.with_name(parts[0]))
    return (sweep, parts[1]) if sweep.is_there else None


def point_lines(sweep: SweepDir) -> Iterator[Line]:
    """What the file says of each point, in order."""
    with sweep.points.open("rb") as file:
        for text in file:
            if (line := parse_object(text)) is not None:
                yield line


def point_plan(sweep: SweepDir, index: int) -> dict[str, Any] | None:
    """The plan of a point, as a document; None where there is no such point."""
    first: Line | None = None
    with sweep.points.open("rb") as file:
        for number, text in enumerate(file):
            if number in (0, index):
                line = parse_object(text)
                first = line if number == 0 else first
                if number == index and line is not None and first is not None:
                    return plan_of(sweep.base.read_text(encoding="utf-8"), first, line)
    return None


# ---------------------------------------------------------------- what was submitted


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Some points, in one job array, or as one local queue."""

    ref: str
    """`slurm:JOB`, `local:host:pid:start` of the queue."""
    offset: int
    """Index of a point = offset + number of its task."""
    tasks: frozenset[int]
    time_s: float

    @property
    def is_array(self) -> bool:
        """Whether each point is a job of its own already."""
        return self.ref.startswith("slurm:")

    def ref_of(self, index: int) -> str | None:
        """The job of a point, if it was part of this array."""
        task = index - self.offset
        return f"{self.ref}_{task}" if self.is_array and task in self.tasks else None


def submissions(events: Iterable[Event]) -> list[Submission]:
    """All of a sweep, oldest first."""
    return [
        Submission(
            ref=str(event.get("ref", "")),
            offset=int(event.get("offset", 0)),
            tasks=frozenset(parse_tasks(str(event.get("tasks", "")))),
            time_s=time_of(event),
        )
        for event in events
        if event["event"] == "array_submitted"
    ]


def format_tasks(tasks: Iterable[int]) -> str:
    """As `sbatch --array` takes them: `0-3,7`."""
    return ranges(sorted(tasks))


def parse_tasks(text: str) -> Iterator[int]:
    """`0-3,7` as numbers."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


# ---------------------------------------------------------------- the run directory of a point


def make_point(run: RunDir) -> bool:
    """Make the run directory of a point where there is none yet. False: it is no point of a sweep.

    Whoever comes second finds what the first one has made. Raises OSError.
    """
    if os.path.exists(run.plan):  # noqa: PTH110 - as above
        return True
    found = sweep_of(run)
    if found is None:
        return False
    sweep, index = found
    plan, record = point_plan(sweep, index), read_sweep(sweep)
    if plan is None or record is None:
        return False
    redact.remember(record.secrets)
    folder = run.path.with_name(f".{run.run_id}.{os.getpid()}-{time.time_ns()}")
    folder.mkdir(mode=sweep.path.stat().st_mode & 0o777)
    try:
        _fill(RunDir(folder), sweep, record, plan, index)
        folder.rename(run.path)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if run.plan.exists():  # somebody else was faster
            return True
        raise
    return True


def _fill(made: RunDir, sweep: SweepDir, record: SweepRecord, plan: Mapping[str, Any], index: int) -> None:
    text = json.dumps(plan, indent=1, ensure_ascii=False) + "\n"
    made.plan.write_text(text, encoding="utf-8")
    # JSON is YAML, and the library that writes YAML is not everywhere where a point starts.
    made.resolved.write_text(_resolved_text(Plan.from_json(text)), encoding="utf-8")
    for name in _SHARED:
        if os.path.lexists(sweep.path / name):
            (made.path / name).symlink_to(Path("..") / sweep.sweep_id / name)
    if sweep.run.agent_code.is_dir():
        shutil.copytree(sweep.run.agent_code, made.agent_code)
    made.write_token()
    for folder in (made.console.parent, made.checkpoints, made.events):
        folder.mkdir()
    if plan.get("slurm"):
        made.slurm.mkdir()
    _write_events(made, sweep, record, index)


def _write_events(made: RunDir, sweep: SweepDir, record: SweepRecord, index: int) -> None:
    """What was done for the whole sweep, at the time when it was done; in a queue of ours, no time is a point's own."""
    created_s = time.time() if record.slots else record.created_s
    writer = f"launch-{int(created_s * 1000)}-0"
    created = {"command": list(record.command), "user": record.user, "host": record.host}
    lines: list[Event] = [{"time": round(created_s, 4), "writer": writer, "event": "created", **created}]
    for submission in submissions(read_events(sweep.path)):
        if (ref := submission.ref_of(index)) is not None:
            lines.append({"time": submission.time_s, "writer": writer, "event": "submitted", "ref": ref, "chain": []})
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (made.events / f"{writer}.jsonl").write_bytes(redact.own().data(data.encode(errors="backslashreplace")))


def _resolved_text(plan: Plan) -> str:
    """As `create.resolved_recipe` has it, in the part of YAML that is JSON."""
    paths = {"workdir": plan.worker.cwd, "script": plan.live_script, "extends": None}
    recipe = {key: value for key, value in {**plan.recipe, **paths}.items() if value is not None}
    return json.dumps(_escaped(recipe), indent=1, ensure_ascii=False) + "\n"


def _escaped(value: Any) -> Any:
    """With every `${` as it has to be written to mean itself."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + "\\${", value)
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value
