"""How far a run is, read from the ends of its files: they may be long. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher.runs.events import parse_object, read_lines
from launcher.runs.rundir import RunDir

_TAIL_BYTES = 64 * 1024


def tail(path: Path) -> list[dict[str, Any]]:
    """The last JSON lines of a file, whole ones; empty where there is none."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    # The last is empty or unfinished; the first is whole only at the beginning of the file.
    return [found for line in lines[1 if begin else 0 : -1] if (found := parse_object(line)) is not None]


def newest_step(run: RunDir, attempt: int) -> int | None:
    """The last step that an attempt is known to have done: by its metrics, or by what it says of its progress."""
    said = [line for path in run.events.glob("*.jsonl") for line in tail(path) if line.get("event") == "progress"]
    steps = [line.get("step") for line in (*tail(run.metrics), *said) if line.get("attempt") == attempt]
    return max((step for step in steps if isinstance(step, int)), default=None)


def noted_checkpoints(run: RunDir) -> dict[int, Path]:
    """Step -> path of what an adapter has noted as saved, and the framework has kept, in the order of their steps."""
    noted = read_lines(run.events / "adapter.jsonl")
    found = {event["step"]: run.path / event["path"] for event in noted if event.get("event") == "checkpoint_saved"}
    return {step: found[step] for step in sorted(found) if found[step].exists()}
