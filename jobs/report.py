"""What a training says: lines on the console, metrics, events. Rank 0 speaks for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.metrics import MetricsLog, MetricsMemory
from launcher.runs.events import EventWriter
from launcher.runs.metrics import Record
from launcher.runs.rundir import RunDir


class Reporter:
    """The voice of rank 0; other ranks are silent, and remember what rank 0 has not written down yet."""

    def __init__(
        self, run_dir: RunDir, *, rank: int, attempt: int, resumed_from: int, kept: Sequence[Record] = ()
    ) -> None:
        """`kept`: lines of the metrics that came with the state from which the training goes on."""
        self._attempt = attempt
        self._events: EventWriter | None = None
        self._metrics: MetricsLog | None = None
        self._remembered = MetricsMemory(attempt=attempt)
        self.safe: Callable[[], int] | None = None
        """How many lines would outlive the disk of rank 0, where others have copies of the file; None: nobody has."""
        if rank == 0:
            self._events = EventWriter(run_dir.path, "worker")
            self._metrics = MetricsLog(run_dir.metrics, attempt=attempt, resumed_from=resumed_from, kept=kept)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._events is not None:
            print(text, flush=True)

    def event(self, name: str, **fields: Any) -> None:
        """A line for programs."""
        if self._events is not None:
            self._events.write(name, attempt=self._attempt, **fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """What is known about a step."""
        (self._metrics or self._remembered).write(step, **values)

    def written(self) -> int:
        """How many lines of the metrics are in the file, as far as this rank has written them."""
        return 0 if self._metrics is None else self._metrics.written

    def forgettable(self) -> int:
        """How many of them the other ranks need not remember any more."""
        return self.written() if self.safe is None else self.safe()

    def forget(self, written: int) -> None:
        """Rank 0 has written so many."""
        self._remembered.forget(written)

    def unwritten(self) -> list[Record]:
        """The lines of the metrics that may not be in the file."""
        return (self._metrics or self._remembered).unwritten()

    def flush(self) -> None:
        """Bring the metrics to the file."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Flush and close everything."""
        if self._metrics is not None and self._events is not None:
            self._metrics.close()
            self._events.close()


class Rate:
    """Samples per second since the last line, training alone."""

    def __init__(self) -> None:
        self._samples, self._since = 0, time.perf_counter()

    def add(self, samples: int) -> None:
        """Count samples."""
        self._samples += samples

    def pause(self, pause_s: float) -> None:
        """Leave out a time in which nothing was trained."""
        self._since += pause_s

    def now(self) -> float:
        """The rate since the last lap, or the start."""
        return self._samples / max(1e-9, time.perf_counter() - self._since)

    def lap(self) -> None:
        """Begin again."""
        self._samples, self._since = 0, time.perf_counter()


def progress_line(
    *,
    step: int,
    total_steps: int,
    steps_per_epoch: int,
    loss: float,
    lr: float,
    samples_per_s: float,
    left_s: float,
    pace: str = "",
) -> str:
    """`step 100/632  epoch 1.3/8  loss 0.312  lr 1.9e-03  4,050 samples/s  eta 0:12`; `pace` before the eta."""
    epochs = f"{step / steps_per_epoch:.1f}/{total_steps / steps_per_epoch:.1f}".removesuffix(".0")
    return (
        f"step {step}/{total_steps}  epoch {epochs}  loss {loss:.3f}  lr {lr:.1e}  "
        f"{samples_per_s:,.0f} samples/s  {pace}{'  ' if pace else ''}eta {clock(left_s)}"
    )


def clock(time_s: float) -> str:
    """`0:12`, `1:02:03`."""
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
