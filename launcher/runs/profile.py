"""What `profiler:` has recorded: `profile/attempt-<k>-rank-<r>.json`, a summary, beside the files that it names.

    {"attempt": 1, "rank": 0, "device": "cpu", "tool": "torch", "steps": [10, 15], "time_s": 0.84,
     "shares": {"compute": 0.81, "communication": 0.05, "input": 0.1, "other": 0.04},
     "operators": [{"name": "aten::mm", "calls": 60, "time_s": 0.21, "share": 0.25}],
     "files": {"trace": "attempt-1-rank-0.trace.json.gz", "table": "attempt-1-rank-0.txt"}}

`tool: memory` has `peak_bytes` in place of shares and operators. Nsight Systems writes `.nsys-rep` alone, where it
records a whole process. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.runs.events import parse_object
from launcher.runs.rundir import RunDir
from launcher.wording import aligned, shortened

_NAME = re.compile(r"attempt-(\d+)-rank-(\d+)\.(?:json|nsys-rep)")
_OPERATORS_SHOWN = 8
_NAME_WIDTH = 48
_VIEWERS = {
    "trace": "https://ui.perfetto.dev, or chrome://tracing",
    "snapshot": "https://pytorch.org/memory_viz",
    "nsys": "nsys-ui",
}


def newest_profile(run: RunDir) -> list[dict[str, Any]]:
    """The summaries of the newest attempt that has recorded something, by rank."""
    names = [path.name for path in run.profile.iterdir()] if run.profile.is_dir() else []
    found = [(int(match[1]), int(match[2]), match[0]) for name in names if (match := _NAME.fullmatch(name))]
    newest = max((attempt for attempt, _, _ in found), default=0)
    of_newest = sorted((rank, name) for attempt, rank, name in found if attempt == newest)
    read = [_read(run, newest, rank, name) for rank, name in of_newest]
    return [summary for summary in read if summary is not None]


def _read(run: RunDir, attempt: int, rank: int, name: str) -> dict[str, Any] | None:
    if name.endswith(".json"):
        return parse_object((run.profile / name).read_bytes())
    if (run.profile / f"attempt-{attempt}-rank-{rank}.json").exists():
        return None  # it names this file
    return {"attempt": attempt, "rank": rank, "tool": "nsys", "files": {"nsys": name}}


def profile_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    """What `launch report` says: shares and operators of the first rank that has some, and where the files are."""
    lines: list[str] = []
    for summary in summaries:
        lines += [_headline(summary)]
        if shares := summary.get("shares"):
            lines += ["  " + "   ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items())]
        if operators := summary.get("operators"):
            lines += [f"  {line}" for line in _operators(operators)] if summary is summaries[0] else []
        if peak_bytes := summary.get("peak_bytes"):
            lines += [f"  peak {peak_bytes / 2**30:.2f} GiB"]
        lines += [
            f"  {kind:<8}  profile/{name}" + (f"   ({_VIEWERS[kind]})" if kind in _VIEWERS else "")
            for kind, name in (summary.get("files") or {}).items()
        ]
    return "\n".join(lines)


def _headline(summary: Mapping[str, Any]) -> str:
    who = f"attempt {summary['attempt']}, rank {summary['rank']}"
    if "steps" not in summary:
        return f"profile of {who}: the whole process ({summary['tool']})"
    (first, last), time_s = summary["steps"], summary["time_s"]
    per_step_ms = 1000 * time_s / max(1, last - first + 1)
    return (
        f"profile of {who}, steps {first} to {last} ({summary['tool']}): {time_s:.2f} s, {per_step_ms:.1f} ms per step"
    )


def _operators(operators: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("operator", "calls", "time", "share")]
    for each in operators[:_OPERATORS_SHOWN]:
        time = f"{1000 * each['time_s']:.1f} ms"
        rows.append((shortened(each["name"], _NAME_WIDTH), f"{each['calls']:,}", time, f"{100 * each['share']:.0f} %"))
    return aligned(rows, right=(1, 2, 3))
