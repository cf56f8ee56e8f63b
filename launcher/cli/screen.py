"""The terminal of a run that is followed: its output, and on a terminal one live line below it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.wording import duration

_REFRESH_S = 0.25
_CLEAR = b"\r\x1b[2K"


class Screen:
    """Writes whole lines to standard output. The status line is drawn on a terminal only, with nothing but ANSI."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()
        self.live = os.isatty(self._descriptor) and os.environ.get("TERM", "dumb") != "dumb"
        self._drawn = b""
        self._drawn_s = 0.0
        self._broken = False

    @property
    def wants_status(self) -> bool:
        """Whether it is time for a new status line."""
        return self.live and time.monotonic() - self._drawn_s >= _REFRESH_S

    def lines(self, text: bytes) -> None:
        """Write lines, above the status line."""
        if text:
            self._write((_CLEAR if self._drawn else b"") + text + self._drawn)

    def status(self, text: str) -> None:
        """Replace the status line, cut to the width of the terminal."""
        self._drawn_s = time.monotonic()
        columns = os.get_terminal_size(self._descriptor).columns or 80  # 0: a terminal that does not know
        line = text[: columns - 1].encode()
        if line != self._drawn:
            self._write(_CLEAR + line)
            self._drawn = line

    def clear(self) -> None:
        """Take the status line away."""
        if self._drawn:
            self._write(_CLEAR)
            self._drawn = b""

    def _write(self, text: bytes) -> None:
        # A closed pipe or terminal (`| head`, a lost ssh connection) must not end the run: its files have everything.
        while text and not self._broken:
            try:
                text = text[os.write(self._descriptor, text) :]
            except OSError:
                self._broken = True


def status_line(run_id: str, state: str, newest: Sequence[Mapping[str, Any]], total_steps: int | None) -> str:
    """The live line: `mnist-ddp-1130-0214-k7qz  RUNNING  120/632 steps  4,050 samples/s  eta 12 s`.

    `newest` are the last lines of metrics.jsonl; the speed is that between the first and the last of them.
    """
    parts = [run_id, state]
    timed = [line for line in newest if "samples_seen" in line]
    if timed:
        step = timed[-1]["step"]
        parts.append(f"{step}/{total_steps} steps" if total_steps else f"step {step}")
        time_s = timed[-1]["time"] - timed[0]["time"]
        if time_s > 0:
            parts.append(f"{(timed[-1]['samples_seen'] - timed[0]['samples_seen']) / time_s:,.0f} samples/s")
        if time_s > 0 and total_steps and step > timed[0]["step"]:
            parts.append(f"eta {duration((total_steps - step) * time_s / (step - timed[0]['step']))}")
    return "  ".join(parts)
