"""The stop of a run: who asked for it, when it is time for one, and how a run that was stopped ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGTERM

from launcher.agent.causes import STOPPED_EXIT_CODE
from launcher.agent.effects import Effect, Finish, Leave, Record, Say
from launcher.agent.limits import Limit
from launcher.runs.states import Cause, RunState
from launcher.wording import signal_name

ONE_SIGNAL_S = 2.0
"""SLURM signals all processes of a step: what comes within this time is one signal."""
_LAUNCHER_LOST = "the launcher was killed"


@dataclass(kw_only=True)
class Stopping:
    """Of one head agent. Times are of its clock."""

    now_s: float
    """When it begins."""
    grace_s: float
    in_allocation: bool = False
    """A stop ends that, and whether it ends the run the batch side says."""
    ends_s: float | None = None
    """When SLURM ends the job, where that is known."""
    limit: Limit | None = None
    """The run's own."""
    reason: str | None = None
    """Why it stops; None: it does not."""
    limit_reached: bool = False
    _signum: int = int(SIGTERM)
    _cause: Cause = Cause.CANCELLED
    _begun_s: float = 0.0
    _asked: dict[int, int] = field(default_factory=dict)
    """How often, through each node."""
    _warned_s: float | None = None
    _at_s: float | None = None
    """When to stop so that the workers have the grace time before the end of the job."""

    def __post_init__(self) -> None:
        if self.ends_s is not None:  # of a job that is shorter than that, half
            self._at_s = self.ends_s - min(self.grace_s, (self.ends_s - self.now_s) / 2)

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self.reason is not None

    def asked(self, node: int) -> int:
        """Somebody asks through this node: for the how manieth time."""
        self._asked[node] = self._asked.get(node, 0) + 1
        return self._asked[node]

    def is_another(self, now_s: float) -> bool:
        """Whether a signal that comes now is another one than that which began the stop."""
        return now_s - self._begun_s >= ONE_SIGNAL_S

    def begin(self, reason: str, signum: int, cause: Cause, now_s: float) -> None:
        """From now on."""
        self.reason, self._signum, self._cause, self._begun_s = reason, signum, cause, now_s

    def due(self, now_s: float) -> str | None:
        """Why it is time to stop, where it is: for the end of the job, or because a limit of the run is reached."""
        if self.limit is not None and now_s >= self.limit.at_s:
            self.limit_reached = True
            return self.limit.reason
        if self._at_s is not None and self.ends_s is not None and now_s >= self._at_s:
            return f"the job ends in {max(0.0, self.ends_s - now_s):.0f} s"
        return None

    def warning(self, signum: int, now_s: float) -> tuple[list[Effect], bool]:
        """SLURM's signal before the end, or one more of the same: what is said, and whether it is time to stop."""
        if self._warned_s is not None and now_s - self._warned_s < ONE_SIGNAL_S:
            return [], False
        self._warned_s = now_s
        left_s = None if self.ends_s is None else round(self.ends_s - now_s, 1)
        ignored = left_s is not None and left_s > 2 * self.grace_s
        name = signal_name(signum)
        heard = Record("signal_heard", {"signal": name, "seconds_left": left_s, "ignored": ignored})
        if not ignored:
            return [heard], True
        noted = f"{name} with {left_s:.0f} s left: noted; the stop comes {self.grace_s:g} s before the end"
        return [heard, Say(noted)], False

    def end(self, *, saved: bool) -> Finish | Leave:
        """How the run, or its allocation, ends."""
        code = STOPPED_EXIT_CODE if saved else 128 + self._signum
        reason = self.reason or "a worker was asked to stop"
        if self.limit_reached:
            return Finish(RunState.TIMED_OUT, Cause.TIME_LIMIT, code, reason)
        if self.in_allocation:
            return Leave(self._cause if self.requested else Cause.SIGNAL, code, reason, saved=saved)
        cause = Cause.LAUNCHER_LOST if self.reason == _LAUNCHER_LOST else Cause.CANCELLED
        return Finish(RunState.CANCELLED, cause, code, reason)
