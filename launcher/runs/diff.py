"""How two runs differ: recipe, code, environment, speed, memory, loss, metrics.

Reading them is apart from comparing, which is pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.planning.code import CodeChanges, CodeFacts, code_changes
from launcher.planning.plan import Plan, leaves
from launcher.runs.code import read_code
from launcher.runs.curves import Apart, Course, apart, read_course
from launcher.runs.events import read_events
from launcher.runs.fold import fold
from launcher.runs.load import read_plan, read_result
from launcher.runs.observed import ALIVE
from launcher.runs.rundir import RunDir

_TEXT_LINES = 2_000
_FILE_BYTES = 1_000_000
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs, as far as it is compared."""

    run_id: str
    plan: Plan
    launch: Mapping[str, Any]
    code: CodeFacts | None
    result: Mapping[str, Any] = field(default_factory=dict)
    course: Course = field(default_factory=Course)


@dataclass(frozen=True)
class Row:
    """One thing that the two runs have: under a name, the value of each; None where one has none."""

    key: str
    a: Any
    b: Any

    @property
    def differs(self) -> bool:
        """Whether the two values are not the same."""
        return bool(self.a != self.b)


@dataclass(frozen=True, kw_only=True)
class RunDiff:
    """How B differs from A."""

    recipe: tuple[Row, ...]
    code: tuple[Row, ...]
    files: CodeChanges
    files_reason: str = ""
    """Why the files were not compared one by one."""
    environment: tuple[Row, ...]
    course: tuple[Row, ...] = ()
    """Speed and memory, the same ones too."""
    loss: Apart = field(default_factory=Apart)
    """How far the losses are apart."""
    metrics: tuple[Row, ...]
    """All of them, the same ones too."""


def read_side(run: RunDir) -> Side:
    """What a run has to compare. Raises Refused for a folder that is no run of this launcher."""
    try:
        launch = json.loads(run.launch.read_bytes())
    except (FileNotFoundError, ValueError):
        launch = {}
    result = read_result(run) or _result_so_far(run)
    course = read_course(run)
    return Side(
        run_id=run.run_id, plan=read_plan(run), launch=launch, code=read_code(run), result=result, course=course
    )


def compare(a: Side, b: Side) -> RunDiff:
    """How B differs from A. Pure."""
    comparable, reason = _comparable(a.code, b.code)
    return RunDiff(
        recipe=_differing(_rows(_recipe(a), _recipe(b))),
        code=_differing(_rows(_code(a), _code(b))),
        files=code_changes(*comparable) if comparable else CodeChanges(),
        files_reason=reason,
        environment=_differing(_rows(_environment(a), _environment(b))),
        course=tuple(_rows(a.course.numbers(), b.course.numbers())),
        loss=apart(a.course.loss, b.course.loss),
        metrics=tuple(_rows(_metrics(a), _metrics(b))),
    )


def changed_text(a: Path, b: Path, files: CodeChanges) -> Iterator[str]:
    """The lines of a unified diff of two copies of code, a bounded number of them."""
    left = _TEXT_LINES
    for path in sorted({*files.modified, *files.added, *files.removed}):
        before, after = _lines(a / path), _lines(b / path)
        if before is None or after is None:
            yield f"binary, or large: {path}"
            continue
        for line in difflib.unified_diff(before, after, f"A/{path}", f"B/{path}", lineterm=""):
            left -= 1
            if left < 0:
                yield f"... (more than {_TEXT_LINES:,} lines)"
                return
            yield line


def _lines(path: Path) -> list[str] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(data) > _FILE_BYTES or b"\0" in data:
        return None
    return data.decode(errors="replace").splitlines()


def _result_so_far(run: RunDir) -> dict[str, Any]:
    """Of a run that has no result yet, or never will have: what its events say."""
    record = fold(read_events(run.path), ALIVE, None, run_id=run.run_id)
    return {"state": record.state.value, "step": record.step, "metrics": dict(record.metrics or {})}


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Row]:
    """In the order of A; what only B has comes last."""
    return (Row(key, a.get(key), b.get(key)) for key in dict.fromkeys((*a, *b)))


def _differing(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.differs)


def _comparable(a: CodeFacts | None, b: CodeFacts | None) -> tuple[tuple[CodeFacts, CodeFacts] | None, str]:
    if a is None or b is None:
        return None, "the files of one of them were not recorded"
    if a.snapshot != b.snapshot:
        return None, "one of them has a copy, of the other only the Python files were recorded"
    return (a, b), ""


def _recipe(side: Side) -> dict[str, Any]:
    given = {key: value for key, value in leaves(side.plan.recipe) if value not in (None, [], ())}
    return {**given, "workdir": given.get("workdir") or side.plan.worker.cwd}


def _code(side: Side) -> dict[str, Any]:
    git = side.launch.get("git") or {}
    commit = git.get("sha") and f"{str(git['sha'])[:_DIGITS]}{', dirty' if git.get('dirty') else ''}"
    code = side.code
    if code is None:
        return {"git": commit}
    kind = "copy" if code.snapshot else f"live tree ({code.reason})"
    return {"git": commit, "sha256": code.sha256[:_DIGITS], "root": code.root, "kind": kind}


def _environment(side: Side) -> dict[str, Any]:
    launch, plan = side.launch, side.plan
    versions = launch.get("versions") or {}
    python = launch.get("python") or {}
    return {
        "host": launch.get("host"),
        "platform": launch.get("platform"),
        "executor": plan.executor,
        "python": python.get("version"),
        "interpreter": plan.worker.python,
        "torch": versions.get("torch"),
        "launcher": versions.get("launcher"),
        "engine": plan.engine,
        "device": plan.device,
        "backend": plan.backend,
        "interface": plan.interface,
        "world size": plan.world_size,
        "threads": plan.threads,
        **{f"env {variable.name}": variable.value for variable in plan.env},
        **{f"package {name}": version for name, version in (launch.get("packages") or {}).items() if name != "torch"},
    }


def _metrics(side: Side) -> dict[str, Any]:
    result = side.result
    named = {key: result.get(key) for key in ("state", "step", "samples_seen", "samples_per_s", "attempts", "restarts")}
    times = {f"time {key.removesuffix('_s')}": value for key, value in (result.get("time") or {}).items()}
    found = {
        **named,
        **dict(sorted((result.get("metrics") or {}).items())),
        **times,
        "goodput": result.get("goodput"),
        "weights_sha256": result.get("weights_sha256"),
    }
    return {key: value for key, value in found.items() if value is not None}
