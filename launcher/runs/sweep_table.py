"""Where the points of a sweep stand, and how they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.runs.events import read_events, time_of
from launcher.runs.fold import RunRecord
from launcher.runs.load import ObserveAll, newest_metrics, read_ended, read_records, read_result
from launcher.runs.observed import UNKNOWN, Observation
from launcher.runs.states import POLICIES, Cause, RunState
from launcher.runs.sweep import Submission, SweepDir, SweepRecord, point_lines, submissions
from launcher.wording import aligned, count, ranges, short_duration, step_text

UNSTARTED = "UNSTARTED"
"""Of a point that has not begun, and that nothing will begin: `launch resume SWEEP` does."""
DONE = RunState.SUCCEEDED.value
_GOES_ON = frozenset(state.value for state in RunState if not state.is_final)


@dataclass(frozen=True, kw_only=True)
class PointRow:
    """One point."""

    index: int
    run_id: str
    state: str
    """A state of a run, or UNSTARTED."""
    settings: Mapping[str, str]
    metric: float | None = None
    metric_name: str = ""
    step: int | None = None
    total_steps: int | None = None
    time_s: float | None = None
    """From its start to its end, or until now."""
    exit_code: int | None = None
    cause: str | None = None
    why: str = ""
    ref: str | None = None
    """Its newest job, where it is known."""
    submitted_s: float = 0.0
    """When that was asked for."""
    started: bool = False
    """Whether anything of it has run."""

    @property
    def goes_on(self) -> bool:
        """Whether it runs, or will by itself."""
        return self.state in _GOES_ON


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """All points."""

    sweep_id: str
    rows: tuple[PointRow, ...]
    """By index."""
    keys: tuple[str, ...]
    metric: str | None
    """`eval/loss min`; without an end where none is named."""

    @property
    def counts(self) -> dict[str, int]:
        """State -> how many, the states of those that have ended last."""
        return dict(sorted(Counter(row.state for row in self.rows).items(), key=lambda each: each[0] not in _GOES_ON))

    def best_first(self) -> list[PointRow]:
        """Those with the metric, the best first; the others by index. Without a better end: by index."""
        end = (self.metric or "").rpartition(" ")[2]
        if end not in ("min", "max"):
            return list(self.rows)
        sign = 1 if end == "min" else -1
        known = sorted((row for row in self.rows if row.metric is not None), key=lambda row: sign * (row.metric or 0.0))
        return [*known, *(row for row in self.rows if row.metric is None)]


def sweep_table(sweep: SweepDir, record: SweepRecord, observe_all: ObserveAll, *, now_s: float) -> SweepTable:
    """Where every point stands. All jobs that have to be asked for are asked for at once."""
    look = _Look(sweep, record, now_s)
    rows: dict[int, PointRow] = {}
    begun: list[int] = []
    unmade: list[int] = []
    for index in look.settings:
        run = sweep.point(index)
        if (ended := read_ended(run)) is not None:
            rows[index] = look.row(index, ended)
        else:
            (begun if run.plan.exists() else unmade).append(index)

    def ask(refs: Sequence[str]) -> Mapping[str, Observation]:
        places = [ref for index in unmade if (ref := look.place(index)) is not None]
        look.seen |= observe_all(list(dict.fromkeys([*refs, *places])))
        return look.seen

    records = read_records([sweep.point(index) for index in begun], ask)
    if not look.seen and (unmade or begun):
        ask([ref for index in begun if (ref := look.place(index)) is not None])
    for index, each in zip(begun, records, strict=True):
        only_looked_at = each.ref is None and not each.state.is_final and each.attempts == 0
        rows[index] = look.waiting(index) if only_looked_at else look.row(index, each)
    rows |= {index: look.waiting(index) for index in unmade}
    return SweepTable(
        sweep_id=sweep.sweep_id,
        rows=tuple(rows[index] for index in sorted(rows)),
        keys=record.keys,
        metric=record.metric or next((row.metric_name for row in rows.values() if row.metric is not None), None),
    )


class _Look:
    """What is known of the points of a sweep at one moment."""

    def __init__(self, sweep: SweepDir, record: SweepRecord, now_s: float) -> None:
        events = read_events(sweep.path)
        self._sweep, self._now_s = sweep, now_s
        self._wanted = (record.metric or "").rpartition(" ")[0]
        self._newest: dict[int, Submission] = {
            each.offset + task: each for each in submissions(events) for task in each.tasks
        }
        self._cancelled_s = max((time_of(each) for each in events if each["event"] == "cancel_requested"), default=0.0)
        self.seen: dict[str, Observation] = {}
        self.settings = {
            int(line["index"]): {str(key): str(text) for key, text in line["set"].items()}
            for line in point_lines(sweep)
        }

    def place(self, index: int) -> str | None:
        """The job of a point, or the queue that it waits in."""
        newest = self._newest.get(index)
        return None if newest is None else newest.ref_of(index) or newest.ref

    def waiting(self, index: int) -> PointRow:
        """A point that has not begun."""
        ref = self.place(index)
        observed = UNKNOWN if ref is None else self.seen.get(ref, UNKNOWN)
        why = observed.reason
        if ref is None:
            state = UNSTARTED
        elif observed.alive is None:
            state, why = RunState.UNKNOWN.value, observed.detail
        elif observed.alive:
            state = RunState.PENDING.value
        elif observed.state.startswith("CANCELLED") or self._cancelled_s > self._submitted_s(index):
            state = RunState.CANCELLED.value
        else:
            state = UNSTARTED
        run_id = self._sweep.point(index).run_id
        return PointRow(
            index=index,
            run_id=run_id,
            state=state,
            settings=self.settings[index],
            why=why,
            ref=ref,
            submitted_s=self._submitted_s(index),
        )

    def row(self, index: int, record: RunRecord) -> PointRow:
        """A point that has begun."""
        run = self._sweep.point(index)
        result = read_result(run) or {}
        metrics: Mapping[str, object] = record.metrics or result.get("metrics") or {}
        if not record.state.is_final or not metrics:
            metrics = {name: value for line in newest_metrics(run.metrics) for name, value in line.items()}
        name = self._wanted or next((each for each in sorted(metrics) if each.startswith("eval/")), "")
        value = metrics.get(name)
        return PointRow(
            index=index,
            run_id=run.run_id,
            state=record.state.value,
            settings=self.settings[index],
            metric=float(value) if isinstance(value, int | float) else None,
            metric_name=name,
            step=record.step,
            total_steps=record.total_steps,
            time_s=self._time_s(record, result),
            exit_code=record.exit_code,
            cause=None if record.cause is None else record.cause.value,
            why="" if record.state is RunState.SUCCEEDED else record.why,
            ref=record.ref or self.place(index),
            submitted_s=record.submitted_s or self._submitted_s(index),
            started=True,
        )

    def _submitted_s(self, index: int) -> float:
        newest = self._newest.get(index)
        return 0.0 if newest is None else newest.time_s

    def _time_s(self, record: RunRecord, result: Mapping[str, Any]) -> float | None:
        spent = result.get("time") or {}
        if spent:
            total_s = spent.get("total_s")
            return None if total_s is None else float(total_s) - float(spent.get("queue_s") or 0.0)
        if record.started_s is None or not (record.attempts or record.allocations):
            return None
        return (record.ended_s or self._now_s) - record.started_s


# ---------------------------------------------------------------- as text


def table_text(table: SweepTable, *, limit: int | None = None) -> str:
    """The points as aligned columns, the best first where that is known."""
    rows = table.best_first()
    shown = rows if limit is None else rows[:limit]
    metric = (table.metric or "").partition(" ")[0]
    has_why = any(row.why for row in shown)
    head = ("POINT", "STATE", *table.keys, *([metric] if metric else []), "STEP", "TIME", *(["WHY"] if has_why else []))
    lines = [head, *(_cells(row, table.keys, metric=bool(metric), why=has_why) for row in shown)]
    text = "\n".join(aligned(lines))
    more = f"\n... and {len(rows) - len(shown)} more" if len(shown) < len(rows) else ""
    note = f"\n{note}" if (note := _why_unsorted(table)) else ""
    return f"{table.sweep_id}   {counts_text(table.counts)}\n{text}{more}{note}"


def _why_unsorted(table: SweepTable) -> str:
    """Why the points stand in their own order; empty where they do not, or where there is nothing to compare."""
    known = sum(row.metric is not None for row in table.rows)
    if not table.metric or table.metric.endswith((" min", " max")) or known < 2:
        return ""
    return f"in the order of the points: the recipe does not say which end of {table.metric} is better (sweep.metric)"


def counts_text(counts: Mapping[str, int]) -> str:
    """`3 RUNNING, 17 SUCCEEDED`."""
    return ", ".join(f"{number:,} {state}" for state, number in counts.items())


def _cells(row: PointRow, keys: Sequence[str], *, metric: bool, why: bool) -> tuple[str, ...]:
    return (
        str(row.index),
        row.state,
        *(row.settings.get(key, "") for key in keys),
        *(["" if row.metric is None else f"{row.metric:.4g}"] if metric else []),
        step_text(row.step, row.total_steps),
        "" if row.time_s is None else short_duration(row.time_s),
        *([row.why] if why else []),
    )


def quick_counts(sweep: SweepDir, record: SweepRecord) -> dict[str, int]:
    """State -> how many, by what the files say at one look: for the line of a sweep in a list of runs."""
    counts: Counter[str] = Counter()
    events = read_events(sweep.path)
    asked_s, stopped_s = (
        max((time_of(event) for event in events if event["event"] == name), default=0.0)
        for name in ("array_submitted", "cancel_requested")
    )
    waiting = "CANCELLED" if stopped_s > asked_s else "waiting"
    for index in range(record.points):
        run = sweep.point(index)
        result = read_result(run)
        if result is not None:
            counts[str(result.get("state"))] += 1
        else:
            counts["started" if run.plan.exists() else waiting] += 1
    return dict(counts)


Failures = Mapping[str, Sequence[PointRow]]


def _sentence(row: PointRow) -> str:
    """Of the cause alone: the errors themselves differ from point to point."""
    return POLICIES[Cause(row.cause)].sentence if row.cause else row.why or "it did not say why"


def failures(table: SweepTable) -> Failures:
    """Why points have failed -> those that have, the most frequent reason first."""
    groups: dict[str, list[PointRow]] = {}
    for row in table.rows:
        if row.started and not row.goes_on and row.state != DONE:
            groups.setdefault(f"{row.state}: {_sentence(row)}", []).append(row)
    return dict(sorted(groups.items(), key=lambda each: -len(each[1])))


Message = Callable[[PointRow], str]


def report_text(table: SweepTable, message: Message) -> str:
    """What `launch report SWEEP` says: how many ended how, why they failed, and the best."""
    lines = [f"{table.sweep_id}   {count(len(table.rows), 'point')}: {counts_text(table.counts)}"]
    for why, rows in failures(table).items():
        lines.append(f"  {why}   {count(len(rows), 'point')}: {ranges(row.index for row in rows)}")
        if told := message(rows[0]):
            lines.append(f"    {rows[0].run_id}: {told}")
    best = table.best_first()[0]
    if best.metric is not None and (table.metric or "").endswith((" min", " max")):
        values = " ".join(f"{key}={value}" for key, value in best.settings.items())
        lines.append(f"  best      {best.run_id}   {table.metric} {best.metric:.4g}   {values}")
    elif note := _why_unsorted(table):
        lines.append(f"  no best   {note}")
    again = sum(1 for row in table.rows if not row.goes_on and row.state != DONE)
    if again:
        lines.append(f"Next   launch resume {table.sweep_id}   (runs {count(again, 'point')} again)")
    return "\n".join(lines)
