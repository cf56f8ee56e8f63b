"""The tracking process: reads metrics.jsonl as it grows and sends it on. Started by `jobs.tracking`.

A process of its own, since a tracker may take seconds to import, wait for a server for minutes, or never end. The file
is the queue: whatever was written before a crash is sent, by this process or by the one of the next attempt.

Standard input: one line with the order, at the end one line {"finish": exit_code}. Its end without that line means that
the training died: what is there is still sent, in a short time.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.trackers import Tracker, start_trackers
from jobs.watching import DeviceFollower, StepTimes, devices_ledger, start_device_followers
from launcher import redact
from launcher.runs.events import EventWriter
from launcher.runs.metrics import Record, fold_metrics
from launcher.runs.rundir import RunDir
from launcher.runs.sync import FOLDER, ORDER, UPLOAD, read_sent, sent_path

POLL_S = 0.5
POINTS_PER_S = 10.0
"""Of a training's steps, in the long run; its evaluations and its last step are always sent. A tracker takes 0.1 ms for
each point, and shows 1,500 of a curve."""
POINTS_AT_ONCE = 256
"""So many go before that counts."""
ORPHANED_S = 5.0
"""How long this process may outlive a training that died."""


class Sent:
    """How far a tracker has got, kept over restarts: a step that was sent is not sent again."""

    def __init__(self, path: Path, before: Iterable[Path] = ()) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        known = [read_sent(each) for each in (path, *before)]
        self._steps = {part: max(steps[part] for steps in known) for part in known[0]}

    def new(self, record: Record) -> Record:
        """What of a record was not sent yet; without values where all of it was."""
        step = record["step"]
        return {
            name: value
            for name, value in record.items()
            if name not in ("attempt", "step", "time", "eta_s") and step > self._steps.get(_part(name), 0)
        }

    def add(self, step: int, names: list[str]) -> None:
        """Note that values of a step were sent."""
        for name in names:
            self._steps[_part(name)] = step
        text = " ".join(f"{self._steps.get(part, 0):020d}" for part in ("train", "eval"))
        os.pwrite(self._fd, text.encode(), 0)


def start_ledgers(trackers: Sequence[Tracker], folder: Path) -> list[Sent]:
    """How far each tracker has got."""
    return [Sent(sent_path(folder, t.ledger), [sent_path(folder, name) for name in t.before]) for t in trackers]


class Allowance:
    """Whether there may be another point: POINTS_PER_S, and POINTS_AT_ONCE that were not used before."""

    def __init__(self) -> None:
        self._left, self._time_s = float(POINTS_AT_ONCE), 0.0

    def take(self, time_s: float) -> bool:
        """time_s: when the step was made, so that it makes no difference when the lines are read."""
        passed_s, self._time_s = max(0.0, time_s - self._time_s), time_s
        self._left = min(float(POINTS_AT_ONCE), self._left + passed_s * POINTS_PER_S)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Follower:
    """Sends what is in a file, once, to one tracker."""

    def __init__(self, metrics: Path, tracker: Tracker, sent: Sent) -> None:
        self._metrics, self._tracker, self._sent = metrics, tracker, sent
        self._offset = 0
        self._allowance = Allowance()
        self._held: Record | None = None
        self.steps = StepTimes()

    def send(self, *, last: bool = False) -> None:
        """Send the lines that are new. last: the training has ended, and its last step is among them."""
        for record in fold_metrics(self._read()):
            self.steps.add(record.get("time", 0.0), record["step"])
            values = self._sent.new(record)
            if not any("/" in name for name in values):
                continue
            is_due = self._allowance.take(record.get("time", 0.0))
            self._held = None if is_due else record
            if is_due or any(_part(name) == "eval" for name in values):
                self._log(record, values)
        if last and self._held is not None:
            self._log(self._held, self._sent.new(self._held))

    def _log(self, record: Record, values: Record) -> None:
        self._held = None
        self._tracker.log(record["step"], values)
        self._sent.add(record["step"], list(values))

    def _read(self) -> Iterator[Record]:
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield json.loads(line)


def main() -> int:
    """Follow the orders on standard input until it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a stop is for the training, which then ends this process
    os.nice(19)  # the training goes before: on few CPUs what this process takes, some rank waits for
    orders = Orders()
    order = orders.first()
    if order is None:
        return 0
    folder = Path(order["run_dir"]) / FOLDER
    folder.mkdir(exist_ok=True)
    try:
        with _alone(folder / "lock"):
            follow(order, orders, folder)
    except Exception as error:  # noqa: BLE001 - trackers raise what they like; the training goes on without them
        print(f"tracking ended early ({type(error).__name__}: {error}); metrics.jsonl has everything", flush=True)
        (folder / "error.log").write_text(redact.own().text(traceback.format_exc()))
        return 1
    return 0


def follow(order: dict[str, Any], orders: Orders, folder: Path) -> None:
    """Send what is there and what comes, until the training has ended."""
    run_dir = RunDir(Path(order["run_dir"]))
    trackers = start_trackers(order, folder)
    if order.get("upload"):
        sent_path(folder, UPLOAD).unlink(missing_ok=True)
        devices_ledger(folder, UPLOAD).unlink(missing_ok=True)
    else:
        (folder / ORDER).write_text(json.dumps(order))  # `launch sync` gives it again
    sent = start_ledgers(trackers, folder)
    followers = [Follower(run_dir.metrics, *pair) for pair in zip(trackers, sent, strict=True)]
    devices = start_device_followers(run_dir, trackers, folder)
    _announce(run_dir, order, trackers)
    while orders.wait(POLL_S):
        _send_all(followers, devices)
    _send_all(followers, devices, at_once=True)
    for tracker in trackers:
        tracker.finish(orders.exit_code)
    if order.get("upload"):
        # not before W&B has said that it has everything
        sent_path(folder, UPLOAD).replace(sent_path(folder, "wandb"))
        if devices_ledger(folder, UPLOAD).exists():
            devices_ledger(folder, UPLOAD).replace(devices_ledger(folder, "wandb"))


class Orders:
    """Standard input, line by line."""

    def __init__(self) -> None:
        self.exit_code = 1
        self._input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered, for select

    def first(self) -> dict[str, Any] | None:
        """What to do; None where the training died before it could say so."""
        line = self._input.readline()
        order: dict[str, Any] | None = json.loads(line) if line else None
        return order

    def wait(self, timeout_s: float) -> bool:
        """Wait; returns False from the moment the training has ended."""
        if not select.select([self._input], [], [], timeout_s)[0]:
            return True
        line = self._input.readline()
        if line:
            self.exit_code = json.loads(line)["finish"]
        else:
            _end_within(ORPHANED_S)
        return False


def _send_all(followers: list[Follower], devices: list[DeviceFollower], *, at_once: bool = False) -> None:
    for follower, of_devices in zip(followers, devices, strict=True):
        follower.send(last=at_once)
        of_devices.send(follower.steps, at_once=at_once)


def _announce(run_dir: RunDir, order: dict[str, Any], trackers: list[Tracker]) -> None:
    facts = {tracker.name: tracker.facts() for tracker in trackers}
    EventWriter(run_dir.path, FOLDER).write("tracking", attempt=order["attempt"], **facts)
    if order["attempt"] == 1 or order.get("upload"):
        for tracker in trackers:
            print(tracker.sentence(), flush=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until the process of an attempt that died has sent its rest."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _end_within(time_s: float) -> None:
    timer = threading.Timer(time_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _part(name: str) -> str:
    return "eval" if name.startswith("eval/") else "train"


if __name__ == "__main__":
    sys.exit(main())
