"""`python -P -m launcher.agent --run-dir DIR --local`: the agents of a local run, under one supervisor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from launcher.agent.supervisor import supervise
from launcher.planning.plan import Plan
from launcher.runs.rundir import RunDir


def main() -> NoReturn:
    """Read the plan and run it."""
    parser = argparse.ArgumentParser(prog="launcher.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--local", action="store_true", required=True, help="all nodes of the plan are this machine")
    parser.add_argument("--watch-fd", type=int, help="the run ends when this pipe does")
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    supervise(Plan.from_json(run.plan.read_text()), run, watch_fd=options.watch_fd)


if __name__ == "__main__":
    main()
