"""How long it takes to queue a sweep of 1,000 points: `launch RECIPE --sweep ...`, against a loop of 1,000 `sbatch`.

`slurm/cluster run python tests/bench/sweep.py [--rounds 2] [--json]`, or on a login node. Whole
processes, cold, the directory of the sweep written. Nothing runs: all jobs begin in an hour, and are cancelled before.
Both as SLURM is set and with a MaxArraySize of 100, which a `scontrol` in front of the real one says.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import BIN, arguments, interleave, report

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist_mlp.yaml"
LIMITS = {"1001": 0.2, "100": 0.2, "seeds": 0.2}
LATER = "--begin=now+1hour"
POINTS = 1000
PARTS = 4
"""The loop is measured in parts of so much: all jobs of all rounds have to fit into SLURM's MaxJobCount for minutes."""
SCONTROL = """#!/bin/bash
{real} "$@" | sed 's/^MaxArraySize .*/MaxArraySize            = 100/'
exit "${{PIPESTATUS[0]}}"
"""


class Login:
    """A folder of its own on a login node, and the jobs that were queued from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script = folder / "one.sh"
        self._script.write_text("#!/bin/sh\ntrue\n")
        own = {"LAUNCH_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        self._env = {**os.environ, **own}
        front = folder / "front"
        front.mkdir()
        (front / "scontrol").write_text(SCONTROL.format(real=shutil.which("scontrol")))
        (front / "scontrol").chmod(0o755)
        self._short = {**self._env, "PATH": f"{front}:{os.environ['PATH']}"}

    def loop(self) -> float:
        """Seconds of a loop of sbatch over all points, by a part of it."""
        sbatch = f"sbatch --parsable --output=/dev/null {LATER} {self._script}"
        return PARTS * self._seconds(["bash", "-c", f"for i in $(seq {POINTS // PARTS}); do {sbatch}; done"], self._env)

    def sweep(self, *axes: str, short: bool = False) -> float:
        """Seconds of a launch of a sweep."""
        values = [part for axis in axes for part in ("--sweep", axis)]
        command = [str(BIN / "launch"), str(RECIPE), "--on", "slurm", LATER, *values]
        return self._seconds(command, self._short if short else self._env)

    def _seconds(self, argv: list[str], env: dict[str, str]) -> float:
        begun = time.perf_counter()
        done = subprocess.run(argv, check=True, capture_output=True, text=True, env=env, cwd=self.folder)
        took_s = time.perf_counter() - begun
        arrays = re.search(r"arrays? ([\d, ]+),", done.stdout)
        jobs = arrays[1].split(", ") if arrays else done.stdout.split()
        for start in range(0, len(jobs), 200):
            subprocess.run(["scancel", *jobs[start : start + 200]], check=True)
        return took_s


def numbers(count: int, *, text: str = "{}") -> str:
    """`1,2,3`."""
    return ",".join(text.format(number) for number in range(1, count + 1))


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=2)
    folder = Path(tempfile.mkdtemp(prefix="bench-sweep-", dir=os.environ.get("TMPDIR")))
    login = Login(folder)
    grid = (
        f"train.optimizer.lr={numbers(10, text='{}e-3')}",
        f"model.hidden={numbers(10)}",
        f"train.seed={numbers(10)}",
    )
    try:
        samples = interleave(
            options.rounds,
            {
                "sbatch": lambda: {"loop": [login.loop()]},
                "launch": lambda: {
                    "1001": [login.sweep(*grid)],
                    "100": [login.sweep(*grid, short=True)],
                    "seeds": [login.sweep(f"train.seed={numbers(POINTS)}")],
                },
            },
        )
    finally:
        shutil.rmtree(folder)
    peer_s = statistics.median(samples["sbatch"]["loop"])
    ratios = {key: statistics.median(samples["launch"][key]) / peer_s for key in LIMITS}
    report("1,000 points queued", samples, ratios, as_json=options.json, limits=LIMITS)


if __name__ == "__main__":
    main()
