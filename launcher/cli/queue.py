"""The queue of a detached sweep: `python -P -m launcher.cli.queue SWEEP_DIR 0-19`. What it says is in its log."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher import redact
from launcher.cli.signals import SignalInbox
from launcher.cli.sweep import ended_text
from launcher.executors.queue import Queue
from launcher.runs.fold import RunRecord
from launcher.runs.sweep import SweepDir, parse_tasks, read_sweep


def main() -> None:
    """Run the points until none is left, or until it is told to stop."""
    sweep = SweepDir(Path(sys.argv[1]))
    record = read_sweep(sweep)
    assert record is not None, "whoever starts a queue has read the sweep"
    redact.remember(record.secrets)
    with SignalInbox() as inbox:
        Queue(sweep, record, list(parse_tasks(sys.argv[2])), ended=_say).run(inbox.wait)


def _say(index: int, point: RunRecord) -> None:
    print(redact.own().text(ended_text(index, point)), flush=True)


if __name__ == "__main__":
    main()
