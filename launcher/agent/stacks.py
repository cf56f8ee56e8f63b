"""Where a worker is: on a signal it writes the Python stacks of all its threads into its own log.

The worker's part is `wrapper.show_stacks_on_signal`. It answers while it holds the interpreter, and while it waits in a
collective. One that is stopped does not; py-spy, where it is installed and allowed, reads its memory instead.
Standard library only.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.agent.clocks import idle_state
from launcher.agent.wrapper import STACKS_SIGNAL
from launcher.runs.stacks import DUMP_BEGINS, Frame, Thread, parse_dump, parse_pyspy, to_own

_PROC = Path("/proc")
_LIMIT_S = 2.0
"""How long a worker may take to answer."""
_QUIET_S = 0.3
"""A dump is over once the log has not grown for this long."""
_MAX_FRAMES = 40
_MAX_DUMP_BYTES = 1 << 20


def request(pids: Iterable[int]) -> set[int]:
    """Ask processes for their stacks; return those that will answer."""
    answering = set()
    for pid in pids:
        if catches(pid, STACKS_SIGNAL):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, STACKS_SIGNAL)
                answering.add(pid)
    return answering


def catches(pid: int, signum: int, proc: Path = _PROC) -> bool:
    """Whether a process has a handler for a signal, whose default action may be its end. False for one that is gone."""
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def find_pyspy() -> str | None:
    """The program, beside this interpreter or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


class StackTaking:
    """Asks the workers of this node once. Feed it with what they write; look until it is `done`.

    Close it when it is of no use any more.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        """pids: of the workers that run, by rank."""
        self._pids = dict(pids)
        self._begun_s = time.monotonic()
        self._dumps = dict.fromkeys(pids, b"")
        self._grown_s = dict.fromkeys(pids, self._begun_s)
        answering = request(pids.values())
        self._asked = {rank for rank, pid in pids.items() if pid in answering}
        self._spies: dict[int, _Spy] = {}
        for rank, pid in pids.items():
            if (rank not in self._asked or idle_state(pid)) and (program := find_pyspy()) is not None:
                self._spies[rank] = _Spy(program, pid)

    def feed(self, rank: int, lines: bytes) -> bool:
        """What a worker has written on standard error. Returns whether it belongs to its answer, as far as is known.

        One that was stopped when it was asked answers when it goes on, however late that is.
        """
        if not self.awaits(rank):
            return False
        self._dumps[rank] = (self._dumps[rank] + lines)[:_MAX_DUMP_BYTES]
        self._grown_s[rank] = time.monotonic()
        return True

    def awaits(self, rank: int) -> bool:
        """Whether what this worker writes on standard error belongs to its answer, as far as is known."""
        return rank in self._asked and not self._has_answered(rank)

    @property
    def done(self) -> bool:
        """Whether all have answered, or had the time to."""
        if time.monotonic() - self._begun_s > _LIMIT_S:
            return True
        awaited = self._asked - self._spies.keys()
        return all(map(self._has_answered, awaited)) and all(spy.is_over for spy in self._spies.values())

    def result(self) -> dict[str, dict[str, Any]]:
        """What is told of each worker, by its rank as text: the main thread, down to a call of the user's own."""
        return {str(rank): self._told(rank, pid) for rank, pid in self._pids.items()}

    def close(self) -> None:
        """End what was started to read the memory of workers."""
        for spy in self._spies.values():
            spy.close()
        self._spies.clear()

    def _has_answered(self, rank: int) -> bool:
        quiet = time.monotonic() - self._grown_s[rank] > _QUIET_S
        return quiet and DUMP_BEGINS.encode() in self._dumps[rank]

    def _told(self, rank: int, pid: int) -> dict[str, Any]:
        threads, trouble = parse_dump(self._dumps[rank].decode(errors="replace")), ""
        if not threads and rank in self._spies:
            threads, trouble = self._spies[rank].result()
        elif not threads:
            trouble = "it does not answer the signal" if rank in self._asked else "it does not know the signal"
        frames = next((thread.frames for thread in threads if thread.main), ())
        frames = to_own(frames)
        if len(frames) > _MAX_FRAMES:
            frames = (*frames[: _MAX_FRAMES - 1], frames[-1])
        return {
            "frames": [[frame.function, frame.file, frame.line] for frame in frames],
            "line": _line_of(frames[0]) if frames else "",
            "state": idle_state(pid),
            "trouble": trouble,
        }


class _Spy:
    """py-spy, at work. Without stopping the process: one that is stopped already is never stopped again."""

    def __init__(self, program: str, pid: int) -> None:
        self._pid = pid
        self._out = os.memfd_create("stacks", os.MFD_CLOEXEC)
        command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> tuple[tuple[Thread, ...], str]:
        """The threads, or why they are not known."""
        self._end()
        text = os.pread(self._out, _MAX_DUMP_BYTES, 0).decode(errors="replace")
        if self._process.returncode:
            return (), f"py-spy: {next(iter(text.strip().splitlines()), f'exit code {self._process.returncode}')}"
        try:
            return parse_pyspy(text, self._pid), ""
        except ValueError as error:
            return (), f"py-spy: {error}"

    def close(self) -> None:
        """Once."""
        self._end()
        os.close(self._out)

    def _end(self) -> None:
        if not self.is_over:
            self._process.kill()
            self._process.wait()


def _line_of(frame: Frame) -> str:
    """The text of a line of the user's own."""
    return "" if frame.is_library else linecache.getline(frame.file, frame.line).strip()
