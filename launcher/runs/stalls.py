"""What is said of runs that stood still, of ranks that the others wait for at every step, and of nodes that were lost.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.runs.events import Event
from launcher.wording import short_duration


def straggling(own_ms: float, others_ms: float) -> str:
    """What is said of a straggler, after its name."""
    return f"{own_ms:.3g} ms of own work per step, the others {others_ms:.3g} ms: they wait for it at every step"


def straggler_text(event: Mapping[str, Any]) -> str:
    """`rank 1 on node 0 (n1): 42 ms of own work per step, ...`."""
    who = f"rank {event.get('rank')} on node {event.get('node')} ({event.get('host')})"
    return f"{who}: {straggling(float(event.get('own_ms') or 0), float(event.get('others_ms') or 0))}"


def stalls_text(events: Sequence[Event]) -> str:
    """The hangs, the stragglers and the lost nodes of a run, a line each; empty where there were none.

    A hang that was only reported may have been said more than once: the last time counts, with how it went on.
    """
    hangs: list[Event] = []
    lines: dict[int, str] = {}
    others: list[str] = []
    for event in events:
        name, attempt = event.get("event"), f"attempt {event.get('attempt')}"
        if name == "hang":
            if not hangs or _since_s(event) - _since_s(hangs[-1]) > 1.0:
                hangs.append(event)
            else:
                hangs[-1] = event
            followed = "; the attempt was ended" if event.get("action") == "restart" else ""
            lines[len(hangs)] = f"hang       {attempt}   {event.get('message')}{followed}"
        elif name == "hang_over" and hangs:
            lines[len(hangs)] += f"; it went on after {short_duration(float(event.get('waited_s') or 0))}"
        elif name == "straggler":
            others.append(f"straggler  {attempt}   {straggler_text(event)}")
        elif name == "agent_lost" and event.get("detail"):
            others.append(f"lost       node {event.get('node')}: {event['detail']}")
        elif name == "node_replaced" and others:
            others[-1] += "; another agent was started in its place"
    return "\n".join([*lines.values(), *others])


def _since_s(event: Event) -> float:
    """When the last progress before it was made."""
    return float(event.get("time") or 0) - float(event.get("waited_s") or 0)
