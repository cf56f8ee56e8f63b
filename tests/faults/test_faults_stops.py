"""Stops as clusters send them, on two nodes: one save and one exit, whoever is told, in whatever order."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from launched import Launch, Recipe
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SAVE_S, LONG_S, SHORT_S = 3.0, 6.0, 1.0
SAVES_SLOWLY = f"""
import signal, sys, time, toy
def save(*_):
    time.sleep({SAVE_S})
    toy.mark("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
toy.mark("up")
toy.wait_for("never")
"""
SAVES_ONCE = """
import signal, sys, time, toy
def save(*_):
    with open(toy.RUN / f"saves.{toy.RANK}", "a") as file:
        file.write("saved\\n")
    time.sleep(1.0)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
toy.mark("up")
toy.wait_for("never")
"""


@pytest.mark.parametrize(("grace_s", "code"), [(LONG_S, 75), (SHORT_S, 143)])
def test_on_two_nodes_the_grace_of_the_recipe_is_what_a_save_has(
    launch: Launch, recipe: Recipe, grace_s: float, code: int
) -> None:
    """F016, in short times; in its own ones on one node in test_faults_patience.py."""
    run = launch(recipe(SAVES_SLOWLY, nodes=2, nproc=1, faults={"grace": f"{grace_s:.0f}s"}))
    run.wait_for_marks("up", ranks=2)
    asked_s = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == code, run.text
    took_s = time.monotonic() - asked_s
    assert [(run.run.path / f"saved.{rank}.1").exists() for rank in (0, 1)] == [code == 75] * 2
    assert min(SAVE_S, grace_s) <= took_s < min(SAVE_S, grace_s) + 5, run.text


@pytest.mark.parametrize("names", [["TERM"], ["CONT", "TERM"], ["USR2", "CONT", "TERM"]], ids=" ".join)
def test_any_order_of_signals_is_one_save_and_one_exit(launch: Launch, recipe: Recipe, names: list[str]) -> None:
    """F049: to `launch`, as a scheduler sends them to what it has started."""
    run = launch(recipe(SAVES_ONCE, nodes=2, nproc=1, faults={"grace": "20s"}))
    run.wait_for_marks("up", ranks=2)
    for name in names:
        run.signal(signal.Signals[f"SIG{name}"])
    assert run.wait() == 75, run.text
    assert [(run.run.path / f"saves.{rank}").read_text() for rank in (0, 1)] == ["saved\n"] * 2
    assert len(run.happened("finished")) == 1
    assert (run.result["state"], run.result["exit_code"], run.result["attempts"]) == ("CANCELLED", 75, 1)


def test_of_four_ranks_on_two_nodes_one_is_told_to_stop_and_all_leave_at_one_step(
    launch: Launch, tmp_path: Path
) -> None:
    """F050."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        json.dumps(tiny(resources={"nodes": 2, "nproc_per_node": 2, "threads": 1}, train={"until": "90000 steps"}))
    )
    run = launch(path)
    run.wait_for_event("checkpoint_saved", step=20)
    (worker,) = run.happened("worker_started", rank=1)
    os.kill(worker["pid"], signal.SIGTERM)
    assert run.wait() == 75, run.text
    codes = {event["rank"]: event["exit_code"] for event in run.happened("worker_ended")}
    assert codes == dict.fromkeys(range(4), 75)
    step = run.result["step"]
    assert f"stopped at step {step}" in run.log(0)
    assert read_metrics(run.run.metrics)[-1]["step"] == step
    assert run.result["checkpoint"]["latest"] == step
    assert not list(run.run.checkpoints.glob("*.tmp-*"))
    assert run.result["checkpoint"]["verified"]
