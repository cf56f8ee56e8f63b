"""Before a training: is there room for what it will save, on disk and in memory? All ranks together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobs import registry
from jobs.checkpoint import Checkpoints, SaveError
from jobs.job import Job
from jobs.report import Reporter
from jobs.room import check_memory, expected_bytes
from jobs.snapshots import Snapshots
from jobs.state import TrainingState
from jobs.world import Meeting
from launcher.agent.memory import VARIABLE


@dataclass(frozen=True, kw_only=True)
class Saves:
    """What is saved, where, and who says so."""

    job: Job
    meeting: Meeting
    checkpoints: Checkpoints
    state: TrainingState
    report: Reporter
    stages: int = 1
    """Parts into which pipeline parallelism has cut the model."""

    def prepare(self) -> Snapshots | None:
        """Refuse now what would not fit at the first save; returns what writes snapshots, on the ranks that do.

        Raises SaveError, with both numbers.
        """
        section = self.job.train.optimizer
        size_bytes = expected_bytes(self.state, partial(registry.build, "optimizer", section.name, section.options))
        if self.state.elsewhere is not None:  # equally many ranks have each part
            sizes = self.meeting.gather("add up the stages", lambda: size_bytes)
            size_bytes = sum(sizes) * self.stages // len(sizes)
        check = partial(self.checkpoints.check_room, size_bytes)
        copies = self.checkpoints.copies
        if copies is None:
            warnings = [self.meeting.decide("find room for a checkpoint", check)]
        else:
            warnings = self.meeting.gather("find room for a checkpoint", lambda: check() if copies.is_holder else "")
            copies.follow(self.report)
        for warning in filter(None, warnings):
            self.report.say(f"WARNING: {warning}")
        return None if self.job.recipe.checkpoint.memory_every is None else self._snapshots(size_bytes)

    def _snapshots(self, size_bytes: int) -> Snapshots | None:
        folder = Path(os.environ.get(VARIABLE, "/"))
        possible = VARIABLE in os.environ and self.state.is_whole
        if not all(self.meeting.gather("find the memory for snapshots", lambda: possible)):
            self.report.say(
                "WARNING: checkpoint.memory_every has no effect: it takes our agent, and ranks that hold all of a state"
            )
            return None
        world = self.meeting.world
        writes = world.local_rank == 0

        def check() -> None:
            try:
                check_memory(folder, size_bytes)
            except OSError as error:
                raise SaveError("snapshots cannot be kept in memory", str(error)) from error

        self.meeting.gather("find room for snapshots", lambda: check() if writes else None)
        if not writes:
            return None
        return Snapshots(
            folder, self.checkpoints, rank=world.rank, attempt=self.job.attempt, on_complete=self._say_complete
        )

    def _say_complete(self, step: int, time_s: float, blocked_s: float, size_bytes: int) -> None:
        self.report.event(
            "memory_saved", step=step, time_s=round(time_s, 4), blocked_s=round(blocked_s, 4), size_bytes=size_bytes
        )
