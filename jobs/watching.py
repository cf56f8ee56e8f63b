"""In the tracking process: what the nodes have measured of their devices goes to the trackers too.

Each line belongs to the step that the training was at. Names get their node: `node0/gpu0/util`, `node1/cpu/util`.
"""

from __future__ import annotations

import bisect
import json
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.durable import write_durably
from jobs.trackers import Tracker
from launcher.runs.devices import measured_nodes
from launcher.runs.events import parse_object
from launcher.runs.rundir import RunDir

LOOK_EVERY_S = 5.0
"""There are as many files as nodes."""


class StepTimes:
    """When each step was complete: one number of each kind per step, for runs of millions of them."""

    def __init__(self) -> None:
        self._times, self._steps = array("d"), array("q")

    def add(self, time_s: float, step: int) -> None:
        """Note a step, in the order in which they are written."""
        if not self._times or time_s >= self._times[-1]:
            self._times.append(time_s)
            self._steps.append(step)

    def at(self, time_s: float) -> int:
        """The last step that was complete then; 0 before the first."""
        index = bisect.bisect_right(self._times, time_s)
        return self._steps[index - 1] if index else 0


class DeviceLedger:
    """Up to which byte the file of each node was sent, kept over restarts. before: ledgers that count as well."""

    def __init__(self, path: Path, before: Iterable[Path] = ()) -> None:
        self._path = path
        known = [_read(each) for each in (path, *before)]
        self._bytes = {node: max(each.get(node, 0) for each in known) for node in {n for each in known for n in each}}

    def sent(self, node: int) -> int:
        """Bytes of the file of a node."""
        return self._bytes.get(str(node), 0)

    def add(self, node: int, size_bytes: int) -> None:
        """So many are sent now."""
        self._bytes[str(node)] = size_bytes

    def save(self) -> None:
        """Bring it to the disk."""
        write_durably(self._path, json.dumps(self._bytes))


class DeviceFollower:
    """Sends the measurements of all nodes, once, to one tracker."""

    def __init__(self, run: RunDir, tracker: Tracker, ledger: DeviceLedger) -> None:
        self._run, self._tracker, self._ledger = run, tracker, ledger
        self._due_s = 0.0

    def send(self, steps: StepTimes, *, at_once: bool = False) -> None:
        """Send the lines that are new; without `at_once` only every so often."""
        if not at_once and time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_EVERY_S
        has_new = False
        for node, path in measured_nodes(self._run).items():
            for line in self._new(node, path):
                self._tracker.log(steps.at(line.get("time", 0.0)), _values(node, line))
                has_new = True
        if has_new:
            self._ledger.save()

    def _new(self, node: int, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._ledger.sent(node))
            for text in file:
                if text.endswith(b"\n"):
                    self._ledger.add(node, self._ledger.sent(node) + len(text))
                    if (line := parse_object(text)) is not None:
                        yield line


def start_device_followers(run: RunDir, trackers: Sequence[Tracker], folder: Path) -> list[DeviceFollower]:
    """One for each tracker."""
    return [
        DeviceFollower(
            run,
            each,
            DeviceLedger(devices_ledger(folder, each.ledger), [devices_ledger(folder, n) for n in each.before]),
        )
        for each in trackers
    ]


def devices_ledger(folder: Path, ledger: str) -> Path:
    """Where it stands how far a tracker has got with the devices."""
    return folder / f"{ledger}.devices"


def _values(node: int, line: dict[str, Any]) -> dict[str, float]:
    return {f"node{node}/{name}": value for name, value in line.items() if "/" in name}


def _read(path: Path) -> dict[str, int]:
    try:
        known: dict[str, int] | None = parse_object(path.read_bytes())
    except FileNotFoundError:
        known = None
    return known or {}


def _ledger_of(tracker: Tracker, folder: Path) -> DeviceLedger:
    before = [devices_ledger(folder, name) for name in tracker.before]
    return DeviceLedger(devices_ledger(folder, tracker.ledger), before)
