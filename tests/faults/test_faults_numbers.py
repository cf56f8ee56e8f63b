"""Numbers gone wrong, in real runs on two nodes: what is decided, what is said, and what it ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launched import Launch, Launched
from tiny import tiny

pytestmark = pytest.mark.process


def diverging(tmp_path: Path, **faults: Any) -> Path:
    """One step with these weights is possible; the losses after it are not finite."""
    recipe = tiny(
        train={"until": "12 steps", "eval_every": None, "optimizer": {"name": "sgd", "lr": 1e30}},
        checkpoint={"every": "1 steps", "keep": 5},
        resources={"nodes": 2, "nproc_per_node": 1, "threads": 1},
        faults=faults,
    )
    path = tmp_path / "diverging.yaml"
    path.write_text(json.dumps(recipe))
    return path


def ended(run: Launched) -> str:
    """How it ended: on all ranks at one step, with nothing restarted. Returns the message."""
    assert run.wait() == 1, run.text
    result = run.result
    assert (result["state"], result["cause"], result["attempts"]) == ("FAILED", "nan", 1)
    lines = [*run.log(0).splitlines(), *run.log(1, node=1).splitlines()]
    assert len({line for line in lines if line.startswith("ended by FloatingPointError: ")}) == 1, "all decided alike"
    assert "Traceback" not in "".join(lines), "a loss that is not a number is no fault of the program"
    assert "train.optimizer.lr" in run.text
    return str(result["first_failure"]["message"])


def test_it_stops_at_once(launch: Launch, tmp_path: Path) -> None:
    run = launch(diverging(tmp_path))
    message = ended(run)
    assert "FloatingPointError" in message
    assert run.result["checkpoint"]["latest"] == run.result["first_failure"]["step"] - 1


def test_it_skips_until_it_has_skipped_too_often(launch: Launch, tmp_path: Path) -> None:
    run = launch(diverging(tmp_path, on_nan="skip", max_skips=3))
    assert "after 3 that were skipped in a row (faults.max_skips)" in ended(run)
    steps = [event["step"] for event in run.happened("step_skipped")]
    assert steps == list(range(steps[0], steps[0] + 3))
    saved = json.loads((run.run.checkpoints / f"step-{steps[-1]}" / "state.json").read_text())
    assert saved["left_out"]["ranges"] == [[steps[0], steps[-1]]]


def test_it_goes_back_until_it_has_gone_back_too_often(launch: Launch, tmp_path: Path) -> None:
    run = launch(diverging(tmp_path, on_nan="rollback", max_skips=2))
    assert "after 2 rollbacks without a new checkpoint (faults.max_skips)" in ended(run)
    assert len(run.happened("rolled_back")) == 2
