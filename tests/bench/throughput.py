"""Samples per second of a training in its steady state: ours, and the same one in the manners of others.

`python tests/bench/throughput.py [--rounds 5] [--models convnet mlp] [--batches 128 1024] [--seconds 4] [--peers ...]
[--json]`: a small convolutional network and a perceptron on handwritten digits, two ranks of one thread each, in turn:

  launch      a recipe, with all that a run has: metrics of every step, agreement on the loss, rescue
  textbook    DistributedDataParallel as in the tutorial: a sample at a time, DataLoader, `.item()` in each step
  best        the best loop that is written by hand: whole batches, fused optimizer, static graph, no look at the loss
  lightning, accelerate   as their documents have it

All are looked at in the same way: rank 0's clock after a warm-up and after the last step; no evaluation, no save. The
ratios are medians over the rounds of ours / theirs in the same round: what else the machine does meets both.

`--cost`: ours with tracking, checkpoints and watching against ours without, whole steps and saves, from the time on
when the trackers are there (`--seconds 20` or more: saves come every 5 s).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import BIN, CPU_NOTE, Trial, torchrun

ROOT = Path(__file__).parents[2]
RANKS, LR = 2, 1e-3
MODELS = ("convnet", "mlp")
NETS = Path(__file__).parent / "scripts" / "nets.py"
BATCHES = (128, 1024)
PEERS = ("textbook", "best", "lightning", "accelerate")
FRAMEWORKS = ("lightning", "accelerate")
GOOD: dict[str, float | dict[str, float]] = {
    "textbook": {"convnet": 1.2, "mlp": 2.0},
    "best": 0.97,
    "lightning": 1.3,
    "accelerate": 1.15,
}
STEPS_PER_S = {
    ("convnet", 128): (300, 200),
    ("convnet", 1024): (35, 30),
    ("mlp", 128): (1000, 400),
    ("mlp", 1024): (250, 120),
}
"""About as many steps fit into a second on a slow machine: of ours, of the best loop (the others take longer)."""
SAVE_S = 5.0
"""With --cost: about how much time is between two checkpoints."""
COST_WARM_UP_S = 4.0
"""With --cost: until then the trackers have been imported, which is paid once per run."""


def steps_of(model: str, batch: int, seconds: float, *, is_ours: bool, warm_up_s: float = 1.0) -> tuple[int, int]:
    """How many steps, and how many of them are the warm-up."""
    per_s = STEPS_PER_S[model, batch][0 if is_ours else 1]
    return int(per_s * (seconds + warm_up_s)), int(per_s * warm_up_s)


def recipe(model: str, batch: int, steps: int, *, everything: bool = False) -> dict[str, Any]:
    """Ours. everything: with checkpoints, trackers, and the eye on the devices."""
    found: dict[str, Any] = {
        "name": "bench",
        "model": {"target": f"nets:{model}"},
        "data": {"name": "mnist", "global_batch_size": batch},
        "train": {"until": f"{steps} steps", "optimizer": {"name": "adamw", "lr": LR}, "eval_every": None},
        "checkpoint": {"every": None},
        "resources": {"nodes": 1, "nproc_per_node": RANKS, "threads": 1, "device": "cpu"},
        "tracking": {"wandb": {"mode": "disabled"}, "watch": None},
    }
    if everything:
        found["checkpoint"] = {"every": f"{int(STEPS_PER_S[model, batch][0] * SAVE_S)} steps"}
        found["tracking"] = {"wandb": {"mode": "offline"}, "tensorboard": True, "watch": "10s"}
    return found


def rate(lines: list[dict[str, Any]], warm_up: int) -> float:
    """Samples per second from the end of the warm-up to the last step."""
    steps = {line["step"]: line for line in lines if "samples_seen" in line}
    first, last = steps[warm_up], steps[max(steps)]
    return float((last["samples_seen"] - first["samples_seen"]) / (last["time"] - first["time"]))


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def ours(model: str, batch: int, seconds: float, *, warm_up_s: float = 1.0, everything: bool = False) -> float:
    """Samples per second of a run of `launch`."""
    steps, warm_up = steps_of(model, batch, seconds, is_ours=True, warm_up_s=warm_up_s)
    text = json.dumps(recipe(model, batch, steps, everything=everything))
    command = 'cp "$NETS" . && echo "$RECIPE" > bench.yaml && exec "$LAUNCH" bench.yaml --on local'
    trial = Trial(["bash", "-c", command], {"RECIPE": text, "NETS": str(NETS), "LAUNCH": str(BIN / "launch")})
    try:
        trial.wait(300)
        (run,) = (trial.out / "runs").glob("bench-*/")
        return rate(read(run / "metrics.jsonl"), warm_up)
    finally:
        trial.close()


def theirs(kind: str, model: str, batch: int, seconds: float) -> float:
    """Samples per second of a script under torchrun."""
    steps, warm_up = steps_of(model, batch, seconds / 2 if kind != "best" else seconds, is_ours=False)
    settings = {"model": model, "batch": batch, "lr": LR, "steps": steps, "warm_up": warm_up}
    env = {"SETTINGS": json.dumps(settings), "KIND": kind, "PYTHONPATH": str(ROOT)}
    trial = Trial(torchrun(script="trains.py", nproc=RANKS), env)
    try:
        trial.wait(300)
        return rate(read(trial.out / "steps.jsonl"), warm_up)
    finally:
        trial.close()


def compare(model: str, batch: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Rounds of all manners, one after the other."""
    rates: dict[str, list[float]] = {}
    for number in range(options.rounds):
        rates.setdefault("launch", []).append(ours(model, batch, options.seconds))
        for kind in options.peers:
            rates.setdefault(kind, []).append(theirs(kind, model, batch, options.seconds))
        latest = "  ".join(f"{kind} {values[-1]:,.0f}" for kind, values in rates.items())
        print(f"{model} {batch}, round {number + 1} of {options.rounds}: {latest}", file=sys.stderr, flush=True)
    return rates


