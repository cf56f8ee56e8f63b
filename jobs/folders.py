"""The folders of checkpoints, read: which there are, which are whole, and where the training stood."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.finite import LeftOut, read_left_out
from jobs.manifest import STATE, BrokenError, read_manifest, verify
from jobs.state import CheckpointError

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training stands, beside its tensors."""

    step: int = 0
    """Optimizer updates done, with those that were left out."""
    samples_seen: int = 0
    metrics: Mapping[str, float] | None = None
    """Of the evaluation at this step; None where it was not evaluated."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Steps whose batches were not trained on."""
    overflows: int = 0
    """Steps that were not made since their gradients overflowed in fp16 (`jobs.precision`); the schedule leaves them
    out too."""


def named(folder: Path) -> list[str]:
    """Names of the folders that have the name of a checkpoint, oldest first."""
    names = [path.name for path in folder.glob("step-*") if _NAME.fullmatch(path.name)] if folder.exists() else []
    return sorted(names, key=step_of)


def complete(folder: Path) -> list[str]:
    """Names of the checkpoints of a folder that were written to their end, oldest first; not whether they still are."""
    return [name for name in named(folder) if is_sealed(folder / name)]


def is_sealed(path: Path) -> bool:
    """Whether a folder has a manifest that this version wrote."""
    try:
        read_manifest(path)
    except BrokenError:
        return False
    return True


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match.group(1))


def read_state(path: Path) -> dict[str, Any]:
    """state.json. Raises CheckpointError where it is not what this version writes."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        missing = {"run_id", "step", "samples_seen", "world_size", "optimizer", "scaler"} - state.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{STATE} cannot be read: {error!r}") from error
    if missing:
        raise CheckpointError(f"{STATE} has no {', '.join(sorted(missing))}")
    return state


def progress_from(state: Mapping[str, Any], metrics: Mapping[str, float] | None) -> Progress:
    """Where the training stood, by state.json and the metrics of the manifest."""
    return Progress(
        step=state["step"],
        samples_seen=state["samples_seen"],
        metrics=metrics,
        left_out=read_left_out(state.get("left_out")),
        overflows=state.get("overflows", 0),
    )


def progress_of(path: Path) -> Progress:
    """Where the training of a checkpoint stood."""
    return progress_from(read_state(path), read_manifest(path).metrics)


def plain_json(content: Mapping[str, Any]) -> str:
    """JSON of plain values. Raises CheckpointError for anything else: it could only be read back by code (F018)."""
    try:
        return json.dumps(content, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{STATE} takes plain values only: {error}") from error


def resolve_init(text: str) -> Path:
    """The checkpoint that `init_from` names: a checkpoint folder, or the newest good one of a run's folder.

    Raises CheckpointError where there is none.
    """
    path = Path(text).expanduser()
    inside = [path / "checkpoints" / name for name in reversed(named(path / "checkpoints"))]
    problems = []
    for candidate in inside or [path]:
        try:
            verify(candidate)
        except BrokenError as error:
            problems.append(f"{candidate} is broken: {error}")
            continue
        for problem in problems:
            print(f"checkpoint.init_from: {problem}", flush=True)
        return candidate
    found = "\n  ".join([f"{text} is neither a checkpoint nor a run with one that is complete", *problems])
    raise CheckpointError(f"checkpoint.init_from: {found}")
