"""What the agent asks of Linux: parent-death signals, adopted orphans, sweeping what a worker left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_AGAIN_S = 0.01
_SHARED_MEMORY = Path("/dev/shm")
_JANITORS = ("from multiprocessing.resource_tracker import main", "torch_shm_manager")
"""How an argument of processes begins that remove the shared memory of others, once those have ended."""
_JANITOR_S = 2.0
"""How long one may stand still. On a machine with too much to do it may need long for what is little work."""
_JANITOR_MOST_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Janitor:
    """When one was first looked at, and last seen at work or waiting for a CPU; what CPU time it had used by then."""

    first_s: float
    busy_s: float
    ticks: int


_janitors: dict[tuple[int, int], _Janitor] = {}


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

    Orphans of a killed child become children only when it is reaped, so call this until it returns 0. Janitors are not
    killed but waited for, for a while: they remove from /dev/shm what the killed ones left there, and end.
    """
    return len(_sweep(keep))


def sweep_all() -> int:
    """Kill and reap the children of this process until none is left; return how many were alive."""
    found: set[int] = set()
    while (alive := _sweep()) or children():
        found |= alive
        while (pid := next_ended_child()) is not None:
            reap(pid)
        time.sleep(_LOOK_AGAIN_S)  # a killed process hands its children over without any signal
    return len(found)


def _sweep(keep: Collection[int] = ()) -> set[int]:
    alive = {pid for pid in children() - set(keep) if not is_zombie(pid)}
    for pid in alive:
        kill_group(pid)
        if not _is_spared(pid):
            send_signal(pid, signal.SIGKILL)
    return alive


def next_ended_child() -> int | None:
    """A child that has ended and was not reaped yet, or None."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def reap(pid: int) -> int:
    """Take the wait status of a child that has ended, and what of its shared memory is left in /dev/shm.

    Until it is reaped nobody else has its number, which torch writes into the names of its segments.
    """
    for name in os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else ():  # noqa: PTH208 - names only
        if name.startswith(f"torch_{pid}_"):
            with contextlib.suppress(OSError):
                (_SHARED_MEMORY / name).unlink()
    return os.waitpid(pid, 0)[1]


def kill_group(pid: int, *, of_another: bool = False) -> None:
    """SIGKILL the process group that a process leads, but for its janitors. One that is already gone is fine.

    of_another: its members are not below this process, and looked for everywhere.
    """
    members = _group_by_scan if of_another else _members
    with contextlib.suppress(ProcessLookupError):
        if not any(map(_is_spared, members(pid))):
            os.killpg(pid, signal.SIGKILL)
            return
        os.killpg(pid, signal.SIGSTOP)  # so that nobody forks while they are looked through
        for member in members(pid):
            if not _is_spared(member):
                send_signal(member, signal.SIGKILL)
        os.killpg(pid, signal.SIGCONT)  # also whom the listing has missed: it is a child of this process soon


def send_signal(pid: int, signum: int) -> bool:
    """Signal one process. False if it is already gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def start_time(pid: int) -> int | None:
    """Clock ticks from the boot to its start: with it, a pid names one process for ever. None: there is no such one."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def is_zombie(pid: int) -> bool:
    """Whether a process has ended (and waits to be reaped, or is gone)."""
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by a signal (SIGSTOP), or under a debugger."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "Tt"


def exit_code(status: int) -> int:
    """The shell's exit code of a wait status: 128 + n for a process that signal n ended."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _members(group: int) -> set[int]:
    """Living processes of a group: those below its leader, and the children of this process that a dead one left."""
    found: set[int] = set()
    new = {group}
    while new:
        found |= new
        below = {child for pid in new for child in _children_of(pid)}
        # After that: whoever of them has died meanwhile has handed his children over.
        new = (below | {pid for pid in children() if _group_of(pid) == group}) - found
    return {pid for pid in found if _group_of(pid) == group}


def _group_by_scan(group: int) -> set[int]:
    return {pid for pid in _all_pids() if _group_of(pid) == group}


def _group_of(pid: int) -> int | None:
    """The process group of a living process."""
    fields = _stat(pid)
    return int(fields[2]) if fields and fields[0] not in "ZX" else None


def _is_spared(pid: int) -> bool:
    """Whether it is a janitor, and still has time to do its work."""
    try:
        arguments = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    if not any(argument.rpartition("/")[2].startswith(_JANITORS) for argument in arguments):
        return False
    fields = _stat(pid)
    if not fields:
        return False
    now_s, ticks = time.monotonic(), int(fields[11]) + int(fields[12])
    janitor = _janitors.setdefault((pid, int(fields[19])), _Janitor(now_s, now_s, ticks))
    if fields[0] in "RD" or ticks != janitor.ticks:
        janitor.busy_s, janitor.ticks = now_s, ticks
    return now_s < min(janitor.busy_s + _JANITOR_S, janitor.first_s + _JANITOR_MOST_S)


def _children_of(pid: int) -> set[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except (FileNotFoundError, ProcessLookupError):  # gone, or a kernel without CONFIG_PROC_CHILDREN
        return set()


def _children_by_scan() -> set[int]:
    me = os.getpid()
    return {pid for pid in _all_pids() if (fields := _stat(pid)) and int(fields[1]) == me}


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (field 3 of proc(5)); empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
