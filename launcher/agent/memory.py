"""The folder in memory (/dev/shm) for states that outlive their workers: LAUNCH_MEMORY_DIR is a folder in it, per node.

The supervisor of a machine makes and removes it; if it was killed, the last zygote does, or the next run of the same
user, as with `scratch.py`, by whose rules it is named. Standard library only.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

from launcher.agent import scratch

VARIABLE = "LAUNCH_MEMORY_DIR"
"""In the supervisor, its agents and zygotes: the folder of the machine. In a worker: that of its node."""
COUNTS_VARIABLE = "LAUNCH_MEMORY_COUNTS"
"""In a worker: the newest state may be in memory alone, on any of the nodes, and is gone with the end of the run."""
_WHERE = "/dev/shm"


def make(run_id: str, *, base: str = _WHERE) -> None:
    """Make the folder, and name it to the children of this process. Where that cannot be, say so: nothing is kept."""
    folder = Path(base, scratch.owned_name(run_id))
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        told = f"launch: no states are kept in memory: {folder} cannot be made: {error.strerror}"
        print(told, file=sys.stderr)
        return
    os.environ[VARIABLE] = str(folder)


def forget() -> None:
    """Nobody shall find the folder of another run, from within which this one was started."""
    os.environ.pop(VARIABLE, None)
    os.environ.pop(COUNTS_VARIABLE, None)


def of_node(node: int) -> str | None:
    """The folder of a node, made where it is missing; None where this machine has none, or it cannot be made.

    Not only at the beginning: systemd removes what a user has in /dev/shm when his last session ends (RemoveIPC).
    """
    base = os.environ.get(VARIABLE)
    if base is None:
        return None
    folder = Path(base, f"node-{node}")
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.lstat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is another user's")
    except OSError as error:
        told = f"launch: node {node} keeps no states in memory: {folder} cannot be used: {error.strerror}"
        print(told, file=sys.stderr, flush=True)
        return None
    return str(folder)


def clear() -> None:
    """Remove the folder, where it is one of this process, or of an owner that is dead."""
    scratch.remove_owned(os.environ.get(VARIABLE, "/"))


def sweep(*, base: str = _WHERE) -> None:
    """Remove what killed runs of this user have left here."""
    if os.path.isdir(base):  # noqa: PTH112 - a path that may be none
        for found in scratch.abandoned(base):
            shutil.rmtree(found, ignore_errors=True)