def ratios(rates: Mapping[str, list[float]], over: str) -> dict[str, float]:
    """Of `over` to each of the others: the median over the rounds."""
    pairs = {kind: zip(rates[over], values, strict=True) for kind, values in rates.items() if kind != over}
    return {kind: statistics.median(one / other for one, other in each) for kind, each in pairs.items()}


def limit(kind: str, model: str) -> float:
    """What is asked of us."""
    found = GOOD[kind]
    return found[model] if isinstance(found, dict) else found


def table(title: str, rates: Mapping[str, list[float]]) -> None:
    """Medians [least - most]."""
    print(f"\n{title}")
    for kind, values in rates.items():
        spread = f"[{min(values):,.0f} - {max(values):,.0f}]"
        print(f"  {kind:12} {statistics.median(values):10,.0f} samples/s  {spread}  n={len(values)}")


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """All networks and batches."""
    found = {}
    for model in options.models:
        for batch in options.batches:
            rates = compare(model, batch, options)
            table(f"{model}, global batch {batch}", rates)
            each = ratios(rates, "launch")
            for kind, ratio in each.items():
                below = "" if ratio >= limit(kind, model) else "   BELOW"
                print(f"  launch / {kind:12} {ratio:.3f}   (at least {limit(kind, model):.2f}){below}")
            found[f"{model}-{batch}"] = {
                "ratios": each,
                "samples_per_s": {kind: statistics.median(values) for kind, values in rates.items()},
            }
    return found


def measure_cost(options: argparse.Namespace) -> dict[str, Any]:
    """With everything against without."""
    found = {}
    for model in options.models:
        for batch in options.batches:
            rates: dict[str, list[float]] = {"without": [], "with": []}
            for number in range(options.rounds):
                order = ("without", "with") if number % 2 == 0 else ("with", "without")
                for kind in order:
                    everything = kind == "with"
                    rate = ours(model, batch, options.seconds, warm_up_s=COST_WARM_UP_S, everything=everything)
                    rates[kind].append(rate)
                print(f"{model} {batch}, round {number + 1}: {rates}", file=sys.stderr, flush=True)
            table(f"{model}, global batch {batch}: with checkpoints, trackers, watching", rates)
            cost = ratios(rates, "without")["with"] - 1
            print(f"  they cost {100 * cost:.1f} %   (at most 2){'' if cost <= 0.02 else '   ABOVE'}")
            found[f"{model}-{batch}"] = cost
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long each training lasts")
    parser.add_argument("--cost", action="store_true", help="what tracking, checkpoints and watching cost")
    parser.add_argument("--json", action="store_true", help="a last line with the figures")
    options = parser.parse_args()
    for kind in [kind for kind in options.peers if kind in FRAMEWORKS and find_spec(kind) is None]:
        print(f"{kind} is not installed, and left out (pip install {kind})", file=sys.stderr)
        options.peers.remove(kind)
    found = measure_cost(options) if options.cost else measure_speed(options)
    print(f"\n{CPU_NOTE} {os.cpu_count()} CPUs.")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
