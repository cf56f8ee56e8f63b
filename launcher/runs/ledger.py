"""Where the time of a run went, attempt by attempt: pure functions of its events.

    queue   waiting for an allocation of a cluster
    start   from the command to the first step of the first attempt
    train   steps that counted
    eval    evaluations
    save    what the training waited for its checkpoints; what is written in the background costs it nothing
    lost    training of steps that had to be done again, or would have to be, or were rolled back
    down    from the failure of an attempt to the first step of the next
    end     from the last of the training to the end of the run

Each attempt has what was waited for it, and the last one the end too. The parts of all attempts add up to the whole, to
the millisecond; what is spent in the queue is in no other part. Of a script without a step clock the start of its
workers counts as its first step, and what it lost is not known. Standard library only: the head agent writes the result
from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.runs.events import Event, time_of
from launcher.runs.times import Span, newest_submission, queue_times, spans

if TYPE_CHECKING:
    from launcher.planning.plan import Plan

PARTS = ("queue", "start", "train", "eval", "save", "lost", "down", "end")
_Interval = tuple[int, int]


@dataclass(kw_only=True)
class Entry:
    """One attempt in the ledger."""

    attempt: int
    """0: there was none, and the run ended while it started."""
    nodes: int | None
    """How many took part. None: it was not said."""
    times: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    """Milliseconds by PARTS."""

    @property
    def total(self) -> int:
        """Milliseconds."""
        return sum(self.times.values())


def ledger(events: Sequence[Event], *, now_s: float | None = None) -> list[Entry]:
    """The attempts since the newest launch or resume, in order; empty where its beginning is not known.

    now_s: what time it is, for a run that goes on: until then it has trained, and nothing of that is lost.
    """
    story = newest_submission(events)
    if not story:
        return []
    end = next((event for event in reversed(story) if event.get("event") == "finished"), story[-1])
    begin, ended = _ms(time_of(story[0])), _ms(time_of(end) if now_s is None else now_s)
    ended = max(begin, ended)
    attempts = spans(story)
    if attempts and now_s is not None and not attempts[-1].ended:
        attempts[-1].complete = True
    queued = [(_ms(one), _ms(other)) for one, other in queue_times(story, ended / 1000)]
    entries: list[Entry] = []
    past, waiting = begin, "start"
    for index, span in enumerate(attempts):
        entry = Entry(attempt=span.attempt, nodes=span.nodes)
        entries.append(entry)
        over = max(past, min(_end_of(span, ended), ended))
        first = over if span.first_s is None else min(over, max(past, _ms(span.first_s)))
        _wait(entry, waiting, queued, (past, first))
        _inside(entry, span, attempts[index + 1 :], (first, over))
        past, waiting = over, "down"
    if not entries:
        entries.append(Entry(attempt=0, nodes=None))
    _wait(entries[-1], "end" if attempts else "start", queued, (past, ended))
    return entries


def total_parts(entries: Sequence[Entry]) -> dict[str, float]:
    """Seconds of each part over all attempts, and `total`."""
    if not entries:
        return {}
    parts = {name: sum(entry.times[name] for entry in entries) / 1000 for name in PARTS}
    return {**parts, "total": sum(entry.total for entry in entries) / 1000}


def goodput(parts: dict[str, float]) -> float | None:
    """The share of the time that was training which counted; None where nothing is known."""
    return round(parts["train"] / parts["total"], 4) if parts.get("total") else None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a run holds on each node, and so what its time costs."""

    unit: str
    """`gpu_hours`, or `worker_hours` of a run on CPU."""
    per_node: int
    nodes: int
    """Of an attempt that does not say how many took part."""

    def hours(self, entry: Entry, name: str) -> float:
        """Device hours of a part, or of `total`. In the queue nothing is held."""
        held = {part: 0 if part == "queue" else time for part, time in entry.times.items()}
        time = sum(held.values()) if name == "total" else held[name]
        nodes = self.nodes if entry.nodes is None else entry.nodes
        return round(time / 3_600_000 * nodes * self.per_node, 6)


