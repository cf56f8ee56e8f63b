"""What the place of a job says about it."""

from __future__ import annotations

from dataclasses import dataclass

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RECOVERING")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the place says about a job now."""

    alive: bool | None
    """Waiting counts as alive. None = it cannot be told from here."""
    exit_code: int | None = None
    """Where the place knows it; result.json is the truth."""
    detail: str = ""
    """A sentence for people, where there is something to say."""
    state: str = ""
    """In the place's own word: PENDING, RUNNING, NODE_FAIL ... Empty: it has none, or does not know the job."""
    reason: str = ""
    """Why it waits, or why it ended, in the place's own word: Resources, Priority, QOSMaxJobsPerUserLimit ..."""
    starts_s: float | None = None
    """When it is expected to start, in seconds since the epoch."""
    ends_s: float | None = None
    """When its time limit ends it; of one that is over, when it ended."""
    nodes: str = ""
    """In the place's own spelling: n[1-2]."""

    @property
    def waits(self) -> bool:
        """Whether it is in the queue and has not begun."""
        return self.state in _WAITING


UNKNOWN = Observation(alive=None)
ALIVE = Observation(alive=True)
GONE = Observation(alive=False)
