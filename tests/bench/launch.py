"""From the command to the first all-reduce, the first DDP step and the exit; 2 workers, one node, against torchrun.

`python tests/bench/launch.py [--rounds 7] [--json]`. The ratios are against the better of torchrun's two settings.
"""

from __future__ import annotations

import statistics

from common import Trial, arguments, best_peer, interleave, launch, report, torchrun

LIMITS = {"first_all_reduce": 0.65, "exit": 0.50, "first_step": 0.60}


def start(argv: list[str], *, step: bool) -> dict[str, list[float]]:
    """One cold start."""
    trial = Trial(argv, {"STEP": "1"} if step else {})
    try:
        exit_s = trial.wait()
        kind = "first_step" if step else "first_all_reduce"
        first_s = max(at for at, _ in trial.notes(kind, 0)) - trial.started
        return {kind: [first_s]} if step else {kind: [first_s], "exit": [exit_s]}
    finally:
        trial.close()


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=7)
    script = "all_reduce.py"
    stock, tuned = torchrun(script=script), torchrun("--monitor-interval", "0.01", script=script)
    ours, ours_dynamo = launch("preload=true", script=script), launch("preload=[torch._dynamo]", script=script)
    samples = interleave(
        options.rounds,
        {
            "torchrun": lambda: start(stock, step=False) | start(stock, step=True),
            "torchrun --monitor-interval 0.01": lambda: start(tuned, step=False) | start(tuned, step=True),
            "launch preload=true": lambda: start(ours, step=False),
            "launch preload=[torch._dynamo]": lambda: start(ours_dynamo, step=True),
            "launch (fresh interpreters)": lambda: start(launch(script=script), step=False),
        },
    )
    peers = ["torchrun", "torchrun --monitor-interval 0.01"]
    mine = {
        "first_all_reduce": samples["launch preload=true"]["first_all_reduce"],
        "exit": samples["launch preload=true"]["exit"],
        "first_step": samples["launch preload=[torch._dynamo]"]["first_step"],
    }
    ratios = {key: statistics.median(values) / best_peer(samples, key, peers) for key, values in mine.items()}
    report("Start: 2 workers, one node", samples, ratios, as_json=options.json, limits=LIMITS)


if __name__ == "__main__":
    main()
