"""What a head agent takes over from those before it: from the events of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.agent.causes import Failure
from launcher.runs.events import Event, read_lines
from launcher.runs.rundir import RunDir
from launcher.runs.times import newest_submission


@dataclass(frozen=True, kw_only=True)
class Past:
    """Of a run, for a head agent that begins."""

    attempt: int
    """The number of the last one, of the whole run; 0: there was none."""
    restarts: int
    """That were used up since the newest launch or resume."""
    failure: Failure | None
    """What ended the last attempt."""
    is_interrupted: bool
    """Whether a head agent has begun in the same place, and was lost in the middle: this one is its successor."""
    members: tuple[int, ...]
    """The nodes of the attempt that it was lost in; empty where it had all of them."""


def past_of(events: Sequence[Event], *, allocation: int | None) -> Past:
    """allocation: its number, in a SLURM job, each of which has a head agent of its own."""
    lately = newest_submission(events) or events
    here = [each for each in lately if each["event"] == "attempt_started" and each.get("allocation") == allocation]
    newest = max(here, key=lambda event: int(event["attempt"]), default={})
    return Past(
        attempt=max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0),
        restarts=max((event["restarts"] for event in lately if event["event"] == "restarting"), default=0),
        failure=_last_failure(lately),
        is_interrupted=bool(here),
        members=tuple(newest.get("members") or ()),
    )


def attempt_seen(run: RunDir, node: int) -> int:
    """The newest attempt that a node has had a worker in, by what its own agent has written; 0: none."""
    lines = read_lines(run.events / f"node-{node}.jsonl")
    return max((int(line["attempt"]) for line in lines if line.get("event") == "worker_started"), default=0)


def _last_failure(events: Sequence[Event]) -> Failure | None:
    ended = [event for event in events if event["event"] == "attempt_ended"]
    if not ended:
        return None
    same = ("attempt", "node", "rank")
    for event in events:
        if event["event"] == "failure" and all(event.get(key) == ended[-1].get(key) for key in same):
            return Failure.from_record(event)
    return None
