"""What the benchmarks share: starting a launcher on a script, waiting for its notes, medians and ratios."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
CPU_NOTE = "CPU, gloo: says nothing about NCCL start, CUDA contexts or GPU copies."


def torchrun(*options: str, script: str, nproc: int = 2) -> list[str]:
    """The peer's command."""
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(nproc), *options, str(SCRIPTS / script)]


def launch(*options: str, script: str, nproc: int = 2) -> list[str]:
    """Our command: cold, with its run directory."""
    return [str(BIN / "launch"), str(SCRIPTS / script), "--nproc-per-node", str(nproc), *options]


class Trial:
    """One start of a launcher in a folder of its own."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="bench-"))
        scrubbed = {key: value for key, value in os.environ.items() if not key.startswith(("LAUNCH_", "TORCHELASTIC_"))}
        paths = {"OUT": str(self.out), "LAUNCH_RUNS": str(self.out / "runs"), "XDG_STATE_HOME": str(self.out / "state")}
        self._log = (self.out / "log").open("wb")
        self.started = time.time()
        self.process = subprocess.Popen(
            argv,
            env={**scrubbed, "OMP_NUM_THREADS": "1", **paths, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.out,
        )

    def wait(self, timeout_s: float = 120.0) -> float:
        """Seconds from the start to the exit. Raises RuntimeError with the log if the exit code is not 0."""
        code = self.process.wait(timeout_s)
        took_s = time.time() - self.started
        if code != 0:
            raise RuntimeError(f"{self.process.args!r} ended with {code}:\n{(self.out / 'log').read_text()[-3000:]}")
        return took_s

    def notes(self, kind: str, attempt: int, ranks: int = 2, timeout_s: float = 60.0) -> list[tuple[float, int]]:
        """(time, pid) of each rank's note, once all are there. Raises TimeoutError."""
        paths = [self.out / f"{kind}-{attempt}-{rank}" for rank in range(ranks)]
        deadline = time.time() + timeout_s
        while not all(path.exists() for path in paths):
            if time.time() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no {kind} of attempt {attempt}:\n{(self.out / 'log').read_text()[-3000:]}")
            time.sleep(0.001)
        pairs = [path.read_text().split() for path in paths]
        return [(float(at), int(pid)) for at, pid in pairs]

    def close(self) -> None:
        """End what still runs (only this trial's processes) and remove its folder."""
        if self.process.poll() is None:
            (self.out / "stop").touch()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.terminate()
                self.process.wait(40)
        self._log.close()
        shutil.rmtree(self.out)


Samples = dict[str, dict[str, list[float]]]
"""contender -> figure -> one value per round"""


def interleave(rounds: int, contenders: Mapping[str, Callable[[], Mapping[str, Sequence[float]]]]) -> Samples:
    """Run the contenders A B C A B C ..., so that a slow minute of the machine meets all of them."""
    samples: Samples = {name: {} for name in contenders}
    for number in range(rounds):
        for name, measure in contenders.items():
            for figure, values in measure().items():
                samples[name].setdefault(figure, []).extend(values)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return samples


def report(
    title: str, samples: Samples, ratios: Mapping[str, float], *, as_json: bool, limits: Mapping[str, float]
) -> None:
    """Print medians [min - max], the ratios beside their limits, and with --json one last line."""
    print(f"\n{title}\n  {CPU_NOTE}")
    for name, figures in samples.items():
        for figure, values in figures.items():
            spread = f"[{min(values):.3f} - {max(values):.3f}]"
            print(f"  {name:34} {figure:18} {statistics.median(values):8.3f} s  {spread}  n={len(values)}")
    for key, ratio in ratios.items():
        print(f"  ratio {key:20} {ratio:.3f}   (limit {limits[key]:.2f}){'' if ratio <= limits[key] else '   ABOVE'}")
    if as_json:
        medians = {n: {f: statistics.median(v) for f, v in figures.items()} for n, figures in samples.items()}
        print(json.dumps({"ratios": dict(ratios), "medians_s": medians}))


def best_peer(samples: Samples, figure: str, peers: Sequence[str]) -> float:
    """The median of the peer's better settings."""
    return min(statistics.median(samples[peer][figure]) for peer in peers)


def arguments(description: str | None, *, rounds: int) -> argparse.Namespace:
    """--rounds and --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true", help="a last line with the ratios")
    return parser.parse_args()
