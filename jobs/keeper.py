"""Zero lost steps: a helper thread by which a rank, whatever its training is doing, keeps its newest state.

In data parallelism every rank holds the whole state. When one dies, the agent asks the others what they hold, and the
one with the newest step writes it to memory, from where the next attempt goes on. What the two say to each other is in
`launcher.agent.control`.

What makes a state whole: `changing` is held around everything that changes it, so it is between two steps whenever the
thread gets in. From a report on nobody gets in any more: what was reported is what is kept. In between the state stays
what it is, also while a forward is running, but for buffers (batch norm), which the boundary copies.

On CUDA the same holds once the device has done what it was told: `changing` waits for that, before it begins (the
gradients have come) and before it says that the step is complete. Collectives of NCCL are aborted, where connections of
gloo are shut. Nobody else may abort them: an update with half of its gradients would look complete. So the plan turns
torch's own handling of such errors off; the agent sees whoever dies or stands still. All this is written from torch's
documents and sources: it was never run on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from jobs.private_torch import abort_groups
from jobs.sockets import GroupSockets
from launcher.agent.causes import classify
from launcher.agent.control import FD_VARIABLE, MAX_DATAGRAM_BYTES
from launcher.agent.rescue import ANSWER_S
from launcher.runs.states import Cause
from launcher.wording import first_line

CHANGE_S = ANSWER_S - 0.5
"""How long a report waits for a step that is being completed: it says so before the agent stops waiting for it."""
_OF_GLOO = re.compile(r"\[\S*\.cc:\d+\] |\. This is typically .*")
"""Before and after what gloo has to say: a place in its own sources, and advice that is about one process alone."""
_LONGEST_MESSAGE = 2_000


class AttemptOverError(RuntimeError):
    """The agent has asked what there is to keep: no step is completed after that."""


class Held(Protocol):
    """What can be kept of a rank (`jobs.kept`)."""

    def note(self) -> int:
        """The state is whole: note what goes with it. Returns its step."""

    def write(self, folder: Path) -> str:
        """Write the state as it was noted; returns the name of the checkpoint. Raises OSError or RuntimeError."""


class Keeper:
    """Of one rank. Its thread waits for the agent and costs nothing until that speaks."""

    def __init__(self, sock: socket.socket, sockets: GroupSockets, device: torch.device) -> None:
        self._sock, self._sockets, self._device = sock, sockets, device
        self._lock = threading.Lock()
        self._over = False
        self._held: Held | None = None
        self._step: int | None = None
        """Of the state that is whole; None: there is none, or it is being changed."""

    @classmethod
    def start(cls, env: Mapping[str, str], sockets: GroupSockets, device: torch.device) -> Keeper | None:
        """Begin to listen to the agent; None without one. In the process that trains, which is never forked again."""
        fd = env.get(FD_VARIABLE, "")
        if not fd.isdigit():
            return None
        os.set_inheritable(int(fd), False)
        keeper = cls(socket.socket(fileno=int(fd)), sockets, device)
        threading.Thread(target=keeper._serve, name="keeper", daemon=True).start()
        return keeper

    @property
    def is_over(self) -> bool:
        """Whether the agent has ended this attempt: what goes wrong now is a consequence."""
        return self._over

    def hold(self, held: Held) -> None:
        """From now on this can be kept, as it is."""
        with self._lock:
            self._held = held
            self._note(held)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around everything that changes the state. Raises AttemptOverError where it must stay what it is.

        What raises inside leaves nothing that could be kept.
        """
        with self._lock:
            self._wait_for_device()
            if self._over:  # asked after the wait: what ends it may be our own abort, and the gradients are wrong then
                raise AttemptOverError("the agent has ended this attempt")
            self._step = None
            yield
            self._wait_for_device()
            if self._held is not None:
                self._note(self._held)

    def saved(self, step: int) -> None:
        """Rank 0 says that a checkpoint is complete on disk."""
        self._say({"saved": step})

    def wait_for_orders(self, error: BaseException, *, step: int | None, limit_s: float) -> None:
        """Say that a peer is lost, and wait, alive, until the agent ends this process. Returns if it does not.

        A stop (TERM) changes nothing: the agent, from which it comes, ends this process after the grace time.
        """
        message = f"{type(error).__name__}: {error}"
        told = _OF_GLOO.sub("", first_line(message))
        why = "this attempt is over" if self.is_over else f"lost a peer ({told})"  # nobody may be lost: a node has come
        print(f"{why}; waiting for the agent", flush=True)
        self._say({"peer_lost": message[:_LONGEST_MESSAGE], "step": step})
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(left_s)

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while True:
            try:
                data = self._sock.recv(MAX_DATAGRAM_BYTES)
            except ConnectionError:
                return
            if not data:
                return  # the agent is gone, and takes this process with it
            order = json.loads(data)
            if order["order"] == "report":
                self._say({"holds": self._report()})
            elif order["order"] == "keep":
                self._say(self._keep(Path(order["folder"])))

    def _report(self) -> int | None:
        self._over = True  # seen by whoever comes to `changing` from now on
        self._wake()
        if not self._lock.acquire(timeout=CHANGE_S):
            return None
        self._lock.release()  # whoever was in it is through: the next one sees that it is over
        return self._step or None  # at step 0 there is nothing to lose

    def _keep(self, folder: Path) -> dict[str, Any]:
        if not self._over or self._held is None or not self._step:
            return {"not_kept": "there is no whole state"}
        try:
            return {"kept": self._held.write(folder)}
        except (OSError, RuntimeError) as error:  # of torch, and CheckpointError
            return {"not_kept": f"{type(error).__name__}: {error}"}

    def _wake(self) -> None:
        """Let every collective fail that is waiting, or begins now."""
        self._sockets.shut()
        if self._device.type == "cuda" and dist.is_initialized():
            abort_groups()

    def _note(self, held: Held) -> None:
        self._step = held.note()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(ConnectionError):  # the agent is gone, and takes this process with it
            self._sock.send(json.dumps(message).encode())


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether an error says that another rank is gone, or did not come: its cause is there, and not here."""
    while error is not None:
        if isinstance(error, AttemptOverError):
            return True
        bases = [base.__name__ for base in type(error).__mro__]
        record = {"message": {"message": f"{type(error).__name__}: {error}"}, "exception_bases": bases}
        if classify(1, record) in (Cause.PEER_LOST, Cause.HANG):
            return True
        error = error.__cause__ or error.__context__
    return False
