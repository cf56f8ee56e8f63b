"""The state of a rank at its newest step boundary, and how it is written where the next attempt finds it.

Parameters and optimizer are the training's own memory: they change only where `Keeper.changing` is held. Buffers change
in every forward, so they are copied at each boundary. Random draws and the order of the data are functions of the
progress (`jobs.sampler`). What is left are the lines of the metrics that rank 0 may not have brought to the file: they
go into state.json, `lines`, beside `kept: {rank, node}`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from jobs.finite import KeptBuffers
from jobs.folders import Progress, named, step_of
from jobs.parts import Parts
from jobs.whole import NoRoomError, layout_alone, write_whole


class KeptState:
    """What a `Keeper` holds: the state of the parts of a trainer, which says how far it is."""

    def __init__(self, parts: Parts, progress: Callable[[], Progress], *, attempt: int) -> None:
        self._state, self._checkpoints, self._report = parts.state, parts.checkpoints, parts.report
        self._rank, self._node, self._attempt = parts.world.rank, parts.world.node, attempt
        self._progress, self._noted = progress, progress()
        self._buffers = KeptBuffers(parts.state.net)

    def note(self) -> int:
        """The training is at a step boundary. Returns the step."""
        self._buffers.keep()
        self._noted = self._progress()
        return self._noted.step

    def write(self, folder: Path) -> str:
        """Write a whole checkpoint into the folder, alone; where it does not fit, into the run's own folder.

        Returns its name. The older ones of a folder in memory are removed. Raises OSError or CheckpointError.
        """
        if folder == self._checkpoints.folder:
            return self._write_to_disk()
        try:
            return self._write_to_memory(folder)
        except NoRoomError as error:
            step, disk = self._noted.step, self._checkpoints.folder
            print(f"step-{step} is not kept in memory but in {disk}: {error}", flush=True)
            return self._write_to_disk()

    def _write_to_memory(self, folder: Path) -> str:
        name = f"step-{self._noted.step}"
        aside = folder / f"{name}.tmp-kept-{self._attempt}-{self._rank}"
        try:
            self._write(aside, name)
            # One of the same step may be there: a snapshot, or the one that this attempt went on from. It does not
            # have the newest lines of the metrics.
            if (folder / name).exists():
                (folder / name).rename(aside / "before")
            (aside / name).rename(folder / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for other in named(folder):
            if step_of(other) < self._noted.step:
                shutil.rmtree(folder / other, ignore_errors=True)
        return name

    def _write_to_disk(self) -> str:
        name = f"step-{self._noted.step}"
        self._write(self._checkpoints.folder, name)
        self._checkpoints.point_to(name)
        return name

    def _write(self, folder: Path, name: str) -> None:
        buffers = {f"model/{key}": kept for key, kept in self._buffers.named().items()}
        live = self._state.tensors()
        tensors = {key: buffers.get(key, tensor) for key, tensor in live.items()}
        layout = layout_alone(tensors, self._rank)
        kept = {"rank": self._rank, "node": self._node}
        text = self._checkpoints.describe(self._state, self._noted, kept=kept, lines=self._report.unwritten())
        write_whole(
            folder,
            name,
            layout,
            layout.parts(tensors),
            state=text,
            metrics=self._noted.metrics,
            attempt=self._attempt,
        )
