"""The memory cgroup of a worker: its limit, and how many processes the kernel has killed there for want of memory.

A death by the OOM killer looks like any other SIGKILL; the counter of the worker's own group tells them apart.
Version 2 counts in `memory.events`, version 1 in `memory.oom_control`. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes the largest multiple of a page for "no limit"."""


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """One group, and where the hierarchy that it is in begins."""

    folder: Path
    top: Path
    version: int

    def oom_kills(self) -> int:
        """Processes of this group that the kernel has killed for want of memory, ever."""
        text = _read(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"))
        counts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return _number(counts.get("oom_kill", "")) or 0

    def limit_bytes(self) -> int | None:
        """The smallest limit of the group and of those around it; None where there is none but the machine's."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        groups = [self.folder, *(above for above in self.folder.parents if above.is_relative_to(self.top))]
        limits = [_number(_read(group / name)) for group in groups]
        return min((limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES), default=None)

    def used_bytes(self) -> int | None:
        """The most that the group has used at once."""
        return _number(_read(self.folder / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")))

    def describe(self) -> str:
        """`limit of its cgroup 2.0 GiB, at most 2.0 GiB in use`."""
        limit, used = self.limit_bytes(), self.used_bytes()
        of = "no limit but the machine's memory" if limit is None else f"limit of its cgroup {_size(limit)}"
        return of if used is None else f"{of}, at most {_size(used)} in use"


def memory_group(pid: int, proc: Path = _PROC) -> MemoryGroup | None:
    """The memory cgroup of a process; None where it has ended, or where there are no cgroups to be seen."""
    paths = dict(_hierarchies(_read(proc / str(pid) / "cgroup")))
    for version, kind, option in ((1, "cgroup", "memory"), (2, "cgroup2", "")):
        path = paths.get(option)
        mount = _mount(_read(proc / "self" / "mountinfo"), kind, option)
        if path is None or mount is None:
            continue
        root, top = mount
        # In a container the mount may show a part of the tree only, which begins at `root`.
        inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
        group = MemoryGroup(folder=top / inside.strip("/"), top=top, version=version)
        if (group.folder / ("memory.events" if version == 2 else "memory.oom_control")).exists():
            return group
    return None


def _hierarchies(text: str) -> list[tuple[str, str]]:
    """`4:memory:/a` -> (memory, /a); `0::/b` of version 2 -> ("", /b)."""
    lines = [line.split(":", 2) for line in text.splitlines()]
    return [(name, path) for _, names, path in (line for line in lines if len(line) == 3) for name in names.split(",")]


def _mount(mountinfo: str, kind: str, option: str) -> tuple[str, Path] | None:
    """Root and place of the first mount of a kind (`man 5 proc_pid_mountinfo`)."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (filesystem, _, rest) = before.split(), after.partition(" ")
        options = rest.rpartition(" ")[2].split(",")
        if filesystem == kind and (not option or option in options) and len(fields) > 4:
            return fields[3], Path(fields[4])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or gone with its process
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"
