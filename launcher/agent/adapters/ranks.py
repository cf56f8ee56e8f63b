"""What the ranks of a script need of each other: one decision, one moment to stop, one voice."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

STOPPED_EXIT_CODE = 75
"""What the launcher reads as: it was asked to stop, and has saved."""

_TIMEOUT = timedelta(minutes=30)
_SLOW_MS = 500
_decisions = itertools.count(1)
_kept: list[Any] = []


def is_rank_zero() -> bool:
    """Whether this process speaks and decides for all."""
    return os.environ["RANK"] == "0"


def say(text: str) -> None:
    """One line in the log, of rank 0 alone."""
    if is_rank_zero():
        print(f"launch: {text}", flush=True)


def tell_step(step: int) -> None:
    """The step clock of the run."""
    import launch_client  # the wrapper has put it on sys.path

    launch_client.progress(step)


def from_rank_zero(choose: Callable[[], Any]) -> Any:
    """What rank 0 chooses, on every rank; a JSON value. Every rank must call it, in the same order.

    Through the store of MASTER_ADDR and MASTER_PORT, since a framework makes its process group only later: that one
    then shares the same store.
    """
    if os.environ["WORLD_SIZE"] == "1":
        return choose()
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    _kept.append(store)  # rank 0 serves it: it must be there until the others have read, and the group has joined
    key = f"launch/decision-{next(_decisions)}"
    if is_rank_zero():
        store.set(key, json.dumps(choose()))
    return json.loads(store.get(key))


class Stop:
    """SIGTERM, as a wish that every rank fulfils after the same step."""

    def __init__(self) -> None:
        self._requested = False
        self._group: Any = None
        self._message: Any = None
        self._work: Any = None
        self._asked_s = time.monotonic()
        self._slow = False

    def request(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal. Only a flag: a collective in here would meet the one that it interrupts."""
        self._requested = True

    def listen(self) -> Any:
        """Take over SIGTERM; return the handler that was there, for `restore`."""
        if threading.current_thread() is not threading.main_thread():
            say("the training is not in the main thread: a stop cannot save")
            return None
        return signal.signal(signal.SIGTERM, self.request)

    @staticmethod
    def restore(handler: Any) -> None:
        """Give SIGTERM back."""
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)

    def agreed(self) -> bool:
        """Whether some rank was told to stop; the same answer everywhere. Every rank calls it once per step.

        The question travels on a gloo group of its own while the next step is computed: nobody waits for it, and no GPU
        is synchronised. Where steps are long it is answered at once, since a stop has little time.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return self._requested
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        if self._received():
            return True
        now_s = time.monotonic()
        step_ms, self._asked_s = int(1000 * (now_s - self._asked_s)), now_s
        self._message = torch.tensor([int(self._requested), step_ms])
        self._work = dist.all_reduce(self._message, group=self._group, async_op=True)
        return self._slow and self._received()

    def _received(self) -> bool:
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        requests, step_ms = self._message.tolist()
        self._slow = step_ms > _SLOW_MS  # a sum over all ranks, so that all of them see the same
        return bool(requests)

    def wait_for_all(self) -> None:
        """A barrier, once `agreed` has been called."""
        if self._group is not None:
            import torch.distributed as dist

            self._received()
            dist.barrier(group=self._group)
