"""A machine that commands are run on: this one, or one that is reached over the network (`ssh_machine.py`)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.planning import calls

NOT_FOUND = 127
"""Exit code of a program that is not there, as shells have it."""
NOT_EXECUTABLE = 126


class Unreachable(Exception):  # noqa: N818 - what the machine is
    """A machine does not answer: no way there, no login, or not within the time.

    The sentence names the machine; `hint` says what to do.
    """

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.hint = sentence, hint


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    """Its exit code; 127 and 126 as of a shell, 128 + n where signal n has ended it."""
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """What it printed, without the blanks around it."""
        return self.out.decode(errors="replace").strip()

    @property
    def words(self) -> str:
        """What it said in words, as one line: of its errors, else of its output."""
        said = self.err.decode(errors="replace").strip() or self.text
        return "; ".join(line.strip() for line in said.splitlines() if line.strip())


class Machine(Protocol):
    """Where commands are run."""

    @property
    def name(self) -> str:
        """An ssh destination; empty: this machine."""

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Done:  # noqa: A002 - as subprocess
        """Run a command to its end, with `input` as its standard input. Raises Unreachable.

        A Ctrl-C at the terminal does not reach it. One that takes longer is ended here; what it has begun elsewhere
        may go on.
        """


class ThisMachine:
    """The machine that this process is on."""

    @property
    def name(self) -> str:
        """Empty."""
        return ""

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Done:  # noqa: A002 - as subprocess
        """Run a command here. Raises Unreachable for one that does not end in time."""
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            return Done(NOT_FOUND, b"", f"{argv[0]}: not found".encode())
        except PermissionError:
            return Done(NOT_EXECUTABLE, b"", f"{argv[0]}: not executable".encode())
        try:
            out, err = calls.answer(process, limit_s=timeout_s, told=input)
        except subprocess.TimeoutExpired:
            sentence = f"`{' '.join(argv[:3])}` has not answered within {timeout_s:.0f} s on this machine"
            raise Unreachable(sentence) from None
        except KeyboardInterrupt:
            calls.end(process)
            raise
        return Done(process.returncode if process.returncode >= 0 else 128 - process.returncode, out, err)
