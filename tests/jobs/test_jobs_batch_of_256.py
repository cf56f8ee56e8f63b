"""A batch of 256 samples, however it is divided: one curve, and the same bits after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.long]

CLOSE = 1e-5
STEPS = 14
"""Each sixth has 90 samples, which neither 128 nor 64 divide."""
MODEL = {"name": "gpt", "vocabulary": 32, "context": 16, "layers": 2, "heads": 4, "width": 32}
DATA = {
    "name": "synthetic",
    "kind": "tokens",
    "samples": 5 * 256 + 90,
    "eval_samples": 32,
    "shape": "16",
    "classes": 32,
    "global_batch_size": 256,
}
SECTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"strategy": "ddp"}, 1),
    "fsdp": ({"strategy": "fsdp"}, 1),
    "tp": ({"strategy": "ddp", "tp": 2}, 2),
}
"""The section, and how many ranks share the same samples."""
WAYS = {
    "1 x 256": (1, 1),
    "2 x 128": (2, 1),
    "2 x 128 accumulated": (1, 2),
    "4 x 64": (2, 2),
    "4 x 64 accumulated": (1, 4),
}
"""How many shares a batch has, and in how many micro-batches each is computed."""

KILL = """
import os, signal
import jobs.gradients

inner = jobs.gradients.Gradients.make

def make(gradients, share, step):
    if step == 8 and os.environ["LAUNCH_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(gradients, share, step)

jobs.gradients.Gradients.make = make
"""


def recipe(parallelism: dict[str, Any], accumulate: int) -> dict[str, Any]:
    made = tiny(
        data=DATA,
        train={
            "until": f"{STEPS} steps",
            "eval_every": "7 steps",
            "accumulate": accumulate,
            "optimizer": {"name": "adamw", "lr": 3e-3},
        },
        checkpoint={"every": "5 steps", "asynchronous": False},
        parallelism=parallelism,
    )
    return {**made, "model": MODEL}


def curve(ranks: Ranks, key: str = "train/loss") -> list[float]:
    return [record[key] for record in read_metrics(ranks.metrics) if key in record]


_ONE_RANK: dict[str, list[float]] = {}


def of_one_rank(start: Start, tmp_path: Path) -> dict[str, list[float]]:
    """Losses, norms and evaluations of `single`, of a whole batch at once.

    The norms show what AdamW hides: gradients that are too long or too short by the same factor in every step.
    """
    if not _ONE_RANK:
        ranks = start(tmp_path / "single", recipe({"strategy": "single"}, 1), ranks=1)
        assert ranks.wait() == [0], ranks.log()
        _ONE_RANK.update({key: curve(ranks, key) for key in ("train/loss", "train/grad_norm", "eval/loss")})
        assert len(_ONE_RANK["train/loss"]) == STEPS
        assert _ONE_RANK["train/loss"][-1] < _ONE_RANK["train/loss"][0] - 0.05, "it learns something"
    return _ONE_RANK


@pytest.mark.parametrize("strategy", SECTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_256_has_one_curve_and_one_end(start: Start, tmp_path: Path, strategy: str, way: str) -> None:
    (parallelism, of_model), (shares, accumulate) = SECTIONS[strategy], WAYS[way]
    one_rank, world = of_one_rank(start, tmp_path), shares * of_model
    made = recipe(parallelism, accumulate)
    whole = start(tmp_path / "whole", made, ranks=world)
    assert whole.wait() == [0] * world, whole.log()
    for key, expected in one_rank.items():
        assert curve(whole, key) == pytest.approx(expected, abs=CLOSE)
    (tmp_path / "kill.py").write_text(KILL)
    load = [str(tmp_path / "kill.py")]
    assert start(tmp_path / "broken", made, ranks=world, load=load).wait() == [137] * world
    last = start(tmp_path / "broken", made, ranks=world, load=load, attempt=2)
    assert last.wait() == [0] * world, last.log()
    assert last.event("training_started")["resumed_from"] == "step-5"
    assert last.weights == whole.weights
    assert curve(last) == curve(whole)
