"""`python -P -m launcher.agent --run-dir DIR --local`: the agents of a local run, under one supervisor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from launcher.agent.supervisor import supervise
from launcher.runs.rundir import RunDir


def main() -> NoReturn:
    """Run the plan of a run directory."""
    parser = argparse.ArgumentParser(prog="launcher.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--local", action="store_true", required=True, help="all nodes of the plan are this machine")
    parser.add_argument("--wait", action="store_true", help="begin when standard input says so")
    options = parser.parse_args()
    supervise(RunDir(options.run_dir), wait=options.wait)


if __name__ == "__main__":
    main()
