"""Which failure of an attempt was the first: what may be the consequence of another one waits for that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGTERM

from launcher.agent.causes import Failure
from launcher.runs.states import Cause

SETTLE_S = 1.0
"""How long a lost peer waits for the failure that it is a consequence of. Ends as soon as that arrives."""
STACKS_S = 2.0
"""How long the workers that still run have to write down where they are, once a collective has timed out."""


@dataclass(kw_only=True)
class Weighing:
    """Of one attempt. Times are of the head agent's clock."""

    all_signalled: bool
    """Whether who stops the run signals its workers, too, as SLURM and SkyPilot do."""
    hang: Failure | None = None
    """The rank in which a collective has timed out first; what comes after it is a consequence, or the same."""
    suspects: list[Failure] = field(default_factory=list)
    """Those that may be consequences, in the order in which they came."""
    failed: set[int] = field(default_factory=set)
    """Ranks that have failed, whoever was first."""
    until_s: float | None = None
    """How long it waits for more before it decides; None: there is nothing to decide."""

    def add(self, failure: Failure, now_s: float) -> Failure | None:
        """A failure in the middle of the attempt. Returns it where it is the first beyond doubt."""
        if self.hang is not None:
            return None
        if failure.cause is Cause.HANG:
            self.hang, self.until_s = failure, now_s + STACKS_S
            return None
        if failure.cause is Cause.PEER_LOST or self._may_be_a_stop(failure):
            self.suspects.append(failure)
            if self.until_s is None:
                self.until_s = now_s + SETTLE_S
            return None
        return failure

    @property
    def first(self) -> Failure | None:
        """The first, as far as it is known; None: there was none that had to wait."""
        return self.hang or next(iter(self.suspects), None)

    def is_time(self, now_s: float) -> bool:
        """Whether no more is waited for."""
        return self.until_s is not None and now_s >= self.until_s

    def _may_be_a_stop(self, failure: Failure) -> bool:
        """Of signalled workers one without a handler is dead before its agent has said that this is a stop."""
        return self.all_signalled and failure.exit_code == 128 + SIGTERM and failure.cause is Cause.SIGNAL
