"""What a worker said last, and where in its log that is. Fed with the lines as they go into the log."""

from __future__ import annotations

import re
from collections import deque

from launcher.agent.plain import plain
from launcher.runs.stacks import own_frame, parse_dump

_LINES = 10
_LINE_BYTES = 400
_BYTES = 2_000
_TRACEBACK = re.compile(rb"(\[rank\d+\]: )?(  \+ Exception Group )?Traceback \(most recent call last\):|ended by \w+: ")
"""With what torch puts before each line of it once there is a process group; or an error that needs none."""
_IGNORED = b"Exception ignored in"
_CRASH = b"Fatal Python error: "
_OF_A_CRASH = re.compile(
    rb"(Current thread|Thread) 0x|  (File|Binary file|<|\.\.\.)|Extension modules:|$|Current thread's C"
)
"""What faulthandler writes after that: many lines, of which one says where it was."""
_WATCHDOG = b"Watchdog caught collective operation timeout"
"""What NCCL's watchdog says before it aborts the process; many lines of C++ come after it, and no exception."""


class LastWords:
    """The end of a worker's standard error, and the line of the log at which its traceback begins."""

    def __init__(self) -> None:
        self._count = 0
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=_LINES)
        self._traceback: int | None = None
        self._before = b""
        self._crash: list[bytes] | None = None
        self.timeout = ""
        """The watchdog's line, if it spoke."""

    def add(self, lines: bytes, *, is_stderr: bool) -> None:
        """Take whole lines that go into the log now."""
        if not is_stderr:
            self._count += lines.count(b"\n")
            return
        for line in lines.removesuffix(b"\n").split(b"\n"):
            self._count += 1
            # An object that fails while the interpreter leaves has a traceback too, and is not why it leaves.
            if _TRACEBACK.match(line) and not self._before.startswith(_IGNORED):
                self._traceback = self._count
            self._before = line.rstrip(b"\r").rpartition(b"\r")[2][:_LINE_BYTES]  # of a progress bar its last state
            if line.startswith(_CRASH):
                self._crash = []
            elif self._crash is not None and _OF_A_CRASH.match(line):
                self._crash.append(self._before)
                continue
            if not self.timeout and (begin := line.find(_WATCHDOG)) >= 0:
                self.timeout = line[begin : begin + _LINE_BYTES].decode(errors="replace")
                self._traceback = self._count
            if line.strip():
                self._lines.append((self._count, self._before))

    @property
    def line(self) -> int | None:
        """The line of the log where the newest traceback begins, else where the last words do, else its last line."""
        if self._traceback is not None:
            return self._traceback
        return self._lines[0][0] if self._lines else self._count or None

    @property
    def place(self) -> str:
        """`file:line in function` of a crash: the innermost call of the thread that crashed that is the user's own."""
        text = b"\n".join(self._crash or ()).decode(errors="replace")
        current = text[max(0, text.find("Current thread")) :].split("\n\n")[0]
        threads = parse_dump(current)
        frame = own_frame(threads[0]) if threads else None
        return "" if frame is None else str(frame)

    @property
    def text(self) -> str:
        """The last lines on standard error, the newest that fit."""
        kept: list[bytes] = []
        for _, line in reversed(self._lines):
            if sum(map(len, kept)) + len(line) > _BYTES:
                break
            kept.insert(0, line)
        return plain(b"\n".join(kept).decode(errors="replace"))
