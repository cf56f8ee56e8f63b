"""Memory cgroups that tests make for themselves."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.agent.cgroup import memory_group


def make_memory_group(name: str, *, limit_bytes: int) -> Path:
    """A memory cgroup below that of this process, or at the top. Raises OSError where that is not allowed."""
    group = memory_group(os.getpid())
    if group is None:
        raise FileNotFoundError("no memory cgroup")
    limit = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    for above in (group.folder, group.top):
        folder = above / name
        folder.mkdir()
        if (folder / limit).exists():
            (folder / limit).write_text(str(limit_bytes))
            return folder
        folder.rmdir()
    raise FileNotFoundError(f"{group.folder} hands no memory controller on")
