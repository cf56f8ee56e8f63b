"""What the agent asks of Linux: parent-death signals, adopted orphans, sweeping what a worker left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask for `signum` when the parent ends, however it ends. `parent`: its pid at the fork."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them is out of reach."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Pids of the living and not yet reaped children of this process."""
    listing = Path("/proc/self/task")
    found: set[int] = set()
    for task in listing.iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:
            return _children_by_scan()  # a kernel without CONFIG_PROC_CHILDREN
    return found


def sweep(keep: Collection[int] = ()) -> int:
    """Kill the children of this process, but for `keep`, with their groups; return how many were alive.

    Orphans of a killed child become children only when it is reaped, so call this until it returns 0.
    """
    alive = 0
    for pid in children() - set(keep):
        if not is_zombie(pid):
            alive += 1
            kill_group(pid)
            send_signal(pid, signal.SIGKILL)
    return alive


def next_ended_child() -> int | None:
    """A child that has ended and was not reaped yet, or None."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def kill_group(pid: int) -> None:
    """SIGKILL the process group that a process leads. One that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> bool:
    """Signal one process. False if it is already gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def is_zombie(pid: int) -> bool:
    """Whether a process has ended (and waits to be reaped, or is gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def exit_code(status: int) -> int:
    """The shell's exit code of a wait status: 128 + n for a process that signal n ended."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _children_by_scan() -> set[int]:
    me, found = str(os.getpid()), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat.rpartition(")")[2].split()[1] == me:
                found.add(int(entry.name))
    return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
