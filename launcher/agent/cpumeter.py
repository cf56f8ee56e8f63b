"""What a node's CPUs and memory are used for, from /proc. Standard library only."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

Values = dict[str, float]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_IDLE, _IOWAIT, _COUNTED = 3, 4, 8
"""In a line of /proc/stat: what a CPU does not work in; the rest (guest) is counted in the first fields already."""
_Process = tuple[int, int]
"""A pid and when it was started: together they name one process for ever."""


class CpuMeter:
    """Measures the CPUs that a node gives, its memory, and the workers: all that was started below `agent`, but `skip`.

    cpu/util is in percent of all these CPUs, workers/cpu_util in percent of one. Memory that processes share counts in
    workers/rss_bytes for each of them. What this kernel does not tell is left out.
    """

    def __init__(self, agent: int, cpus: Collection[int], *, skip: int = 0, proc: Path = _PROC) -> None:
        self._agent, self._skip, self._proc = agent, skip, proc
        self._cpus = frozenset(f"cpu{number}" for number in cpus)
        self._busy = self._busy_total()
        self._ticks, _ = self._workers()
        self._measured_s = time.monotonic()

    def measure(self) -> Values:
        """What there is now, and what was done since the measurement before."""
        now_s = time.monotonic()
        past_s, self._measured_s = max(now_s - self._measured_s, 1e-3), now_s
        return {**self._cpu(), **self._load(), **self._memory(), **self._of_workers(past_s)}

    def _cpu(self) -> Values:
        before, self._busy = self._busy, self._busy_total()
        busy, total = (now - then for now, then in zip(self._busy, before, strict=True))
        return {"cpu/util": round(100 * busy / total, 1)} if total > 0 else {}

    def _busy_total(self) -> tuple[int, int]:
        """Ticks in which these CPUs have worked, and all of them."""
        busy = total = 0
        for line in _read(self._proc / "stat").splitlines():
            name, *fields = line.split()
            if name in self._cpus:
                ticks = [int(field) for field in fields[:_COUNTED]]
                total += sum(ticks)
                busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
        return busy, total

    def _load(self) -> Values:
        words = _read(self._proc / "loadavg").split()
        return {"cpu/load": float(words[0])} if words else {}

    def _memory(self) -> Values:
        lines = (line.split() for line in _read(self._proc / "meminfo").splitlines())
        kib = {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
        if "MemTotal:" not in kib or "MemAvailable:" not in kib:
            return {}
        used_kib = kib["MemTotal:"] - kib["MemAvailable:"]
        return {"memory/used_bytes": used_kib * 1024, "memory/total_bytes": kib["MemTotal:"] * 1024}

    def _of_workers(self, past_s: float) -> Values:
        before = self._ticks
        self._ticks, rss_bytes = self._workers()
        if not self._ticks:
            return {}
        used = sum(ticks - before.get(process, 0) for process, ticks in self._ticks.items())
        return {"workers/cpu_util": round(100 * used / _TICKS_PER_S / past_s, 1), "workers/rss_bytes": rss_bytes}

    def _workers(self) -> tuple[dict[_Process, int], int]:
        """Ticks that each process of the workers has used, and the memory of all."""
        found: dict[_Process, int] = {}
        rss_bytes = 0
        for pid in self._pids():
            fields = _read(self._proc / str(pid) / "stat").rpartition(")")[2].split()
            if fields and fields[0] not in "ZX":
                found[pid, int(fields[19])] = int(fields[11]) + int(fields[12])
                rss_bytes += int(fields[21]) * _PAGE_BYTES
        return found, rss_bytes

    def _pids(self) -> set[int]:
        """What is below the zygotes, which are the children of the agent and do no work of their own."""
        new = {child for zygote in self._children(self._agent) - {self._skip} for child in self._children(zygote)}
        found: set[int] = set()
        while new:
            found |= new
            new = {child for pid in new for child in self._children(pid)} - found
        return found

    def _children(self, pid: int) -> set[int]:
        return {int(child) for text in self._listed(pid) for child in text.split()}

    def _listed(self, pid: int) -> Iterator[str]:
        try:
            threads = os.listdir(self._proc / str(pid) / "task")  # noqa: PTH208 - names only
        except OSError:  # it has ended
            return
        for thread in threads:
            yield _read(self._proc / str(pid) / "task" / thread / "children")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there in this kernel, or gone with its process
        return ""
