"""The attempts of a run, as its events tell them: when each began, stood at its first step, and ended. Pure.

What they add up to is `runs.ledger`. Standard library only: the head agent writes the result from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.runs.events import Event, time_of


@dataclass(kw_only=True)
class Span:
    """One attempt, as its events tell it. Times are seconds since the epoch."""

    attempt: int
    started_s: float
    allocation: int | None = None
    """On SLURM: the number of the allocation in which it ran."""
    first_s: float | None = None
    """Its first step; of a script without a step clock the start of its last worker."""
    ended_s: float | None = None
    """The end of the training, or of the workers. None: nobody wrote it down."""
    start_step: int | None = None
    end_step: int | None = None
    has_clock: bool = False
    ended: Event = field(default_factory=dict)
    """What ended it: `attempt_ended`, `finished`, or on SLURM the end of its allocation."""
    complete: bool = False
    """Whether it ended with everything saved: at the end of the training, or by a stop."""
    nodes: int | None = None
    """How many took part. None: it was not said."""
    failed_s: float | None = None
    """When the first of its workers failed, or since when none of them came further; noticed, handled and restarted
    after that."""
    marks: list[tuple[float, int]] = field(default_factory=list)
    """(time, step): the state of which moment was saved, or for a script what it said of its progress."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it took)."""
    saves: list[tuple[float, float]] = field(default_factory=list)
    """(when it was complete, how long the training waited for it)."""
    rescued_step: int | None = None
    """Up to which step survivors have kept what was done."""
    rollbacks: list[tuple[float, int]] = field(default_factory=list)
    """(when, to which step) the training went back by itself."""


def spans(events: Sequence[Event]) -> list[Span]:
    """The attempts among these events, in order."""
    found: dict[int, Span] = {}
    allocation: int | None = None
    before: Event = {}
    for event in events:
        name, number = event.get("event"), event.get("attempt")
        if name == "attempt_started" and isinstance(number, int):
            nodes = event.get("nodes")
            found[number] = Span(
                attempt=number,
                started_s=time_of(event),
                allocation=allocation,
                nodes=nodes if isinstance(nodes, int) else None,
            )
        elif name == "finished":
            _finish(list(found.values()), event)
        elif name in ("stopped", "allocation_ended"):
            _leave(list(found.values()), event)
        elif name == "allocation_started":
            # Of an allocation that ended without a word, the last that was heard is the end.
            _leave(list(found.values()), {"event": "allocation_ended", "time": time_of(before)})
            allocation = event.get("allocation")
        elif isinstance(number, int) and number in found:
            _note(found[number], str(name), event)
        if name not in _OF_NOBODY:
            before = event
    return list(found.values())


def newest_submission(events: Sequence[Event]) -> Sequence[Event]:
    """The events since the launch, or since the newest resume."""
    begun = [index for index, event in enumerate(events) if event.get("event") in ("created", "resumed")]
    return events[begun[-1] :] if begun else ()


_OF_NOBODY = ("created", "submitted", "resumed", "requeued", "cancel_requested")
"""Events of a run of which nothing runs."""


def queue_times(story: Sequence[Event], end_s: float) -> list[tuple[float, float]]:
    """(from, to) of each time in the queue. What is submitted to a cluster waits; a local run has its nodes at once."""
    waits: list[tuple[float, float]] = []
    since_s: float | None = None
    last_s: float | None = None
    for event in story:
        name, time_s = event.get("event"), time_of(event)
        if name == "requeued" or (name == "submitted" and str(event.get("ref")).startswith("slurm:")):
            since_s = time_s
        elif name == "allocation_started":
            # Requeued by SLURM itself, while nobody could write it down: since the last that was heard.
            begun_s = last_s if since_s is None else since_s
            waits += [] if begun_s is None else [(begun_s, time_s)]
            since_s = None
        if name not in _OF_NOBODY:
            last_s = time_s
    return waits if since_s is None else [*waits, (since_s, end_s)]


def _leave(attempts: list[Span], event: Event) -> None:
    """The allocation is over, and with it the last attempt, unless that had ended before."""
    if not attempts:
        return
    last = attempts[-1]
    if last.ended and last.ended.get("event") != "stopped":
        return
    last.complete = last.complete or bool(event.get("saved"))
    last.ended_s = time_of(event) if last.ended_s is None else last.ended_s
    last.ended = event


def _finish(attempts: list[Span], event: Event) -> None:
    """The run is over, and with it the last attempt, unless that had ended before."""
    if attempts and not attempts[-1].ended:
        last = attempts[-1]
        last.ended = event
        last.ended_s = time_of(event) if last.ended_s is None else last.ended_s


def _note(span: Span, name: str, event: Event) -> None:
    time_s, step = time_of(event), event.get("step")
    if isinstance(step, int) and name != "training_started":
        span.end_step = max(step, span.end_step or 0)
    if name == "training_started":
        span.first_s, span.has_clock, span.start_step = time_s, True, step
    elif name == "progress" and isinstance(step, int):
        if not span.has_clock:
            span.first_s, span.has_clock = time_s, True
        span.marks.append((time_s, step))
    elif name == "worker_started" and not span.has_clock:
        span.first_s = time_s
    elif name in ("checkpoint_saved", "memory_saved") and isinstance(step, int):
        took_s = _seconds(event, "time_s")
        span.marks.append((time_s - took_s, step))
        span.saves.append((time_s, _seconds(event, "blocked_s") if "blocked_s" in event else took_s))
    elif name == "evaluated":
        span.evals.append((time_s, _seconds(event, "time_s")))
    elif name == "rolled_back" and isinstance(event.get("to_step"), int):
        span.rollbacks.append((time_s, event["to_step"]))
    elif name == "rescued":
        span.rescued_step = step if isinstance(step, int) else None
    elif name == "failure" or (name == "hang" and event.get("action") == "restart"):
        stood_s = time_s - (_seconds(event, "waited_s") if name == "hang" else 0.0)
        span.failed_s = stood_s if span.failed_s is None else min(span.failed_s, stood_s)
    elif name == "summary":
        span.ended_s, span.complete = time_s, True
    elif name == "attempt_ended":
        span.ended, span.ended_s, span.complete = event, time_s, False


def _seconds(event: Event, name: str) -> float:
    value: Any = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
