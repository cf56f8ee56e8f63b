"""Runs are found from any directory: one small pointer file per run lies in the user's state folder.

A pointer's name begins with the time, so that the newest are known without opening one.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import Problem, RecipeError, Refused
from launcher.planning.points import split_point_id
from launcher.recipe.paths import expanded, is_file, real
from launcher.runs.rundir import RunDir
from launcher.runs.sweep import SweepDir, make_point, read_sweep

_STAMP = "%Y%m%dT%H%M%S.%f"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{1,6}_.+\.json")
_POINT = re.compile(r"-\d{4}-[a-z0-9]{4}\.\d+$")
_LAST_OF_POINT = re.compile(r"[a-z0-9]{4}\.\d+")
_PATTERN = re.compile(r"[*?\[]")
_SHOWN = 10


@dataclass(frozen=True)
class Pointer:
    """Where a run was made, and when. The name is read at once, the place when it is asked for."""

    folder: Path
    name: str
    """Of the file: `<time>_<run id>.json`. Ten thousand of these are made at once, so nothing is worked out before."""

    @property
    def file(self) -> Path:
        """The pointer itself."""
        return self.folder / self.name

    @property
    def run_id(self) -> str:
        """The id of the run, from the file's name."""
        return self.name.partition("_")[2].removesuffix(".json")

    @property
    def is_point(self) -> bool:
        """Whether it is a point of a sweep: `SWEEP.INDEX`."""
        return _POINT.search(self.run_id) is not None

    @property
    def created_s(self) -> float:
        """When the run was made, in seconds since the epoch, from the file's name."""
        stamp = datetime.strptime(self.name.partition("_")[0], _STAMP)
        return stamp.replace(tzinfo=UTC).timestamp()

    @property
    def run(self) -> RunDir:
        """The place of the run. It may be gone."""
        try:
            return RunDir(Path(json.loads(self.file.read_bytes())["run_dir"]))
        except (ValueError, KeyError, TypeError):
            return RunDir(self.file)  # spoiled, or cut off by a full disk or a crash: shown as gone, and names itself

    @property
    def gone(self) -> bool:
        """Whether the run directory, or that of a sweep, was moved or deleted."""
        run = self.run
        return not run.plan.is_file() and not SweepDir(run.path).is_there


