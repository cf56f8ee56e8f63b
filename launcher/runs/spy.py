"""Asks the living workers of a run, on this machine, where they are: by py-spy, or by a signal that they answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.stacks import find_pyspy, request
from launcher.runs.follow import Tail, size_bytes
from launcher.runs.stacks import DUMP_BEGINS, RankStack, Thread, parse_dump, parse_pyspy

_AT_ONCE = 8
_SPY_LIMIT_S = 15.0
_ANSWER_LIMIT_S = 5.0
_QUIET_S = 0.3
"""A dump is over once the log has not grown for this long."""
_POLL_S = 0.02
_PTRACE_HINT = (
    "py-spy reads another process only where ptrace is allowed: as root, in a container with --cap-add SYS_PTRACE, or "
    "with /proc/sys/kernel/yama/ptrace_scope at 0"
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A worker to look at."""

    rank: int
    node: int
    pid: int
    host: str
    log: Path
    job: str = ""
    """On SLURM: the job, in whose allocation its node can be reached."""


def take_stacks(targets: Sequence[Target], *, run_id: str, hostname: str) -> list[RankStack]:
    """The stacks of all targets, taken as nearly at once as it goes."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda target: _take(target, run_id, hostname), targets))


def _take(target: Target, run_id: str, hostname: str) -> RankStack:
    if target.host != hostname:
        there = f"launch stacks {run_id} --rank {target.rank}"
        hint = f"on {target.host}: {there}"
        if target.job:
            hint = f"srun --overlap --jobid={target.job} --nodes=1 --ntasks=1 -w {target.host} {there}"
        return _unknown(target, f"it runs on {target.host}, this is {hostname}", hint)
    if trouble := not_of_run(target.pid, run_id):
        return _unknown(target, trouble)
    threads, why_not = _by_pyspy(target.pid)
    if threads:
        return _known(target, threads, "py-spy", "")
    hint = _PTRACE_HINT if "permission denied" in why_not.lower() else ""
    if threads := _by_signal(target):
        return _known(target, threads, "its log", hint)
    return _unknown(target, f"py-spy: {why_not}; and it does not answer the signal yet", hint)


def not_of_run(pid: int, run_id: str, proc: Path = Path("/proc")) -> str:
    """Why a process is not a worker of this run that can be looked at; empty where it is one."""
    try:
        environment = (proc / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return f"pid {pid} has ended"
    except PermissionError:
        return f"pid {pid} belongs to another user"
    if f"LAUNCH_RUN_ID={run_id}".encode() not in environment.split(b"\0"):
        return f"pid {pid} is another process by now"
    return ""


def _by_pyspy(pid: int) -> tuple[tuple[Thread, ...], str]:
    """The threads, or why py-spy cannot tell."""
    program = find_pyspy()
    if program is None:
        return (), "not installed"
    command = [program, "dump", "--pid", str(pid), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), str(error)
    if done.returncode:
        return (), next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
    try:
        return parse_pyspy(done.stdout, pid), "it saw no thread"
    except ValueError as error:
        return (), str(error)


def _by_signal(target: Target) -> tuple[Thread, ...]:
    """Have the worker write its stacks into its log, and read them there. Empty where it does not."""
    tail = Tail(target.log, begin_bytes=size_bytes(target.log))
    if not request([target.pid]):
        return ()
    text, begin_s = "", time.monotonic()
    grown_s = begin_s
    while (now_s := time.monotonic()) - begin_s < _ANSWER_LIMIT_S:
        if new := tail.read().decode(errors="replace"):
            text, grown_s = text + new, now_s
        elif DUMP_BEGINS in text and now_s - grown_s > _QUIET_S:
            break
        time.sleep(_POLL_S)
    tail.close()
    return parse_dump(text)


def _known(target: Target, threads: tuple[Thread, ...], source: str, hint: str) -> RankStack:
    return RankStack(
        rank=target.rank, node=target.node, pid=target.pid, threads=threads, source=source, trouble="", hint=hint
    )


def _unknown(target: Target, trouble: str, hint: str = "") -> RankStack:
    return RankStack(rank=target.rank, node=target.node, pid=target.pid, trouble=trouble, hint=hint)
