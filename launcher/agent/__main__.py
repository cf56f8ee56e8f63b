"""What runs on the nodes of a run, by its mode: `python -P start.py --run-dir DIR` and `--local`,
`--node K --head HOST:PORT`, `--batch` or `--task`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from launcher.agent.supervisor import supervise
from launcher.runs.rundir import RunDir
from launcher.runs.sweep import make_point


def endpoint(text: str) -> tuple[str, int]:
    """`10.0.0.1:29400`, `[fd00::1]:29400`. Raises ValueError."""
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return address.strip("[]"), int(port)


def main() -> NoReturn:
    """Run the plan of a run directory."""
    parser = argparse.ArgumentParser(prog="launcher.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--local", action="store_true", help="all nodes of the plan are this machine")
    mode.add_argument("--node", type=int, metavar="K", help="this machine is one of several: node K of the plan")
    mode.add_argument("--batch", action="store_true", help="the batch side of a SLURM job, once, on its first node")
    mode.add_argument("--task", action="store_true", help="one node of a SLURM job, started there by srun")
    parser.add_argument("--head", type=endpoint, metavar="HOST:PORT", help="with --node: where the head agent listens")
    parser.add_argument("--wait", action="store_true", help="begin when standard input says so")
    parser.add_argument("--setup-done", action="store_true", help="this environment is the one that `setup` left")
    parser.add_argument("--watch-fd", type=int, help="its end means that the launcher is gone")
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    if options.batch:
        make_point(run)  # of a sweep, a run directory is made when it is needed
        from launcher.agent.batch import run_batch

        run_batch(run, wait=options.wait)
    if (options.node is None) != (options.head is None):
        parser.error("--node K and --head HOST:PORT go together")
    if options.node is not None:
        from launcher.agent.task import run_node

        run_node(run, options.node, options.head, setup_done=options.setup_done)
    if options.task:
        from launcher.agent.task import run_task

        run_task(run, setup_done=options.setup_done)
    supervise(run, wait=options.wait, setup_done=options.setup_done, watch_fd=options.watch_fd)


if __name__ == "__main__":
    main()
