"""What a person waits for before anything runs: `launch --help` and dry runs, against `torchrun --help`.

`python tests/bench/command.py [--rounds 7] [--json]`. The dry runs of 1,024 nodes are in seconds, without a peer;
that of SLURM may take 0.8 s.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

from common import BIN, arguments, interleave, report

LIMITS = {"help": 0.08, "dry_run": 0.25}
RECIPE = Path(__file__).parents[2] / "recipes" / "mnist_ddp.yaml"
LARGE = ("--nodes", "1024", "--nproc-per-node", "8", "data.global_batch_size=8192", "resources.device=cpu")


def seconds(*argv: str) -> float:
    """Wall time of a whole process. Raises CalledProcessError if it fails."""
    begun = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=7)
    ours, theirs = str(BIN / "launch"), str(BIN / "torchrun")
    samples = interleave(
        options.rounds,
        {
            "torchrun": lambda: {"help": [seconds(theirs, "--help")]},
            "launch": lambda: {
                "help": [seconds(ours, "--help")],
                "dry_run": [seconds(ours, str(RECIPE), "--nodes", "2", "--on", "local", "--dry-run")],
                "dry_run_1024x8": [seconds(ours, str(RECIPE), *LARGE, "--on", "local", "--dry-run")],
                "dry_run_slurm_1024x8": [seconds(ours, str(RECIPE), *LARGE, "--on", "slurm", "--dry-run")],
            },
        },
    )
    peer_s = statistics.median(samples["torchrun"]["help"])
    ratios = {key: statistics.median(samples["launch"][key]) / peer_s for key in LIMITS}
    report("Commands that start nothing", samples, ratios, as_json=options.json, limits=LIMITS)


if __name__ == "__main__":
    main()
