"""The entry point of `launch`."""

# Only sys here: from this line on a Ctrl-C, even one during an import, ends without a traceback.
from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `launch` with these arguments (by default the process's own) and return its exit code."""
    try:
        from launcher.cli.app import run_app

        return run_app(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
