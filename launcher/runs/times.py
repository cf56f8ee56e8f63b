"""Where the time of a run went, and how each of its attempts ended: pure functions of its events.

    queue   waiting for an allocation of a cluster
    start   from the command to the first step of the first attempt
    train   steps that counted         eval, save   as the job recorded them
    lost    training of steps that had to be done again, or would have to be
    down    from the end of an attempt to the first step of the next
    end     from the last of the training to the end of the run

They add up to the whole; what is spent in the queue is in no other part. Of a script without a step clock the start of
its workers counts as its first step, and what it lost is not known. Standard library only: the head agent writes the
result from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.runs.events import Event, time_of

PARTS = ("queue", "start", "train", "eval", "save", "lost", "down", "end")


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
    marks: list[tuple[float, int]] = field(default_factory=list)
    """(time, step): what was saved, or for a script what it said of its progress."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it took)."""
    saves: list[tuple[float, float]] = field(default_factory=list)


def spans(events: Sequence[Event]) -> list[Span]:
    """The attempts among these events, in order."""
    found: dict[int, Span] = {}
    allocation: int | None = None
    before: Event = {}
    for event in events:
        name, number = event.get("event"), event.get("attempt")
        if name == "attempt_started" and isinstance(number, int):
            found[number] = Span(attempt=number, started_s=time_of(event), allocation=allocation)
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


def time_parts(events: Sequence[Event], *, now_s: float | None = None) -> dict[str, float]:
    """Seconds of each part since the newest launch or resume, and `total`; empty where its beginning is not known.

    now_s: what time it is, for a run that goes on: until then it has trained, and nothing of that is lost.
    """
    story = newest_submission(events)
    if not story:
        return {}
    end = next((event for event in reversed(story) if event.get("event") == "finished"), story[-1])
    begin_s, end_s = time_of(story[0]), time_of(end) if now_s is None else now_s
    parts = dict.fromkeys(PARTS, 0.0)
    attempts = spans(story)
    if attempts and now_s is not None and not attempts[-1].ended:
        attempts[-1].complete = True
    queued = queue_times(story, end_s)
    past_s, waiting = begin_s, "start"
    for index, span in enumerate(attempts):
        ended_s = max(past_s, min(end_s if span.ended_s is None else span.ended_s, end_s))
        trained = span.first_s is not None and span.first_s < ended_s
        first_s = max(past_s, span.first_s) if trained and span.first_s is not None else ended_s
        _wait(parts, waiting, queued, past_s, first_s)
        for name, part_s in _inside(span, attempts[index + 1 :], first_s, ended_s).items():
            parts[name] += part_s
        past_s, waiting = ended_s, "down"
    _wait(parts, "end" if attempts else "start", queued, past_s, end_s)
    return {**{name: round(part_s, 3) for name, part_s in parts.items()}, "total": round(end_s - begin_s, 3)}


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


def _wait(
    parts: dict[str, float], name: str, queued: Sequence[tuple[float, float]], begin_s: float, end_s: float
) -> None:
    """Add a time in which nothing trained: what of it was spent in the queue, and the rest."""
    queue_s = sum(max(0.0, min(to_s, end_s) - max(from_s, begin_s)) for from_s, to_s in queued)
    parts["queue"] += min(queue_s, end_s - begin_s)
    parts[name] += max(0.0, end_s - begin_s - queue_s)


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
    elif name == "checkpoint_saved" and isinstance(step, int):
        span.marks.append((time_s, step))
        span.saves.append((time_s, _seconds(event)))
    elif name == "evaluated":
        span.evals.append((time_s, _seconds(event)))
    elif name == "summary":
        span.ended_s, span.complete = time_s, True
    elif name == "attempt_ended":
        span.ended, span.ended_s, span.complete = event, time_s, False


def _inside(span: Span, later: Sequence[Span], first_s: float, ended_s: float) -> dict[str, float]:
    """What is between the first step of an attempt and its end."""
    left_s = ended_s - first_s
    kept_s = _kept_until(span, next((each for each in later if each.has_clock), None), first_s, ended_s)
    parts: dict[str, float] = {}
    evals, saves = sum(time_s for _, time_s in span.evals), sum(time_s for _, time_s in span.saves)
    again = ended_s - kept_s - sum(time_s for at_s, time_s in (*span.evals, *span.saves) if at_s > kept_s)
    for name, wanted_s in (("eval", evals), ("save", saves), ("lost", again)):
        parts[name] = min(max(0.0, wanted_s), left_s)
        left_s -= parts[name]
    return {**parts, "train": left_s}


def _kept_until(span: Span, following: Span | None, first_s: float, ended_s: float) -> float:
    """Until when what an attempt did was not in vain."""
    if span.complete or not span.has_clock:
        return ended_s
    if following is not None:
        step = following.start_step
        if step is None and following.marks:
            step = following.marks[0][1] - 1
        return max((at_s for at_s, saved in span.marks if step is not None and saved <= step), default=first_s)
    if span.start_step is None:  # a script's own checkpoints are not known by their steps
        return ended_s
    return max((at_s for at_s, _ in span.marks), default=first_s)


def _seconds(event: Event) -> float:
    value: Any = event.get("time_s")
    return float(value) if isinstance(value, int | float) else 0.0
