"""The entry point of `launch`."""

# Only built-in modules here: from this line on a Ctrl-C, even one during an import, ends without a traceback.
from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the half of `signal` that is built in
import gc
import io
import os
import sys

TYPE_CHECKING = False  # as typing has it, without importing that
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn

_EARLY = {_signal.SIGTERM: "TERM", _signal.SIGHUP: "HUP"}


class Stopped(BaseException):
    """A TERM or HUP that came when there was no run yet that it could be passed on to, or none any more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `launch` with these arguments (by default the process's own) and return its exit code."""
    try:
        from launcher.cli.app import run_app

        return run_app(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130
    except Stopped as error:
        signum = error.args[0]
        print(f"launch: ended by {_EARLY[signum]}", file=sys.stderr)
        return 128 + int(signum)


def _hear_early_stops() -> None:
    """No silent end: what is under way is undone, and a line says so. An ignored HUP (`nohup`) stays ignored."""
    for signum in _EARLY:
        if _signal.getsignal(signum) == _signal.SIG_DFL:
            _signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum)


def _complete_streams() -> None:
    """Make up for standard streams that the parent has closed, and for characters that one of them cannot write."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open until the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def entry() -> NoReturn:
    """The `launch` program: `main` in a process of its own, without what only costs such a short life time.

    The collector finds nothing while modules are imported, and there is nothing to tear down at the end.
    """
    gc.disable()
    _hear_early_stops()
    _complete_streams()
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader has gone
        code = code or 128 + 13
    except OSError as error:
        os.write(2, f"launch: standard output cannot be written: {error.strerror}\n".encode())
        code = code or 3
    os._exit(code)


if __name__ == "__main__":
    entry()
