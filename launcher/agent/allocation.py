"""The allocation that the agents of a SLURM job are in, as the batch side tells them in srun's environment.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEAD = "LAUNCH_HEAD"
"""`address:port` of the head agent."""
SECONDS_LEFT = "LAUNCH_SECONDS_LEFT"
"""Until SLURM ends the job; not set where it has no end."""
NUMBER = "LAUNCH_ALLOCATION"
"""Of this allocation, from 1."""
NODES = "LAUNCH_NODES"
"""How many nodes it has: of MIN:MAX, perhaps fewer than the plan."""
VARIABLES = (HEAD, SECONDS_LEFT, NUMBER, NODES)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What the agents know of it."""

    number: int
    head: tuple[str, int]
    ends_s: float | None
    """When SLURM ends the job, by this process's monotonic clock."""
    nodes: int | None = None
    """How many it has; the plan's further nodes never come. None: all of the plan."""


def from_environment(env: Mapping[str, str], *, now_s: float) -> Allocation:
    """Read it. Raises ValueError where the batch side has not set it."""
    address, separator, port = env.get(HEAD, "").rpartition(":")
    number, left = env.get(NUMBER, ""), env.get(SECONDS_LEFT)
    if not separator or not port.isdecimal() or not number.isdecimal():
        raise ValueError(f"{HEAD} and {NUMBER} are not set: a task is started by the batch side, with srun")
    ends_s = None if left is None else now_s + float(left)
    nodes = env.get(NODES, "")
    return Allocation(
        number=int(number),
        head=(address.strip("[]"), int(port)),
        ends_s=ends_s,
        nodes=int(nodes) if nodes.isdecimal() else None,
    )


def to_environment(
    number: int, head: tuple[str, int], seconds_left: float | None, *, nodes: int | None = None
) -> dict[str, str]:
    """What `from_environment` reads."""
    left = {} if seconds_left is None else {SECONDS_LEFT: f"{seconds_left:.0f}"}
    address = f"[{head[0]}]" if ":" in head[0] else head[0]
    has = {} if nodes is None else {NODES: str(nodes)}
    return {HEAD: f"{address}:{head[1]}", NUMBER: str(number), **left, **has}


def record_of(run_dir: Path, number: int) -> Path:
    """What the batch side of an allocation writes: it is there once the allocation has begun."""
    return run_dir / "events" / f"batch-{number}.jsonl"


def stop_request(run_dir: Path, number: int) -> Path:
    """Where the batch side asks the head agent of its own node to stop: a line with the reason."""
    return run_dir / "slurm" / f"stop-{number}"
