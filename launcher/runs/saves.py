"""What saving has cost a run and what of it went wrong, in words, from its events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.runs.events import Event
from launcher.wording import count, first_line

_RUNNING = ("train", "eval", "save")
"""The parts of the time in which a training runs (`launcher.runs.ledger`)."""


def saves_text(events: Sequence[Event], parts: Mapping[str, float]) -> str:
    """A line for each kind of save; empty for a run that has told nothing. parts: seconds by part of the time."""
    running_s = sum(parts.get(part, 0.0) for part in _RUNNING)
    lines = [
        _cost("checkpoints", "checkpoint_saved", events, running_s),
        _cost("memory snapshots", "memory_saved", events, running_s),
        _failed([event for event in events if event["event"] == "save_failed"]),
        _uploads([event for event in events if event["event"] in ("uploaded", "upload_failed")]),
    ]
    return "\n".join(filter(None, lines))


def _cost(what: str, name: str, events: Sequence[Event], running_s: float) -> str:
    """`memory snapshots: 12, the training waited 0.20 s for them (0.4 % of its time)`."""
    known = [event for event in events if event["event"] == name and "blocked_s" in event]
    if not known:
        return ""
    blocked_s = sum(float(event["blocked_s"]) for event in known)
    share = f" ({100 * blocked_s / running_s:.1f} % of its time)" if running_s > 0 else ""
    return f"{what}: {len(known)}, the training waited {blocked_s:.2f} s for them{share}"


def _failed(failed: Sequence[Event]) -> str:
    if not failed:
        return ""
    last = failed[-1]
    return f"{count(len(failed), 'save')} failed, the last at step {last['step']}: {first_line(str(last['reason']))}"


def _uploads(events: Sequence[Event]) -> str:
    """`uploads: 3 to s3://bucket/runs/r/checkpoints, the last of step 30; 1 failed, the last at step 20: ...`"""
    done = [event for event in events if event["event"] == "uploaded"]
    failed = [event for event in events if event["event"] == "upload_failed"]
    parts = [f"{len(done)} to {done[-1]['url']}, the last of step {done[-1]['step']}"] if done else []
    if failed:
        last = failed[-1]
        parts.append(f"{len(failed)} failed, the last at step {last['step']}: {first_line(str(last['reason']))}")
    return f"uploads: {'; '.join(parts)}" if parts else ""
