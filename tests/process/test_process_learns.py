"""A shipped recipe learns, in the time that is said of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from launched import LAUNCH

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

RECIPE = Path(__file__).parents[2] / "recipes/gpt_ddp.yaml"
NATS, WITHIN_S = 2.0, 300.0


@pytest.mark.long
@pytest.mark.timeout(4 * WITHIN_S)
def test_a_gpt_learns_the_standard_library(tmp_path: Path) -> None:
    """The loss of its bytes, over 50 steps, is under 2 nats within five minutes, on two cores."""
    keys = ("train.until=600 steps", "train.eval_every=null", "tracking.wandb.mode=disabled")
    argv = [LAUNCH, str(RECIPE), *keys, "--nproc-per-node", "2", "--runs-dir", str(tmp_path), "--json"]
    begin_s = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3 * WITHIN_S, check=False, cwd=tmp_path)
    took_s = time.monotonic() - begin_s
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    losses = [record["train/loss"] for record in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in record]
    assert len(losses) == 600
    assert statistics.mean(losses[-50:]) < NATS
    assert took_s < WITHIN_S
    assert json.loads((run_dir / "result.json").read_text())["metrics"]["eval/perplexity"] < 10
