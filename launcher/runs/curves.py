"""The course of a run: how fast its steps were, how much memory it took, and its loss, step by step. Of two: compared.

Reading is apart from comparing, which is pure. Standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.runs.devices import read_use
from launcher.runs.metrics import Record, read_metrics
from launcher.runs.rundir import RunDir

LOSS = "train/loss"
_WINDOW = 10
"""Steps whose time is taken together: the clock of a line has milliseconds, and short steps are no longer."""
_MEMORY = "memory/"


@dataclass(frozen=True, kw_only=True)
class Course:
    """Of one run, as far as its record has it."""

    loss: Mapping[int, float] = field(default_factory=dict)
    """By step."""
    step_s: float | None = None
    """Median over the steps, without evaluations and saves."""
    rates: tuple[float, ...] = ()
    """Samples per second, as the training has noted them."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """The most of each kind, over all nodes and GPUs."""

    def numbers(self) -> dict[str, float]:
        """Speed and memory, by their names."""
        found = {} if self.step_s is None else {"step (median)": self.step_s}
        if self.rates:
            found["samples/s (median)"] = statistics.median(self.rates)
        return {**found, **{f"{name} (peak)": value for name, value in self.memory_bytes.items()}}


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far two curves of the loss are apart, at the steps that both have."""

    steps: int = 0
    most: float = 0.0
    at_step: int | None = None
    """Where they are furthest apart."""
    first: int | None = None
    """The first step at which they differ at all."""
    last: tuple[int, float, float] | None = None
    """The last step that both have, and the loss of each there."""


def read_course(run: RunDir) -> Course:
    """The course of a run."""
    records = read_metrics(run.metrics)
    return Course(
        loss={record["step"]: record[LOSS] for record in records if isinstance(record.get(LOSS), int | float)},
        step_s=median_step_s(records),
        rates=tuple(record["samples_per_s"] for record in records if record.get("samples_per_s")),
        memory_bytes={**_noted(records), **_measured(run)},
    )


def apart(a: Mapping[int, float], b: Mapping[int, float]) -> Apart:
    """How far two curves are apart."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return Apart()
    gaps = {step: abs(a[step] - b[step]) for step in steps}
    furthest = max(steps, key=lambda step: gaps[step])
    first = next((step for step in steps if a[step] != b[step]), None)
    return Apart(
        steps=len(steps),
        most=gaps[furthest],
        at_step=None if first is None else furthest,
        first=first,
        last=(steps[-1], a[steps[-1]], b[steps[-1]]),
    )


def median_step_s(records: Sequence[Record]) -> float | None:
    """Seconds per step, from the times at which steps were noted; None where there are too few."""
    noted = [(each["attempt"], each["step"], each["time"]) for each in records if LOSS in each and "time" in each]
    spans = [
        (end[2] - begin[2]) / _WINDOW
        for begin, end in zip(noted, noted[_WINDOW:], strict=False)
        if end[0] == begin[0] and end[1] - begin[1] == _WINDOW
    ]
    return statistics.median(spans) if spans else None


def _noted(records: Sequence[Record]) -> dict[str, float]:
    """What the training itself says of its memory."""
    most: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(_MEMORY) and isinstance(value, int | float):
                most[name] = max(value, most.get(name, 0.0))
    return most


def _measured(run: RunDir) -> dict[str, float]:
    """What the nodes have measured: of the workers all together, of the GPUs the one that had most in use."""
    uses: list[Any] = read_use(run)
    rss = [use.own.series["workers/rss_bytes"].peak for use in uses if "workers/rss_bytes" in use.own.series]
    gpus = [gpu.series["memory_used_bytes"].peak for use in uses for gpu in use.gpus.values() if gpu.series]
    return {
        **({"workers' memory, all nodes": sum(rss)} if rss else {}),
        **({"GPU memory in use": max(gpus)} if gpus else {}),
    }
