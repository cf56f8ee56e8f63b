"""The logs of a run: which files are those of a rank, a node, an attempt."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.runs.rundir import RunDir

_LOG = re.compile(r"attempt-(?P<attempt>\d+)/node-(?P<node>\d+)/rank-(?P<rank>\d+)\.log")


def select_logs(run: RunDir, *, rank: int | None, node: int | None, attempt: int | None) -> list[Path]:
    """The logs of the ranks that are asked for, by rank. Without an attempt: of the newest that has one of them."""
    logs = [
        (int(match["attempt"]), int(match["rank"]), path)
        for path in (run.path / "logs").glob("attempt-*/node-*/rank-*.log")
        if (match := _LOG.search(path.as_posix()))
        and (rank is None or int(match["rank"]) == rank)
        and (node is None or int(match["node"]) == node)
    ]
    wanted = attempt if attempt is not None else max((each for each, _, _ in logs), default=None)
    return [path for each, _, path in sorted(logs) if each == wanted]
