"""What a person who follows a run on a cluster is told beside its output: why it waits, where it runs, what ends it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from launcher.cli.status import expected_start
from launcher.executors.base import Watcher, observe_job
from launcher.runs.load import read_record
from launcher.runs.queue import reason_text
from launcher.wording import short_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.runs.fold import AllocationRecord, RunRecord
    from launcher.runs.observed import Observation
    from launcher.runs.rundir import RunDir


_READ_SHARE = 10
"""Reading takes a tenth of the time at most."""
_PAUSE_S = 3.0


class Watch:
    """Looks at a run again and again: at its files each time, at its scheduler every few seconds."""

    def __init__(self, run: RunDir, observe: Callable[[str], Observation] = observe_job) -> None:
        self._run, self._watcher = run, Watcher(observe)
        self._known: tuple[object, ...] | None = None
        self._seen: tuple[float, RunRecord] | None = None

    def look(self) -> RunRecord:
        """Where the run stands now; of a run with very long records, some moments ago."""
        if self._seen is not None and time.monotonic() < self._seen[0]:
            return self._seen[1]
        begun_s = time.monotonic()
        record = self._look()
        ended_s = time.monotonic()
        self._seen = ended_s + min(_PAUSE_S, _READ_SHARE * (ended_s - begun_s)), record
        return record

    def _look(self) -> RunRecord:
        record = read_record(self._run, self._watcher)
        # What SLURM said some seconds ago is no news of an allocation that has begun or ended since.
        known = (record.ref, *((each["allocation"], each["ended_s"]) for each in record.allocations))
        if record.queue is not None and self._known not in (None, known):
            self._watcher.forget()
            record = read_record(self._run, self._watcher)
        self._known = known
        return record


class Story:
    """Each thing is told once. Of what was over before the first look, nothing is.

    beside_console: the console is shown as well, which says itself where an allocation has begun.
    """

    def __init__(self, *, beside_console: bool = False) -> None:
        self._beside_console = beside_console
        self._reasons: set[tuple[int, str]] = set()
        self._begun: set[int] | None = None
        self._ended: set[int] = set()
        self._sentence = ""

    def lines(self, record: RunRecord, *, now_s: float) -> list[str]:
        """What is new since the last look."""
        if self._begun is None:
            past = record.allocations if record.state.is_final else record.allocations[:-1]
            self._begun = {each["allocation"] for each in past}
            self._ended = {each["allocation"] for each in record.allocations if each["ended_s"] is not None}
        told = []
        for each in record.allocations:
            if each["allocation"] not in self._begun:
                self._begun.add(each["allocation"])
                if not self._beside_console:
                    told.append(f"allocation {each['allocation']}: job {each['job']} on {short_hosts(each['nodes'])}")
            if each["ended_s"] is not None and each["allocation"] not in self._ended:
                self._ended.add(each["allocation"])
                told.append(_ended(each))
        if record.sentence and not record.state.is_final and record.sentence != self._sentence:
            told.append(f"{record.run_id}: {record.sentence}")
        self._sentence = record.sentence
        return [*told, *self._waiting(record, now_s)]

    def _waiting(self, record: RunRecord, now_s: float) -> list[str]:
        seen, known = record.queue, len(record.allocations)
        if seen is None or not seen.waits or record.state.is_final or (known, seen.reason) in self._reasons:
            return []
        self._reasons.add((known, seen.reason))
        parts = [reason_text(seen.reason) or "SLURM has not said why yet", expected_start(seen.starts_s, now_s)]
        return [f"{record.run_id} waits: {', '.join(filter(None, parts))}"]


def _ended(allocation: AllocationRecord) -> str:
    step = "" if allocation["step"] is None else f"; step {allocation['step']:,}"
    saved = " is saved" if allocation["saved"] and step else ""
    return f"allocation {allocation['allocation']} ended: {allocation['sentence'] or 'nobody knows why'}{step}{saved}"
