"""The record of node 0 on a second disk: metrics.jsonl and the events, up to the newest checkpoint.

They are written on the disk of rank 0. Before each checkpoint is complete, what they have grown by goes to `replica/`
in the run directory of the other holders; at a start rank 0 takes them from there where its own are lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from jobs.circle import Circle
from jobs.report import Reporter
from jobs.store_disks import Disks
from jobs.store_travel import Parcel, carry
from jobs.world import Meeting
from launcher.runs.events import parse_object
from launcher.runs.rundir import RunDir

_TAIL_BYTES = 1 << 16


class RecordCopies:
    """Of an attempt, on one rank."""

    def __init__(self, run: RunDir, disks: Disks, *, rank: int, attempt: int, group: ProcessGroup | None) -> None:
        self._run, self._disks, self._rank, self._attempt, self._group = run, disks, rank, attempt, group
        self._sent: dict[str, int] = {}
        """How much of each file this attempt has sent."""
        self._report: Reporter | None = None
        self._safe = 0

    def follow(self, report: Reporter) -> None:
        """On rank 0: this is who writes the metrics. What was not sent yet, the other ranks remember."""
        self._report, report.safe = report, lambda: self._safe

    def send(self, circle: Circle, holders: Sequence[int]) -> None:
        """Send what is new to all holders; all ranks together. Raises CircleError."""
        if len(holders) < 2:
            return
        lines = 0 if self._report is None else self._report.written()
        sizes: dict[str, int] = circle.from_first(self._sizes)
        parcels = [
            Parcel(name=name, size_bytes=size - sent, begin=sent, chain=tuple(holders))
            for name, size in sizes.items()
            if (sent := self._sent.get(name, 0)) < size
        ]
        self._sent = {}  # after one that has failed, all is sent again
        circle.gather(lambda: carry(parcels, self._source_or_copy, self._group))
        self._sent, self._safe = sizes, lines

    def fetch(self, meeting: Meeting, group: ProcessGroup | None) -> None:
        """Let rank 0 have what its disk has lost; all ranks together, before anybody adds to it."""
        told = meeting.gather("look for the record", lambda: self._look() if self._disks.is_lead(self._rank) else {})
        own = told[0].get("own", [0, 0])
        known = {rank: each["copy"] for rank, each in enumerate(told) if rank and each.get("copy")}
        source = max(known, key=lambda rank: known[rank], default=None)
        if source is None or known[source] <= own:
            return
        files: dict[str, int] = told[source]["files"]
        parcels = [Parcel(name=name, size_bytes=size, chain=(source, 0)) for name, size in files.items() if size]
        meeting.gather("fetch the record", lambda: carry(parcels, self._copy, group))
        if self._rank == 0:
            self._take(list(files))
            place = self._disks.names[self._disks.of_rank[source]]
            print(f"the record of this run was lost here, and is taken from the disk of {place}", flush=True)

    def _take(self, names: Sequence[str]) -> None:
        """On rank 0: the metrics take the place of what is here, which is older; events are added."""
        for name in names:
            copy, place = self._copy(name), self._run.path / name
            if not copy.exists():
                continue
            if place.exists() and name.startswith("events/"):
                if _first_line(place) == _first_line(copy):
                    continue  # it is the same file, and has gone on since
                place = place.with_name(f"{place.stem}-before-{self._attempt}.jsonl")
            place.parent.mkdir(parents=True, exist_ok=True)
            copy.rename(place)
        shutil.rmtree(self._run.replica, ignore_errors=True)

    def _look(self) -> dict[str, Any]:
        """Of this disk: how new its own record is, and its copy."""
        copies = self._run.replica
        files = [path for path in sorted(copies.rglob("*.jsonl")) if path.is_file()] if copies.is_dir() else []
        sizes = {str(path.relative_to(copies)): path.stat().st_size for path in files}
        found = {"own": _age(self._run.metrics), "copy": _age(self._copy(self._run.metrics.name)) if files else None}
        return {**found, "files": sizes}

    def _sizes(self) -> dict[str, int]:
        """How much of what is sent, by its place in the run directory."""
        events = sorted(path for path in self._run.events.glob("*.jsonl") if "-before-" not in path.name)
        files = [self._run.metrics, *events]
        return {str(path.relative_to(self._run.path)): _whole(path) for path in files if path.exists()}

    def _source_or_copy(self, name: str) -> Path:
        return self._run.path / name if self._rank == 0 else self._copy(name)

    def _copy(self, name: str) -> Path:
        return self._run.replica / name


def _age(metrics: Path) -> list[int]:
    """More is newer: the last attempt that has written, and how much there is."""
    if not metrics.exists():
        return [0, 0]
    tail, size = _tail(metrics)
    lines = [line for text in tail.splitlines(keepends=True) if (line := parse_object(text)) is not None]
    return [max((int(line["attempt"]) for line in lines if "attempt" in line), default=0), size]


def _whole(path: Path) -> int:
    """How many bytes of a file are whole lines."""
    tail, size = _tail(path)
    return size - len(tail) + tail.rfind(b"\n") + 1


def _tail(path: Path) -> tuple[bytes, int]:
    """The end of a file that others may be adding to, and its size then."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read(min(size, _TAIL_BYTES)), size


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()
