"""How long lists of many runs take: `launch ls` of 10,000, `launch status` of 200 jobs.

`python tests/bench/listing.py [--runs 10000] [--rounds 5] [--json]`. Whole processes, in seconds, without a peer. The
jobs are those of a squeue of two lines of shell, so that what is measured is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common import BIN

JOBS = 200
LIMITS_S = {"ls": 0.5, "ls --json": 0.5, "ls --all": 2.0, "status of one": 0.5, "status of 200 jobs": 1.0}
SQUEUE = f"""#!/bin/sh
echo >> "$CALLS"
seq {JOBS} | sed 's/$/|RUNNING|1796030645|1796030700|1:00|n1|None/'
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="a last line with the seconds")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-listing-"))
    try:
        environment = make_runs(folder, options.runs)
        commands = {
            "ls": ["ls"],
            "ls --json": ["ls", "--json"],
            "ls --all": ["ls", "--all"],
            "status of one": ["status", "ended-0000-aaaa"],
            f"status of {JOBS} jobs": ["status", "alive-*"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, arguments in commands.items():
                begun_s = time.perf_counter()
                subprocess.run([str(BIN / "launch"), *arguments], check=True, capture_output=True, env=environment)
                seconds[name].append(time.perf_counter() - begun_s)
        calls = (folder / "calls").stat().st_size
    finally:
        shutil.rmtree(folder)
    show(seconds, runs=options.runs, calls=calls / options.rounds, as_json=options.json)


def show(seconds: dict[str, list[float]], *, runs: int, calls: float, as_json: bool) -> None:
    """Medians [min - max] beside their limits."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"Lists of {runs:,} runs, {JOBS} of them jobs on a cluster: {calls:g} calls of squeue per round")
    for name, values in seconds.items():
        limit_s, spread = LIMITS_S[name], f"[{min(values):.3f} - {max(values):.3f}]"
        above = "" if medians[name] <= limit_s else "   ABOVE"
        print(f"  launch {name:20} {medians[name]:8.3f} s  {spread}  n={len(values)}   (limit {limit_s} s){above}")
    if as_json:
        print(json.dumps({"ratios": {}, "medians_s": medians, "squeue_calls": calls}))


def make_runs(folder: Path, number: int) -> dict[str, str]:
    """So many run directories with pointers, the last of them jobs; the environment that knows them."""
    pointers = folder / "state" / "launcher" / "runs"
    pointers.mkdir(parents=True)
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    for index in range(number):
        job = index - (number - JOBS)
        run_id = f"{'ended' if job < 0 else 'alive'}-{index:04d}-{_letters(index)}"
        run = folder / "runs" / run_id
        (run / "events").mkdir(parents=True)
        (run / "plan.json").write_text("{}")
        _write_events(run, job + 1 if job >= 0 else None)
        if job < 0:
            (run / "result.json").write_text(json.dumps(RESULT, indent=1))
        stamp = (begun + timedelta(seconds=index)).strftime("%Y%m%dT%H%M%S.%f")
        (pointers / f"{stamp}_{run_id}.json").write_text(json.dumps({"run_id": run_id, "run_dir": str(run)}))
    tools = folder / "bin"
    tools.mkdir()
    (tools / "squeue").write_text(SQUEUE)
    (tools / "squeue").chmod(0o755)
    return {
        **os.environ,
        "XDG_STATE_HOME": str(folder / "state"),
        "CALLS": str(folder / "calls"),
        "PATH": f"{tools}:{os.environ['PATH']}",
    }


def _write_events(run: Path, job: int | None) -> None:
    lines = [{"event": "created", "host": "here", "user": "ada"}]
    lines += [{"event": "submitted", "ref": "local:here:1:2" if job is None else f"slurm:{job}"}]
    lines += [{"event": "agent_started", "node": node, "pid": 1, "host": "here"} for node in (0, 1)]
    lines += [{"event": "attempt_started", "attempt": 1}]
    lines += [{"event": "checkpoint_saved", "attempt": 1, "step": step, "path": "x"} for step in range(0, 600, 100)]
    told = [json.dumps({"time": 1796030000.0 + index, "writer": "head", **line}) for index, line in enumerate(lines)]
    (run / "events" / "head.jsonl").write_text("\n".join(told) + "\n")


def _letters(index: int) -> str:
    letters = "abcdefghijklmnop"
    return "".join(letters[index >> shift & 15] for shift in (12, 8, 4, 0))


RESULT = {
    "state": "SUCCEEDED", "cause": "done", "exit_code": 0, "reason": "all workers finished", "first_failure": None,
    "step": 632, "total_steps": 632, "samples_seen": 80896, "world_size": 2, "metrics": {"eval/accuracy": 0.978},
    "attempts": 1, "restarts": 0, "time": {"total_s": 21.0}, "checkpoint": {"latest": 632, "best": 300},
}  # fmt: skip

if __name__ == "__main__":
    main()
