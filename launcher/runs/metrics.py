"""metrics.jsonl, as readers see it. Standard library only.

Rank 0 appends, and nothing is ever rewritten, so after a restart some steps are there twice. Lines:

    {"attempt": 2, "resumed_from": 100}                              first line of an attempt
    {"attempt": 2, "step": 101, "samples_seen": 12928, "train/loss": 0.31, "train/lr": 1.9e-03, "samples_per_s": 6512.0,
     "eta_s": 10.1, "time": 1764...}
    {"attempt": 2, "step": 200, "eval/accuracy": 0.97, "eval/loss": 0.1, "time": 1764...}
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.runs.events import read_lines

Record = dict[str, Any]


def fold_metrics(lines: Iterable[Record]) -> list[Record]:
    """One record per step, in order: what the newest attempt says, training and evaluation together.

    Steps that an attempt did not keep (it was killed after them, and the next one resumed from an earlier
    checkpoint) are gone, even where the next one has not come as far yet.
    """
    steps: dict[int, Record] = {}
    attempt = 0
    for line in lines:
        if line["attempt"] < attempt:
            continue  # a writer that was given up, and did not know it
        attempt = line["attempt"]
        if "resumed_from" in line:
            steps = {step: record for step, record in steps.items() if step <= line["resumed_from"]}
        else:
            steps[line["step"]] = {**steps.get(line["step"], {}), **line}
    return [steps[step] for step in sorted(steps)]


def read_metrics(path: Path) -> list[Record]:
    """The folded metrics of a file; empty where there is none yet."""
    return fold_metrics(read_lines(path))
