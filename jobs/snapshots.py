"""Snapshots in memory: the state every so many steps in LAUNCH_MEMORY_DIR, for a restart that finds no survivor.

One rank of each node writes it, alone, in the format of checkpoints; `jobs.memory` reads it at the start of an attempt.
There are two at most: the newest, and the next one while it is written. One that cannot be written is said and left
out: the training does not need it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jobs.background import Background, Work
from jobs.checkpoint import Checkpoints
from jobs.folders import Progress, named
from jobs.state import TrainingState
from jobs.storage import Layout, Part
from jobs.whole import layout_alone, write_whole
from launcher.runs.metrics import Record

Complete = Callable[[int, float, float, int], None]
"""Step, seconds in all, seconds that the training was blocked, size in bytes."""


class Snapshots:
    """Of one node, on the rank that writes them."""

    def __init__(
        self, folder: Path, checkpoints: Checkpoints, *, rank: int, attempt: int, on_complete: Complete
    ) -> None:
        self.count = 0
        """Those that were written."""
        self.blocked_s = 0.0
        """How long the training has waited for them."""
        self._folder, self._checkpoints, self._rank, self._attempt = folder, checkpoints, rank, attempt
        self._on_complete = on_complete
        self._background = Background()
        self._work: Work | None = None
        self._layout: Layout | None = None

    @property
    def holds_update(self) -> bool:
        """Whether the weights must not change yet."""
        return self._work is not None and not self._work.copied.is_set()

    def wait_for_copy(self) -> None:
        """Before the weights change."""
        if self._work is not None:
            self._wait(self._work.copied.wait)

    def begin(self, state: TrainingState, progress: Progress, lines: Sequence[Record] = ()) -> None:
        """Begin to write the state as it is now; the one before is awaited.

        lines: of the metrics, which may not be in the file yet.
        """
        self.finish()
        begin_s = time.monotonic()
        tensors = state.tensors()
        if self._layout is None or not self._layout.fits(tensors):
            self._layout = layout_alone(tensors, self._rank)
        layout, text = self._layout, self._checkpoints.describe(state, progress, lines=list(lines))
        self._work = work = Work(step=progress.step)
        forward_changes = {f"model/{name}" for name, _ in state.net.named_buffers()}
        write = partial(self._write, work, layout, text, progress)
        self._background.start(work, layout.parts(tensors), write, at_once=forward_changes, copies=True)
        work.blocked_s += time.monotonic() - begin_s
        self.blocked_s += time.monotonic() - begin_s

    def finish(self) -> None:
        """Wait until none is being written. Raises what went wrong, unless it was the writing."""
        if self._work is not None:
            self._wait(self._work.done.wait)
            error, self._work = self._work.error, None
            if error is not None:
                raise error

    def _write(self, work: Work, layout: Layout, text: str, progress: Progress, parts: Sequence[Part]) -> None:
        name = f"step-{work.step}"
        try:
            for old in named(self._folder)[:-1]:
                shutil.rmtree(self._folder / old, ignore_errors=True)
            metrics, attempt = progress.metrics, self._attempt
            size_bytes = write_whole(self._folder, name, layout, parts, state=text, metrics=metrics, attempt=attempt)
        except OSError as error:
            print(f"{name} is not in memory: {error}", flush=True)
            return
        self.count += 1
        self._on_complete(work.step, work.age_s, work.blocked_s, size_bytes)

    def _wait(self, wait: Callable[[], object]) -> None:
        begin_s = time.monotonic()
        wait()
        waited_s = time.monotonic() - begin_s
        self.blocked_s += waited_s
        if self._work is not None:
            self._work.blocked_s += waited_s
