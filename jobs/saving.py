"""Saves behind the training's back: one at a time, in a thread, over a process group that nothing else uses meanwhile.

What all ranks do is decided by all ranks, at the same step:

- whether there is trouble with a save rides on the message that the ranks exchange in every step (`Agreement`), so it
  is noticed within one; `settle` then finds out what it is and does what the recipe says;
- a save that is due while one is running waits for it;
- at the end, on a stop, and before a checkpoint is read, `finish` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed import ProcessGroup

from jobs.agreement import Agreement
from jobs.background import Background, Work
from jobs.checkpoint import Checkpoints, Saved, SaveError
from jobs.circle import Circle
from jobs.folders import Progress
from jobs.state import TrainingState

LIMIT_S = 1800.0
"""After so long a save counts as failed: its file system hangs."""
LIMIT_FACTOR = 10
"""Or after so many times the longest one yet, if that is more."""
SETTLE_S = 5.0
"""How much later than on one rank a save may end on another."""
LAST_S = 60.0
"""How long an error of the training waits for the save that is running."""
WORTH_SAYING_S = 0.5
"""Of a wait for the save before."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """To whom it speaks. On ranks other than 0 nobody listens."""

    complete: Callable[[Saved, int, float, float], None]
    """Checkpoint, step, seconds in all, seconds that the training was blocked. Called in the thread of the save."""
    failed: Callable[[int, str, int], None]
    """Step, reason, how many in a row."""
    say: Callable[[str], None]


@dataclass(kw_only=True)
class Counts:
    """What became of the saves of an attempt."""

    started: int = 0
    waited: int = 0
    """For the one before, which was not done."""
    failed: int = 0


class Saving:
    """The saves of one attempt, on one rank."""

    def __init__(
        self, checkpoints: Checkpoints, group: ProcessGroup | None, voice: Voice, *, asynchronous: bool, max_failed: int
    ) -> None:
        self.counts = Counts()
        self._checkpoints, self._group, self._voice = checkpoints, group, voice
        self._circle = Circle(group)
        self._asynchronous, self._max_failed = asynchronous, max_failed
        self._background = Background()
        self._work: Work | None = None
        """The save that was started last; None once it is known how it ended."""
        self._given_up = False
        """Whether that one has been counted as failed although it has not ended."""
        self._in_a_row = 0
        self._longest_s = 0.0

    @property
    def has_trouble(self) -> bool:
        """For the message of a step: a save of this rank has failed, or has not ended for too long."""
        work = self._work
        if work is None or self._given_up:
            return False
        return work.error is not None if work.done.is_set() else work.age_s > self._limit_s

    @property
    def holds_update(self) -> bool:
        """Whether the weights must not change yet."""
        return self._work is not None and not self._work.copied.is_set()

    def wait_for_copy(self) -> None:
        """Before the weights change."""
        if self._work is not None:
            begin_s = time.monotonic()
            self._work.copied.wait()
            self._work.blocked_s += time.monotonic() - begin_s

    def begin(self, state: TrainingState, progress: Progress, agreement: Agreement, *, last: bool) -> bool:
        """Start a save of the state as it is now, all ranks together. Returns False where none could be started.

        last: the caller waits for it, so the state is not copied. Raises SaveError, on all ranks, where one has failed
        and the recipe does not allow that.
        """
        begin_s = time.monotonic()
        self._wait_for_the_one_before(progress.step)
        stuck = self._given_up and not self._is_done
        agreed = agreement.now(float(self._checkpoints.needs_plan(state)), float(stuck))
        replan, stuck_anywhere = (value > 0 for value in agreed.sums)
        if agreement.trouble:
            self.settle(agreement)
            stuck_anywhere = self._given_up
        elif not self._given_up:
            self._succeeded()
        if stuck_anywhere:
            assert self._work is not None
            self._fail(progress.step, f"the save of step {self._work.step} has not ended yet")
            return False
        self._given_up = False
        draft = self._checkpoints.draft(state, progress, self._group, replan=replan)
        self._work = work = Work(step=progress.step, blocked_s=time.monotonic() - begin_s)
        self.counts.started += 1
        copies = self._asynchronous and not last
        told = partial(self._complete, work, in_front=not copies)
        write = partial(self._checkpoints.write, draft, circle=self._circle, on_complete=told)
        forward_changes = {f"model/{name}" for name, _ in state.net.named_buffers()}
        self._background.start(work, draft.parts, write, at_once=forward_changes, copies=copies)
        if copies:
            work.blocked_s += work.age_s
        else:
            work.done.wait(self._limit_s)
        return True

    def finish(self, agreement: Agreement) -> int | None:
        """Wait for the save that is running, all ranks together. Returns the step of one that has failed.

        One that was given up is not waited for.
        """
        if self._work is None or self._given_up:
            return None
        self._wait()
        agreement.now()
        if agreement.trouble:
            return self.settle(agreement)
        self._succeeded()
        return None

    def settle(self, agreement: Agreement) -> int | None:
        """Some rank has trouble, as all have heard: find out, and do what the recipe says, all ranks together.

        Returns the step whose state is not on disk; None where it is, after all. Raises SaveError.
        """
        work = self._work
        assert work is not None, "all ranks have started the same saves"
        work.done.wait(SETTLE_S)
        running, failed = agreement.now(float(not work.done.is_set()), float(work.error is not None)).sums
        agreement.trouble = False
        if work.error is not None and not isinstance(work.error, SaveError):
            raise work.error  # a peer is lost, or a fault of ours
        if not running and not failed:
            self._succeeded()
            return None
        if running:
            self._given_up = True
            reason = f"it has not ended after {work.age_s:.0f} s (limit {self._limit_s:.0f} s): its disk hangs"
        else:
            self._work = None
            reason = work.error.reason if work.error is not None else "another rank has lost the others in it"
        self._fail(work.step, reason)
        return work.step

    def let_end(self) -> None:
        """The training ends with an error: what is being saved should not end with it. Waits for LAST_S at most.

        The threads of all ranks go on whatever their trainings do, so this rank needs no other's consent.
        """
        if not self._is_done and not self._given_up:
            assert self._work is not None
            print(f"the training ends with an error; the save of step {self._work.step} is awaited", flush=True)
            self._work.done.wait(LAST_S)

    # ---------------------------------------------------------------- parts

    @property
    def _is_done(self) -> bool:
        return self._work is None or self._work.done.is_set()

    @property
    def _limit_s(self) -> float:
        return max(LIMIT_S, LIMIT_FACTOR * self._longest_s)

    def _wait(self) -> None:
        if self._work is not None and not self._given_up:
            self._work.done.wait(max(0.0, self._limit_s - self._work.age_s))

    def _wait_for_the_one_before(self, step: int) -> None:
        if not self._is_done and not self._given_up:
            assert self._work is not None
            begin_s = time.monotonic()
            self._wait()
            self.counts.waited += 1
            waited_s = time.monotonic() - begin_s
            if waited_s >= WORTH_SAYING_S:
                self._voice.say(
                    f"the save of step {step} waited {waited_s:.1f} s for the one of step {self._work.step}: "
                    f"they come faster than the disk takes them (checkpoint.every)"
                )

    def _complete(self, work: Work, saved: Saved, *, in_front: bool) -> None:
        blocked_s = work.blocked_s + (work.age_s if in_front else 0.0)
        self._voice.complete(saved, work.step, work.age_s, blocked_s)

    def _succeeded(self) -> None:
        if self._work is not None:
            self._longest_s = max(self._longest_s, self._work.took_s)
            self._work, self._in_a_row = None, 0

    def _fail(self, step: int, reason: str) -> None:
        self.counts.failed += 1
        self._in_a_row += 1
        self._voice.failed(step, reason, self._in_a_row)
        if self._in_a_row > self._max_failed:
            allowed = f" ({self._in_a_row} in a row, checkpoint.max_failed_saves: {self._max_failed})"
            place = f"step-{step} could not be written to {self._checkpoints.folder}"
            raise SaveError(place, f"{reason}{allowed if self._max_failed else ''}")
