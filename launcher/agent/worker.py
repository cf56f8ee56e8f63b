"""One worker of a node: what it was started for, what is known of it, and what its end is to the head."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.agent.causes import STOPPED_EXIT_CODE, Failure, classify, describe
from launcher.agent.cgroup import MemoryGroup
from launcher.agent.last_words import LastWords
from launcher.agent.logs import LineFile, Streams
from launcher.runs.clock import StepPage
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the head says of an attempt when it starts."""

    attempt: int
    restarts: int
    master_addr: str
    master_port: int
    newest: str | None = None
    """The checkpoint that the plan's `resume_newest` has found."""
    members: tuple[int, ...] | None = None
    """The nodes that take part, by their index in the plan, in the order of their ranks. None = all of them."""
    memory_counts: bool = False
    """Whether what is in the memory of a node may be newer than what is on disk."""

    @classmethod
    def from_order(cls, order: Mapping[str, Any]) -> Attempt:
        """What the head's `start` says."""
        known = {name: order[name] for name in cls.__dataclass_fields__ if name in order}
        members = known.get("members")
        return cls(**{**known, "members": None if members is None else tuple(members)})


@dataclass(kw_only=True)
class Worker:
    """One worker of this node in one attempt."""

    attempt: int
    node: int
    local_rank: int
    rank: int
    is_alone: bool
    """The attempt has no other rank."""
    log: Path
    error_file: Path
    file: LineFile
    streams: Streams
    page: StepPage
    """Where it marks its steps."""
    started_s: float = field(default_factory=time.monotonic)
    output_s: float | None = None
    """When it has printed something last."""
    is_wrapped: bool = False
    """Its pid is that of a program that was put before it (nsys)."""
    pid: int = 0
    exit_code: int | None = None
    words: LastWords = field(default_factory=LastWords)
    memory: MemoryGroup | None = None
    oom_kills: int = 0
    """In its memory cgroup, when it started."""

    @property
    def failed(self) -> bool:
        """Whether it has ended as it should not have."""
        return self.exit_code not in (None, 0, STOPPED_EXIT_CODE)


def failure_of(worker: Worker, error: dict[str, Any] | None, run: RunDir, *, by_us: bool) -> Failure:
    """The end of a worker that has failed. error: its error file, if it wrote one.

    by_us: the workers of this node are being killed.
    """
    assert worker.exit_code is not None
    exit_code, memory, timeout = worker.exit_code, worker.memory, worker.words.timeout
    oom_killed = memory is not None and not by_us and memory.oom_kills() > worker.oom_kills
    cause = classify(exit_code, error, oom_killed=oom_killed, timed_out=bool(timeout), alone=worker.is_alone)
    message = timeout if error is None and cause is Cause.HANG else describe(exit_code, error)
    if memory is not None and cause is Cause.OOM_KILLED:
        message += f": the kernel was out of memory ({memory.describe()})"
    return Failure(
        attempt=worker.attempt,
        node=worker.node,
        rank=worker.rank,
        pid=worker.pid,
        exit_code=exit_code,
        cause=cause,
        message=message,
        place=str(error.get("place", "")) if error else worker.words.place,
        log=str(worker.log.relative_to(run.path)),
        log_line=worker.words.line,
        exception=str(error.get("exception", "")) if error else "",
        step=_step(error),
        last_words=worker.words.text if error is None and message != timeout else "",
    )


def suspicion(worker: Worker, message: str, step: int | None, run: RunDir) -> Failure:
    """A worker that lives has noticed that another does not: how it would have ended."""
    error = {"message": message}
    cause = classify(1, error)
    return Failure(
        attempt=worker.attempt,
        node=worker.node,
        rank=worker.rank,
        pid=worker.pid,
        exit_code=1,
        cause=cause if cause in (Cause.PEER_LOST, Cause.HANG) else Cause.PEER_LOST,
        message=describe(1, error),
        place="",
        log=str(worker.log.relative_to(run.path)),
        step=step,
    )


def read_error(path: Path) -> dict[str, Any] | None:
    """The error file of a worker, if it wrote one."""
    try:
        error = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # killed before, or while, it wrote one
        return None
    return error if isinstance(error, dict) else None


def _step(error: dict[str, Any] | None) -> int | None:
    step = (error or {}).get("step")
    return step if isinstance(step, int) else None
