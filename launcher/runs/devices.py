"""What the nodes of a run have measured of their devices: `devices/node-<k>.jsonl`, a line per measurement.

    {"time": 1764..., "cpu/util": 43.1, "cpu/load": 1.2, "memory/used_bytes": ..., "memory/total_bytes": ...,
     "workers/cpu_util": 187.0, "workers/rss_bytes": ..., "gpu0/util": 98, "gpu0/memory_used_bytes": ...,
     "gpu0/memory_total_bytes": ..., "gpu0/power_w": 690.1, "gpu0/power_limit_w": 700.0, "gpu0/temperature_c": 64,
     "gpu0/sm_clock_mhz": 1755, "gpu0/sm_clock_max_mhz": 1980, "gpu0/throttle_reasons": 4, "gpu0/ecc_corrected": 0,
     "gpu0/ecc_uncorrected": 0, "gpu0/nvlinks_up": 18, "gpu0/nvlinks_down": 0}

`util` is in percent; `workers/cpu_util` in percent of one CPU. What a device does not tell is left out; `gpu0/lost` is
1 for one that does not answer, `note` says why GPUs are not measured. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.runs.events import parse_object
from launcher.runs.rundir import RunDir

Record = dict[str, Any]
_NAME = re.compile(r"node-(\d+)\.jsonl")
_GPU = re.compile(r"gpu(\d+)/(.+)")
_LINE_BYTES = 64 << 10
"""More than a line of a node with sixteen GPUs."""
_MOST_BYTES = 4 << 20
"""Of one node, what a report reads about: two days of a node without GPUs, five hours of one with eight."""
_ALL_BYTES = 32 << 20
"""Of all nodes together."""
POWER_CAP = 0x4
"""NVML: the clocks are lower since the power is at its limit."""
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""NVML's reasons for lower clocks that are nobody's wish."""


