"""What a script may ask its launcher, and tell it. One file, standard library only, Python 3.8 or newer.

    import launch_client

    start = load(launch_client.resume_from) if launch_client.resume_from else 0
    for step in range(start, steps):
        loss = train(step)
        launch_client.progress(step)
        launch_client.log({"train/loss": loss})
        if launch_client.should_stop():
            save(step)
            sys.exit(75)

In a script that `launch` runs it is importable without being installed. Outside a run nothing happens: `run_dir` and
`resume_from` are None, `should_stop()` is False, and the other functions write nothing.
"""

from __future__ import annotations

import atexit
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from typing import Any, Mapping, Optional

__all__ = ["log", "progress", "resume_from", "run_dir", "should_stop"]

run_dir: str | None = os.environ.get("LAUNCH_RUN_DIR")
"""Where this run keeps its files: the same folder in every attempt. None outside a run."""

resume_from: str | None = os.environ.get("LAUNCH_RESUME_FROM")
"""The checkpoint to go on from: the newest that `resume: {newest: ...}` in the recipe has found, the same on all ranks.
None where there is none."""

_STOP_FILE = os.environ.get("LAUNCH_STOP_FILE")
_ATTEMPT = int(os.environ.get("LAUNCH_ATTEMPT", "1"))
_WRITES = run_dir is not None and os.environ.get("RANK", "0") == "0"
_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 1.0


_PAGE = struct.Struct("<IIQQqQQ6Q")
"""The page that this rank shares with its agent, as launcher/runs/clock.py describes it: format, phase, step, marks,
marked_ns, own_ns, own_steps, and the longest time without a mark in each of the phases."""
_FORMAT, _NOTHING, _IN_STEPS = 1, 0, 2


class _State:
    def __init__(self) -> None:
        self.stopping = False
        self.handles_term = False
        self.look_at_s = 0.0
        self.step: int | None = None
        self.told_step: int | None = None
        self.tell_at_s = 0.0
        self.logged = False
        self.complained = False


class _Clock:
    """Marks the steps of this rank where its agent sees them, which costs no system call."""

    def __init__(self) -> None:
        self._page = _open_page(os.environ.get("LAUNCH_CLOCK_FD", ""))
        self._marks = 0
        self._phase, self._marked_ns = _NOTHING, time.monotonic_ns()
        self._longest_ns = [0] * 6

    def mark(self, step: int) -> None:
        if self._page is None:
            return
        now_ns = time.monotonic_ns()
        self._longest_ns[self._phase] = max(self._longest_ns[self._phase], now_ns - self._marked_ns)
        self._marks += 1
        self._phase, self._marked_ns = _IN_STEPS, now_ns
        _PAGE.pack_into(self._page, 0, _FORMAT, _IN_STEPS, max(0, step), self._marks, now_ns, 0, 0, *self._longest_ns)


def _open_page(fd: str) -> Optional[mmap.mmap]:
    """None outside a run, and in a child of a rank: that has the variable, and another file under the number."""
    try:
        if not fd.isdigit() or not os.readlink("/proc/self/fd/" + fd).startswith("/memfd:step-clock"):
            return None
        return mmap.mmap(int(fd), mmap.PAGESIZE)
    except (OSError, ValueError):
        return None


_state = _State()
_clock = _Clock()


def should_stop() -> bool:
    """Whether the run was asked to stop (Ctrl-C, `launch cancel`, a limit): save, then `sys.exit(75)`.

    From the first call on TERM no longer ends the process, unless the script has a handler of its own. Cheap enough for
    every step. Ranks may learn it a moment apart: let rank 0 decide, or agree by an all-reduce, before saving together.
    """
    if _STOP_FILE is None:
        return False
    _handle_term()
    now_s = time.monotonic()
    if not _state.stopping and now_s >= _state.look_at_s:
        _state.look_at_s = now_s + _LOOK_EVERY_S
        _state.stopping = os.path.exists(_STOP_FILE)
    return _state.stopping


def progress(step: int) -> None:
    """Say which step was done, on every rank: it gets on. What rank 0 says, `launch status` and the report show."""
    _state.step = int(step)
    _clock.mark(_state.step)
    if _WRITES and time.monotonic() >= _state.tell_at_s:
        _tell_step()


def log(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Add numbers to the run's metrics.jsonl, under the step that is given or that `progress` was told last.

    A step that is logged again, by a restart that began before it, replaces what was there. NaN and infinity are left
    out.
    """
    numbers = {str(name): float(value) for name, value in metrics.items()}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no others
    if step is not None:
        _state.step = int(step)
    if _state.step is None:
        raise ValueError("which step is it? launch_client.log(metrics, step=...), or progress(step) before it")
    if not _WRITES:
        return
    lines: list[dict[str, Any]] = []
    if not _state.logged:
        _state.logged = True
        lines.append({"attempt": _ATTEMPT, "resumed_from": _state.step - 1})
    lines.append({"attempt": _ATTEMPT, "step": _state.step, **numbers, "time": round(time.time(), 4)})
    _append("metrics.jsonl", lines)


def _handle_term() -> None:
    if _state.handles_term:
        return
    _state.handles_term = True
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_term)


def _on_term(signum: int, frame: object) -> None:
    _state.stopping = True


def _tell_step() -> None:
    if _state.step == _state.told_step:
        return
    if _state.told_step is None:
        atexit.register(_tell_step)
    _state.told_step, _state.tell_at_s = _state.step, time.monotonic() + _TELL_EVERY_S
    event = {"time": round(time.time(), 4), "writer": "script", "event": "progress"}
    _append(os.path.join("events", "script.jsonl"), [{**event, "attempt": _ATTEMPT, "step": _state.step}])


def _append(name: str, lines: list[dict[str, Any]]) -> None:
    """One write of whole lines, so that a reader never sees half of one. A full disk is no reason to end a training."""
    try:
        descriptor = os.open(
            os.path.join(str(run_dir), name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            os.write(descriptor, "".join(json.dumps(line) + "\n" for line in lines).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        if not _state.complained:
            _state.complained = True
            sys.stderr.write("launch_client: %s was not written: %s\n" % (name, error.strerror))
