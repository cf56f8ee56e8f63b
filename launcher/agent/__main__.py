"""The agents of a local run, under one supervisor: `python -P start.py --run-dir DIR --local`."""

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
    parser.add_argument("--setup-done", action="store_true", help="this environment is the one that `setup` left")
    parser.add_argument("--watch-fd", type=int, help="its end means that the launcher is gone")
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    supervise(run, wait=options.wait, setup_done=options.setup_done, watch_fd=options.watch_fd)


if __name__ == "__main__":
    main()