def measured_nodes(run: RunDir) -> dict[int, Path]:
    """The files of the nodes that have measured something, by their index."""
    folder = run.devices(0).parent
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names only
    found = {int(match[1]): folder / name for name in names if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def newest_of(path: Path) -> Record | None:
    """The last measurement of a node; None where it is not whole yet. Of its file only the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
        lines = file.read().split(b"\n")
    return parse_object(lines[-2]) if len(lines) > 1 else None


def read_measured(path: Path, *, most_bytes: int = _MOST_BYTES) -> Iterator[Record]:
    """The measurements of a node; where they are more than so many bytes, every n-th."""
    with path.open("rb") as file:
        every = 1 + file.seek(0, os.SEEK_END) // most_bytes
        file.seek(0)
        for number, line in enumerate(file):
            wanted = number % every == 0 and line.endswith(b"\n")
            if wanted and (record := parse_object(line)) is not None:
                yield record


@dataclass(kw_only=True)
class Series:
    """What became of one number."""

    count: int = 0
    total: float = 0.0
    least: float = float("inf")
    peak: float = float("-inf")
    last: float = 0.0

    @property
    def mean(self) -> float:
        """Of all measurements."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        """Count a measurement."""
        self.count += 1
        self.total += value
        self.last = value
        self.least, self.peak = min(self.least, value), max(self.peak, value)


@dataclass(kw_only=True)
class Use:
    """What a node, or one GPU of it, was used for over a run."""

    series: dict[str, Series] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    """How often each reason of NVML for lower clocks was seen."""

    def add(self, name: str, value: float) -> None:
        """Count a measurement."""
        if name not in self.series:
            self.series[name] = Series()
        self.series[name].add(value)
        if name == "throttle_reasons":
            for reason in (POWER_CAP, *THROTTLED):
                self.reasons[reason] = self.reasons.get(reason, 0) + bool(int(value) & reason)

    def share(self, reason: int) -> float:
        """In which share of the measurements a reason was seen."""
        asked = self.series.get("throttle_reasons")
        return self.reasons.get(reason, 0) / asked.count if asked else 0.0


@dataclass(kw_only=True)
class NodeUse:
    """What a node was used for over a run."""

    node: int
    own: Use = field(default_factory=Use)
    gpus: dict[int, Use] = field(default_factory=dict)
    """By their index."""
    notes: list[str] = field(default_factory=list)


def fold_measured(node: int, records: Iterable[Mapping[str, Any]]) -> NodeUse:
    """What a node was used for."""
    found = NodeUse(node=node)
    places: dict[str, tuple[Use, str]] = {}
    for record in records:
        if (note := record.get("note")) is not None and note not in found.notes:
            found.notes.append(str(note))
        for name, value in record.items():
            if "/" not in name or not isinstance(value, int | float):
                continue
            if name not in places:
                places[name] = _place(found, name)
            use, short = places[name]
            use.add(short, value)
    found.gpus = dict(sorted(found.gpus.items()))
    return found


def _place(found: NodeUse, name: str) -> tuple[Use, str]:
    """Where a measurement of this name belongs: to the node, or to one of its GPUs, under a name without that."""
    gpu = _GPU.fullmatch(name)
    return (found.own, name) if gpu is None else (found.gpus.setdefault(int(gpu[1]), Use()), gpu[2])


def read_use(run: RunDir) -> list[NodeUse]:
    """What each node of a run was used for."""
    files = measured_nodes(run)
    share = min(_MOST_BYTES, _ALL_BYTES // max(1, len(files)))
    return [fold_measured(node, read_measured(path, most_bytes=share)) for node, path in files.items()]


_SATURATED = 0.95
_IDLE_UTIL = 20.0
_CAPPED = 0.1


def warnings_of(use: NodeUse) -> list[str]:
    """What is wrong with a node or its GPUs, or leaves them unused."""
    found = [f"node {use.node}: {note}" for note in use.notes]
    used, total = use.own.series.get("memory/used_bytes"), use.own.series.get("memory/total_bytes")
    if used and total and used.peak > _SATURATED * total.peak:
        found.append(f"node {use.node}: its memory was {100 * used.peak / total.peak:.0f} % full")
    for index, gpu in use.gpus.items():
        found += [f"node {use.node} gpu {index}: {text}" for text in _of_gpu(gpu)]
    return found


def _of_gpu(gpu: Use) -> Iterator[str]:
    series = gpu.series
    if "lost" in series:
        yield "it has fallen off the bus (NVML: GPU is lost); the node needs a reboot"
    for reason, text in THROTTLED.items():
        if share := gpu.share(reason):
            yield f"throttled, {text}, in {100 * share:.0f} % of the measurements"
    if (share := gpu.share(POWER_CAP)) > _CAPPED:
        limit = series.get("power_limit_w")
        at = f" of {limit.last:.0f} W" if limit else ""
        yield f"clocks held down by its power limit{at} in {100 * share:.0f} % of the measurements"
    errors = series.get("ecc_uncorrected")
    if errors and errors.peak > 0:
        yield f"{errors.peak:.0f} ECC errors that could not be corrected, since the driver was loaded"
    links = series.get("nvlinks_down")
    if links and links.peak > links.least:
        yield f"{links.peak - links.least:.0f} of its NVLinks went down"
    util = series.get("util")
    if util and util.mean < _IDLE_UTIL:
        yield f"idle: on average {util.mean:.0f} % in use"


def use_fields(use: NodeUse) -> dict[str, Any]:
    """What `launch report --json` says of a node: by the names of the measurements their mean and their peak."""
    named = dict(use.own.series)
    for index, gpu in use.gpus.items():
        named |= {f"gpu{index}/{name}": each for name, each in gpu.series.items()}
    values = {name: {"mean": round(each.mean, 3), "peak": each.peak} for name, each in named.items()}
    return {"node": use.node, "values": values, "warnings": warnings_of(use)}
