"""What a run does when its checkpoints cannot be written, or cannot be read: it ends at once, and says so."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Launch

pytestmark = pytest.mark.process

RECIPE: dict[str, Any] = {
    "name": "kept",
    "model": {"name": "mlp", "in_features": 20, "hidden": 16, "classes": 4},
    "data": {"name": "synthetic", "samples": 90, "shape": "20", "classes": 4, "global_batch_size": 16},
    "train": {"until": "100k steps", "eval_every": None},
    "checkpoint": {"every": "20 steps", "keep": 2},
    "resources": {"nodes": 1, "nproc_per_node": 2, "threads": 1},
    "tracking": {"wandb": {"mode": "disabled"}},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


def test_a_save_that_fails_ends_the_run_and_is_not_tried_again(launch: Launch, recipe_file: Path) -> None:
    """F084: loud, at once, by its name; what was saved before is still there."""
    run = launch(recipe_file)
    run.wait_for_event("checkpoint_saved")
    run.run.checkpoints.rename(run.run.path / "away")
    run.run.checkpoints.touch()
    assert run.wait() == 1, run.text
    result = run.result
    assert (result["state"], result["cause"], result["restarts"]) == ("FAILED", "save", 0)
    assert "could not be written to" in run.text
    assert any((run.run.path / "away").glob("step-*/manifest.json"))


def test_checkpoints_that_are_all_broken_are_for_a_person_to_decide(
    launch: Launch, command: Callable[..., subprocess.CompletedProcess[str]], recipe_file: Path
) -> None:
    """F009: each one is named, nothing is trained from zero over them, and no restart is wasted on it."""
    run = launch(recipe_file)
    run.wait_for_event("checkpoint_saved")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    names = sorted(path.name for path in run.run.checkpoints.glob("step-*"))
    for name in names:
        (run.run.checkpoints / name / "manifest.json").write_text("{}")
    resumed = command("resume", run.run_id)
    assert resumed.returncode == 1, resumed.stdout + resumed.stderr
    result = run.result
    assert (result["state"], result["cause"], result["restarts"]) == ("FAILED", "checkpoint", 0)
    for name in names:
        assert f"{name} is broken: manifest.json cannot be read" in resumed.stdout
    assert sorted(path.name for path in run.run.checkpoints.glob("step-*")) == names