def state_root() -> Path:
    """The launcher's folder of the user: $XDG_STATE_HOME/launcher, by default ~/.local/state/launcher."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification: a relative path is invalid and to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "launcher"


def state_folder() -> Path:
    """The folder of the pointers, made when missing. Raises Refused where that is not possible."""
    folder = state_root() / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(
            where=str(folder),
            message=f"the list of your runs cannot be kept here: {error.strerror}",
            hint="set XDG_STATE_HOME to a folder that can be written",
        )
        raise Refused([problem]) from error
    return folder


def write_pointer(run: RunDir) -> None:
    """Make a run known to `launch ls` and to every `RUN` argument."""
    path = state_folder() / f"{datetime.now(UTC).strftime(_STAMP)}_{run.run_id}.json"
    path.write_text(json.dumps({"run_id": run.run_id, "run_dir": str(run.path)}) + "\n", encoding="utf-8")


def all_runs() -> list[Pointer]:
    """The pointers of all runs, newest first. None of them is opened."""
    folder = state_root() / "runs"
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - ten thousand names, no Path for each
    return [Pointer(folder, name) for name in sorted(names, reverse=True) if _NAME.fullmatch(name)]


def find_run(text: str) -> RunDir:
    """The run that a user means by its id, a unique prefix, its last four characters, a path, or `last`.

    `last` is the newest run that is still there. The point of a sweep, `SWEEP.INDEX`, gets its run directory now, if it
    has none yet. Raises RecipeError, with candidates, when it is not exactly one.
    """
    path = expanded(text)
    if is_file(path / "plan.json") or make_point(RunDir(path.absolute())):
        return RunDir(real(path))
    sweep = find_sweep(text)
    if sweep is not None:
        raise _problem(text, f"{sweep.sweep_id} is a sweep", f"one of its points: {sweep.point(0).run_id}, ...")
    if (point := _point(text)) is not None:
        return point
    if os.sep in text:
        raise _problem(text, "there is no run directory here (no plan.json)", "`launch ls` lists your runs")
    pointers = all_runs()
    if text == "last":
        return _newest(pointers)
    return _present(text, _unique(text, pointers))


def find_sweep(text: str) -> SweepDir | None:
    """The sweep that a user means, as `find_run` would find a run; None where it is no sweep, or not exactly one."""
    path = expanded(text)
    if os.sep in text or is_file(path / "sweep.json"):
        sweep = SweepDir(real(path))
        return sweep if sweep.is_there else None
    pointers = all_runs()
    found = matching(text, pointers)
    if text == "last":
        found = [pointer for pointer in pointers if not pointer.gone][:1]
    one = SweepDir(found[0].run.path) if len(found) == 1 else None
    return one if one is not None and one.is_there else None


def _point(text: str) -> RunDir | None:
    """The point that `SWEEP.INDEX` means, SWEEP as `find_sweep` takes it. Raises RecipeError for an index too large."""
    parts = split_point_id(text)
    sweep = None if parts is None or os.sep in text else find_sweep(parts[0])
    if parts is None or sweep is None:
        return None
    run = sweep.point(parts[1])
    if not make_point(run):
        record = read_sweep(sweep)
        there = f"it has the points 0 to {record.points - 1}" if record is not None else ""
        raise _problem(text, f"the sweep {sweep.sweep_id} has no point {parts[1]}", there)
    return run


def matching(text: str, pointers: Sequence[Pointer]) -> list[Pointer]:
    """The runs that a text may mean: the one of that id, else those it is a prefix or the last four characters of."""
    # Names alone, and no property of ten thousand pointers: this is the beginning of every command about a run.
    named = [pointer for pointer in pointers if text in pointer.name] if text else []
    exact = [pointer for pointer in named if pointer.run_id == text]
    if exact or not text:
        return exact
    point = _LAST_OF_POINT.fullmatch(text)
    if point is not None:
        return [pointer for pointer in named if pointer.run_id.endswith(text) and pointer.is_point]
    return [
        pointer
        for pointer in named
        if pointer.run_id.startswith(text) or (len(text) == 4 and pointer.run_id.endswith(text))
        if not pointer.is_point or "." in text
    ]


def find_runs(texts: Sequence[str]) -> list[RunDir]:
    """The runs that several texts mean, each once: as `find_run`, or by a pattern with `*`, `?` or `[...]`.

    A pattern means every run that is still in its place, newest first; it takes in the points of sweeps.
    Raises RecipeError for a text that means none.
    """
    found: dict[Path, RunDir] = {}
    for text in texts:
        if not _PATTERN.search(text) or os.sep in text:
            run = find_run(text)
            found[run.path] = run
            continue
        fits = re.compile(fnmatch.translate(text)).match
        runs = [pointer.run for pointer in all_runs() if fits(pointer.run_id) and not pointer.gone]
        if not runs:
            raise _problem(text, "no run has an id of this pattern", "`launch ls` lists your runs")
        found |= {run.path: run for run in runs}
    return list(found.values())


def _unique(text: str, pointers: Sequence[Pointer]) -> Pointer:
    found = matching(text, pointers)
    if not found:
        newest = ", ".join(pointer.run_id for pointer in pointers[:3])
        raise _problem(text, "no run has this id, prefix or last four characters", newest and f"the newest: {newest}")
    if len(found) > 1:
        names = [pointer.run_id for pointer in found[:_SHOWN]] + ["..."] * (len(found) > _SHOWN)
        raise _problem(text, f"{len(found)} runs match", f"one of: {', '.join(names)}")
    return found[0]


def _newest(pointers: Sequence[Pointer]) -> RunDir:
    for pointer in pointers:
        if not pointer.is_point and not pointer.gone:
            return pointer.run
    raise _problem("last", "there is no run yet" if not pointers else "none of your runs is still in its place", "")


def _present(text: str, pointer: Pointer) -> RunDir:
    if pointer.gone:
        message = f"run {pointer.run_id} is gone from {pointer.run.path} (moved or deleted)"
        raise _problem(text, message, "if it was moved, give its path in place of its id")
    return pointer.run


def _problem(where: str, message: str, hint: str) -> RecipeError:
    return RecipeError([Problem(where=where, message=message, hint=hint)])
