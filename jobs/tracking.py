"""Copies of metrics.jsonl elsewhere: a process of its own reads it (`jobs.follower`), so that nothing about a tracker
can stop, slow down or fail the training: neither its import, nor a server that does not answer, nor its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from jobs.job import Job, run_id
from launcher import redact
from launcher.runs.rundir import RunDir

FINISH_S = 10.0
"""How long the end of a training waits for what is not sent yet."""
_STOP_SHARE = 1 / 3
"""Of a stop's grace time, which sites make as short as a few seconds: the rest is for the step and the checkpoint."""


def patience_s(grace_s: float | None) -> float:
    """How long a stop may wait for trackers. metrics.jsonl has what is not sent by then, and `launch sync` sends it."""
    return FINISH_S if grace_s is None else min(FINISH_S, grace_s * _STOP_SHARE)


class Tracking:
    """The tracking process of a run, seen from rank 0."""

    def __init__(self, process: subprocess.Popen[str], orders: IO[str]) -> None:
        self._process, self._orders = process, orders

    @classmethod
    def start(cls, job: Job, run_dir: RunDir) -> Tracking | None:
        """Start it; returns at once. None where the recipe wants no tracker."""
        tracking = job.recipe.tracking
        if tracking.wandb.mode == "disabled" and not tracking.tensorboard:
            return None
        order = {
            "run_dir": str(run_dir.path),
            "run_id": run_id(run_dir, os.environ),
            "attempt": job.attempt,
            "name": job.recipe.name,
            "wandb": tracking.wandb.model_dump(mode="json"),
            "tensorboard": tracking.tensorboard,
            "config": redact.own().document(job.recipe.model_dump(mode="json", by_alias=True)),
        }
        own = str(Path(__file__).resolve().parents[1])  # ours may be loaded from a run directory, with no place there
        path = os.pathsep.join(entry for entry in (own, *sys.path) if entry)
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.follower"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            text=True,
        )
        assert process.stdin is not None
        tracked = cls(process, process.stdin)
        tracked._say(order)
        return tracked

    def finish(self, *, exit_code: int, limit_s: float) -> None:
        """Let it send the rest, for a bounded time."""
        self._say({"finish": exit_code})
        try:
            self._orders.close()
            self._process.wait(limit_s)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
            print(f"tracking did not finish within {limit_s:.1f} s; metrics.jsonl has everything", flush=True)

    def _say(self, order: dict[str, object]) -> None:
        try:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
        except BrokenPipeError:
            pass  # it has ended; it said why