def gpus_per_node(plan: Plan) -> int:
    """GPUs that a run holds on each node, whether its workers use them or not; 0 on CPU."""
    used = plan.nproc_per_node if plan.device == "cuda" else 0
    return used if plan.slurm is None else max(used, plan.slurm.gpus_per_node)


def devices_of(plan: Plan) -> Devices:
    """What the nodes of a plan hold: GPUs, or on CPU its workers."""
    if gpus := gpus_per_node(plan):
        return Devices(unit="gpu_hours", per_node=gpus, nodes=len(plan.nodes))
    return Devices(unit="worker_hours", per_node=plan.nproc_per_node, nodes=len(plan.nodes))


def ledger_fields(entries: Sequence[Entry], devices: Devices) -> list[dict[str, Any]]:
    """The ledger as result.json and `launch report --json` have it: an object per attempt."""
    return [
        {
            "attempt": entry.attempt,
            "devices": (devices.nodes if entry.nodes is None else entry.nodes) * devices.per_node,
            **{f"{name}_s": entry.times[name] / 1000 for name in PARTS},
            "total_s": entry.total / 1000,
            devices.unit: {name: devices.hours(entry, name) for name in (*PARTS, "total")},
        }
        for entry in entries
    ]


def _ms(time_s: float) -> int:
    return round(time_s * 1000)


def _end_of(span: Span, ended: int) -> int:
    """When an attempt came to its end: its failure, where that was noticed only later."""
    if span.ended_s is None:
        return ended
    if span.failed_s is not None and not span.complete:
        return _ms(min(span.failed_s, span.ended_s))
    return _ms(span.ended_s)


def _wait(entry: Entry, name: str, queued: Sequence[_Interval], wait: _Interval) -> None:
    """Add a time in which nothing trained: what of it was spent in the queue, and the rest."""
    whole = wait[1] - wait[0]
    queue = min(whole, sum(max(0, min(to, wait[1]) - max(since, wait[0])) for since, to in queued))
    entry.times["queue"] += queue
    entry.times[name] += whole - queue


def _inside(entry: Entry, span: Span, later: Sequence[Span], ran: _Interval) -> None:
    """Divide what is between the first step of an attempt and its end."""
    first, over = ran
    pauses = [(_ms(at_s), _ms(took_s)) for at_s, took_s in (*span.evals, *span.saves)]
    gone = _vain(span, next((each for each in later if each.has_clock), None), ran)
    lost = sum(to - since for since, to in gone)
    lost -= sum(took for at, took in pauses if any(since < at <= to for since, to in gone))
    left = over - first
    evals, saves = (sum(_ms(took_s) for _, took_s in each) for each in (span.evals, span.saves))
    for name, wanted in (("eval", evals), ("save", saves), ("lost", lost)):
        entry.times[name] += min(max(0, wanted), left)
        left -= min(max(0, wanted), left)
    entry.times["train"] += left


def _vain(span: Span, following: Span | None, ran: _Interval) -> list[_Interval]:
    """When an attempt did what does not count: before a rollback, and after what was gone on from. Disjoint."""
    first, over = ran
    found = [(_kept_until(span, following, ran), over)]
    for at_s, step in span.rollbacks:
        at = max(first, min(_ms(at_s), over))
        since = max((_ms(mark_s) for mark_s, saved in span.marks if saved <= step and mark_s <= at_s), default=first)
        found.append((max(first, since), at))
    merged: list[_Interval] = []
    for since, to in sorted(each for each in found if each[0] < each[1]):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(to, merged[-1][1]))
        else:
            merged.append((since, to))
    return merged


def _kept_until(span: Span, following: Span | None, ran: _Interval) -> int:
    """Until when what an attempt did was not in vain."""
    first, over = ran
    if span.complete or not span.has_clock:
        return over
    step = span.start_step
    if following is not None:
        step = following.start_step
        if step is None and following.marks:
            step = following.marks[0][1] - 1
        if step is not None and span.rescued_step is not None and step >= span.rescued_step:
            return over
        kept = (_ms(at_s) for at_s, saved in span.marks if step is not None and saved <= step)
    elif step is None:  # a script's own checkpoints are not known by their steps
        return over
    else:
        kept = (_ms(at_s) for at_s, _ in span.marks)
    return max(first, min(over, max(kept, default=first)))
