"""Who watches a run: one process at a time, known by the run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import IO, Any

from launcher.agent import proc
from launcher.runs.rundir import RunDir


def take_lock(run: RunDir) -> IO[str] | None:
    """Be the watcher of a run, and say so in its directory. None: it has one."""
    file = run.watcher.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.seek(0)
    file.truncate()
    pid = os.getpid()
    json.dump({"host": socket.gethostname(), "pid": pid, "start": proc.start_time(pid) or 0}, file)
    file.flush()
    return file


def watcher_of(run: RunDir) -> int | None:
    """The pid of the watcher of a run, if it lives on this machine."""
    try:
        said: dict[str, Any] = json.loads(run.watcher.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    pid = int(said.get("pid", 0))
    here = said.get("host") == socket.gethostname()
    return pid if here and pid and proc.start_time(pid) == said.get("start") else None
