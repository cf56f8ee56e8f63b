"""Work on a state that goes on behind the training's back: the state is copied, and the copy handed to a thread.

The state does not change from one update of the weights to the next, so the copy is made by the thread too, while the
next forward and backward run: only the update has to wait for it. What a forward changes (the statistics of a batch
norm) is copied at once.

On CUDA the copy goes to pinned memory over a stream of its own, behind what the training has queued by then. That was
never run on a GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jobs.private_torch import copy_each
from jobs.storage import Part

NICENESS = 10
"""Of the thread, once the copy is made: the training goes first where there are too few processors for both."""
Write = Callable[[Sequence[Part]], object]


@dataclass(kw_only=True)
class Work:
    """What one thread does. Times are of `time.monotonic`."""

    step: int
    begin_s: float = field(default_factory=time.monotonic)
    blocked_s: float = 0.0
    """How long the training has waited because of it."""
    copied: threading.Event = field(default_factory=threading.Event)
    """The weights may change."""
    done: threading.Event = field(default_factory=threading.Event)
    took_s: float = 0.0
    """Until it was done."""
    error: BaseException | None = None
    """How it ended, once it is done."""

    @property
    def age_s(self) -> float:
        """Since its begin."""
        return time.monotonic() - self.begin_s


class Background:
    """Does one piece of work at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        """Memory for the copies, by name: allocated once."""
        self._stream: torch.cuda.Stream | None = None

    def start(self, work: Work, parts: Sequence[Part], write: Write, *, at_once: Collection[str], copies: bool) -> None:
        """Hand parts of the state to `write`, in a thread. The work before it must be done.

        at_once: keys of what may change before the next update. copies: False = the state itself is handed over, and
        the caller waits until it is done.
        """
        if not copies:
            work.copied.set()
            thread = threading.Thread(target=self._run, args=(work, lambda: parts, write), daemon=True)
        else:
            first = [part for part in parts if part.key in at_once]
            rest = [part for part in parts if part.key not in at_once]
            copied = self._copy(first, None)
            ready = torch.cuda.current_stream().record_event() if _is_on_cuda(rest) else None
            thread = threading.Thread(
                target=self._run, args=(work, lambda: [*copied, *self._copy(rest, ready)], write), daemon=True
            )
        thread.start()

    def _run(self, work: Work, take: Callable[[], Sequence[Part]], write: Write) -> None:
        try:
            parts = take()
            work.copied.set()
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            write(parts)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the training's own thread raises it
            work.error = error
        finally:
            work.copied.set()
            work.took_s = work.age_s
            work.done.set()

    def _copy(self, parts: Sequence[Part], ready: torch.cuda.Event | None) -> list[Part]:
        """Copies in memory that is kept from one time to the next."""
        targets = [self._memory(part) for part in parts]
        if ready is not None:
            self._copy_from_cuda(targets, [part.tensor for part in parts], ready)
        else:
            copy_each(targets, [part.tensor for part in parts])
        return [replace(part, tensor=target) for part, target in zip(parts, targets, strict=True)]

    def _copy_from_cuda(self, targets: list[Tensor], sources: list[Tensor], ready: torch.cuda.Event) -> None:
        device = next(source.device for source in sources if source.is_cuda)
        torch.cuda.set_device(device)  # a new thread begins with device 0
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._stream.synchronize()

    def _memory(self, part: Part) -> Tensor:
        source, kept = part.tensor, self._kept.get(part.name)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._kept[part.name] = kept
        return kept


def _is_on_cuda(parts: Sequence[Part]) -> bool:
    return any(part.tensor.is_cuda for part in parts)
