"""The entry point of `launch`."""

# Only built-in modules here: from this line on a Ctrl-C, even one during an import, ends without a traceback.
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `launch` with these arguments (by default the process's own) and return its exit code."""
    try:
        from launcher.cli.app import run_app

        return run_app(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130


def entry() -> NoReturn:
    """The `launch` program: `main` in a process of its own, without what only costs such a short life time.

    The collector finds nothing while modules are imported, and there is nothing to tear down at the end.
    """
    gc.disable()
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader has gone
        code = code or 128 + 13
    os._exit(code)


if __name__ == "__main__":
    entry()
