"""The tracking process: reads metrics.jsonl as it grows and sends it on. Started by `jobs.tracking`."""

from __future__ import annotations

import sys


def main() -> int:
    """Read orders from standard input until it ends."""
    for _ in sys.stdin:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
