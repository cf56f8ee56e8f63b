"""Checkpoints of a run, by the names of their folders: `checkpoints/step-<n>`, complete or absent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.runs.events import read_events
from launcher.runs.load import read_result
from launcher.runs.rundir import RunDir
from launcher.runs.steps import noted_checkpoints

_STEP = re.compile(r"step-(\d+)")


def checkpoint_steps(run: RunDir) -> dict[int, Path]:
    """Step -> checkpoint that is there, in the order of their steps: our folders, and what an adapter has noted."""
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    found = {int(match[1]): path for path in folders if path.is_dir() and (match := _STEP.fullmatch(path.name))}
    return dict(sorted({**found, **noted_checkpoints(run)}.items()))


def find_checkpoint(run: RunDir, which: str, *, flag: str = "--checkpoint") -> Path:
    """The folder of a checkpoint: a step, `latest` or `best`. Raises RecipeError, with what there is."""
    steps = checkpoint_steps(run)
    step = _best_step(run) if which == "best" else _numbered(which, steps)
    if step in steps:
        return steps[step]
    if which == "latest" and (own := _of_a_script(run)) is not None:
        return own
    there = ", ".join(map(str, steps)) or "none"
    message = f"run {run.run_id} has no checkpoint {which!r}"
    raise RecipeError(
        [Problem(where=flag, message=message, hint=f"steps that are there: {there}{_elsewhere(run, steps)}")]
    )


def _elsewhere(run: RunDir, steps: Mapping[int, Path]) -> str:
    """What was uploaded, and is not here."""
    uploaded = {event["step"]: event["url"] for event in read_events(run.path) if event["event"] == "uploaded"}
    newest = max(uploaded.keys() - steps.keys(), default=None)
    return "" if newest is None else f"; uploaded: {uploaded[newest]}/step-{newest}"


def _of_a_script(run: RunDir) -> Path | None:
    """What a script has saved under names of its own, as the head agent found it at the end."""
    path = ((read_result(run) or {}).get("checkpoint") or {}).get("path")
    return run.path / path if path and (run.path / path).exists() else None


def _numbered(which: str, steps: dict[int, Path]) -> int | None:
    if which == "latest":
        return max(steps, default=None)
    return int(which) if which.isdecimal() else None


def _best_step(run: RunDir) -> int | None:
    best = ((read_result(run) or {}).get("checkpoint") or {}).get("best")
    if best is not None:
        return int(best)
    marked = [event for event in read_events(run.path) if event["event"] == "checkpoint_saved" and event.get("best")]
    return int(marked[-1]["step"]) if marked else None
