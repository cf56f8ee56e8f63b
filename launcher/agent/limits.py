"""How much of a run's `limits:` is used, and when the rest of it will be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.planning.plan import Plan
from launcher.runs.events import Event, time_of
from launcher.runs.ledger import gpus_per_node
from launcher.runs.times import Span, spans


@dataclass(frozen=True)
class Limit:
    """The limit that is reached first."""

    at_s: float
    """When, by the monotonic clock of who asks, if the workers run from now on."""
    reason: str


def limit_of(
    plan: Plan, events: Sequence[Event], *, now_s: float, time_s: float, nodes: int | None = None
) -> Limit | None:
    """Which of the plan's limits ends the run first. now_s: the monotonic clock; time_s: seconds since the epoch.

    nodes: how many work from now on; None = all of the plan.
    """
    limits, used_s = plan.limits, worked_s(events)
    found = []
    if limits.wall_s is not None:
        reason = f"limits.wall: {_hours(limits.wall_s)} of {_hours(limits.wall_s)} are used"
        found.append(Limit(now_s + limits.wall_s - used_s, reason))
    gpus, most = gpus_per_node(plan), len(plan.nodes)
    if limits.gpu_hours is not None and gpus:
        used_gpu_s = gpus * sum(took_s * (span.nodes or most) for span, took_s in _worked(events))
        left_s = (limits.gpu_hours * 3600 - used_gpu_s) / (gpus * (nodes or most))
        found.append(Limit(now_s + left_s, f"limits.gpu_hours: {limits.gpu_hours:g} of {limits.gpu_hours:g} are used"))
    if limits.until_s is not None:
        found.append(Limit(now_s + limits.until_s - time_s, "limits.until: the moment has come"))
    return min(found, key=lambda each: each.at_s, default=None)


def worked_s(events: Sequence[Event]) -> float:
    """Seconds for which there were workers, over all attempts so far."""
    return sum(took_s for _, took_s in _worked(events))


def _worked(events: Sequence[Event]) -> list[tuple[Span, float]]:
    """Each attempt, and for how many seconds it had workers."""
    last: dict[int, float] = {}
    for event in events:
        attempt = event.get("attempt")
        if isinstance(attempt, int):
            last[attempt] = time_of(event)
    return [(span, max(0.0, last.get(span.attempt, span.started_s) - span.started_s)) for span in spans(events)]


def _hours(time_s: float) -> str:
    """90 s, 10 min, 2 h."""
    for size_s, unit in ((3600, "h"), (60, "min")):
        if time_s >= 2 * size_s or time_s == size_s:
            return f"{time_s / size_s:g} {unit}"
    return f"{time_s:g} s"
