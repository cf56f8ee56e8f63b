"""From the SIGKILL of a worker to the next all-reduce, and to the next new step of a training: one that was not made
before; 2 workers, against torchrun, for the step with a careful script.

`python tests/bench/restart.py [--rounds 3] [--json]`: KILLS restarts per round and contender. torchrun is given
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts hang more often than not. `--hangs N`: ours alone, N
restarts in a row, none of which may hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

from common import Trial, best_peer, interleave, launch, report, torchrun
from training import EVERY, Ours, Torchrun, Training

KILLS = 4
LIMITS = {"all_reduce": 0.20, "step": 0.15}
SCRIPT = "all_reduce.py"


def restarts(argv: list[str], kills: int) -> dict[str, list[float]]:
    """Kill rank 1 again and again; seconds until all ranks have noted the next attempt's first all-reduce."""
    trial = Trial(argv, {"LOOP": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    took: list[float] = []
    try:
        notes = trial.notes("first_all_reduce", 0)
        for number in range(kills):
            time.sleep(0.1)
            killed_at = time.time()
            os.kill(notes[1][1], signal.SIGKILL)
            notes = trial.notes("first_all_reduce", number + 1, timeout_s=60.0)
            took.append(max(at for at, _ in notes) - killed_at)
        (trial.out / "stop").touch()
        trial.wait()
    finally:
        trial.close()
    return {"all_reduce": took}


def new_steps(contender: type[Training], kills: int) -> dict[str, list[float]]:
    """Kill rank 1 of a training in the middle between two checkpoints; seconds until a step that is new."""
    training = contender()
    took: list[float] = []
    try:
        for _ in range(kills):
            before = training.newest()
            training.wait_for((before // EVERY + 1) * EVERY + EVERY // 2, limit_s=120.0)
            victim = training.worker(1)
            assert victim is not None, "it has just made a step"
            os.kill(victim, signal.SIGKILL)
            killed_at, newest = time.time(), training.newest()
            took.append(training.wait_for(newest + 1, limit_s=120.0) - killed_at)
    finally:
        training.close()
    return {"step": took}


def ours(preload: str) -> list[str]:
    """Our command, with more restarts than there will be kills."""
    return launch(f"preload={preload}", "resume=self", "faults.max_restarts=100000", script=SCRIPT)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="a last line with the ratios")
    parser.add_argument("--hangs", type=int, metavar="N", help="only ours, N restarts in a row")
    options = parser.parse_args()
    if options.hangs:
        took = restarts(ours("true"), options.hangs)["all_reduce"]
        print(f"{len(took)} restarts, 0 hung; median {statistics.median(took):.3f} s, longest {max(took):.3f} s")
        return
    stock = torchrun("--max-restarts", "100", script=SCRIPT)
    tuned = torchrun("--max-restarts", "100", "--monitor-interval", "0.01", script=SCRIPT)
    samples = interleave(
        options.rounds,
        {
            "torchrun": lambda: restarts(stock, KILLS),
            "torchrun --monitor-interval 0.01": lambda: restarts(tuned, KILLS) | new_steps(Torchrun, KILLS),
            "launch": lambda: restarts(ours("true"), KILLS) | new_steps(Ours, KILLS),
        },
    )
    peers = {
        "all_reduce": ["torchrun", "torchrun --monitor-interval 0.01"],
        "step": ["torchrun --monitor-interval 0.01"],
    }
    ratios = {key: statistics.median(samples["launch"][key]) / best_peer(samples, key, peers[key]) for key in LIMITS}
    report("Restart: SIGKILL of one of 2 workers", samples, ratios, as_json=options.json, limits=LIMITS)


if __name__ == "__main__":
    main()
