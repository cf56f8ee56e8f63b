"""The built-in training, disturbed in every way: it ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S, Launch
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

STEPS = 200
RECIPE = tiny(
    train={"until": f"{STEPS} steps", "eval_every": "50 epochs"},
    resources={"nodes": 2, "nproc_per_node": 1, "threads": 1},
)
Command = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe_file: Path) -> dict[str, Any]:
    """The result of a run that nobody disturbs."""
    argv = [LAUNCH, str(recipe_file), "--runs-dir", str(recipe_file.parent), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=recipe_file.parent)
    run_dir = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    assert result["step"] == STEPS
    return {**result, "losses": losses(run_dir)}


def losses(run_dir: Path) -> dict[int, float]:
    """By step; each step once."""
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in record]
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["train/loss"] for record in records}


def test_a_worker_killed_in_the_middle_of_the_training_changes_nothing(
    launch: Launch, recipe_file: Path, undisturbed: dict[str, Any]
) -> None:
    """F005: the end is the same, there is one W&B run, and each step is there once."""
    run = launch(recipe_file, "tracking.wandb.mode=offline")
    run.wait_for_event("checkpoint_saved", step=40)
    (worker,) = run.happened("worker_started", rank=1)
    os.kill(worker["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.text
    result = run.result
    assert (result["restarts"], result["step"]) == (1, STEPS)
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["metrics"] == undisturbed["metrics"]
    assert losses(run.run.path) == undisturbed["losses"]
    assert list(undisturbed["losses"]) == list(range(1, STEPS + 1))
    second = run.happened("training_started")[1]
    assert second["step"] >= 40, "it went on from a checkpoint"
    ids = {re.sub(r"^offline-run-\d+_\d+-", "", path.name) for path in run.run.path.glob("wandb/offline-run-*")}
    assert ids == {run.run_id}


def test_a_stop_saves_everywhere_and_resume_ends_with_the_same_weights(
    launch: Launch, recipe_file: Path, undisturbed: dict[str, Any], command: Command
) -> None:
    """F022: and `until` is a total, so only a longer one trains on."""
    run = launch(recipe_file)
    run.wait_for_event("checkpoint_saved", step=40)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    stopped = run.result
    assert (stopped["state"], stopped["attempts"]) == ("CANCELLED", 1)
    assert 40 <= stopped["step"] < STEPS
    assert stopped["checkpoint"]["latest"] == stopped["step"]
    codes = {event["rank"]: event["exit_code"] for event in run.happened("worker_ended")}
    assert codes == {0: 75, 1: 75}
    assert f"stopped at step {stopped['step']}" in run.log(0)

    resumed = command("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert run.result["weights_sha256"] == undisturbed["weights_sha256"]
    assert run.result["attempts"] == 2
    assert losses(run.run.path) == undisturbed["losses"]

    again = command("resume", run.run_id)
    assert again.returncode == 0
    assert "already complete" in again.stdout
    assert losses(run.run.path) == undisturbed["losses"]
    longer = command("resume", run.run_id, f"train.until={STEPS + 10} steps")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert list(losses(run.run.path)) == list(range(1, STEPS + 11))


def test_a_resume_on_fewer_nodes_and_one_on_as_many_again_keep_the_batch(
    launch: Launch, recipe_file: Path, undisturbed: dict[str, Any], command: Command
) -> None:
    """F070, F086: by accumulation, which is said."""
    run = launch(recipe_file)
    run.wait_for_event("checkpoint_saved", step=40)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    for nodes, until, said in ((1, 150, "2 -> 1: accumulate 1 -> 2"), (2, STEPS, "1 -> 2: accumulate 2 -> 1")):
        resumed = command("resume", run.run_id, "--nodes", str(nodes), f"train.until={until} steps")
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert f"ranks {said}, micro-batch 8 -> 8; global batch 16 -> 16" in resumed.stdout
        assert f"{until}/{until} steps" in resumed.stdout
    assert run.result["samples_seen"] == undisturbed["samples_seen"]
    assert list(losses(run.run.path)) == list(range(1, STEPS + 1))


def test_the_torchrun_lines_of_the_dry_run_train_the_same(
    recipe_file: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Nobody is locked in: two shells, one line each."""
    shown = subprocess.run(
        [LAUNCH, str(recipe_file), "--dry-run", "--json"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = json.loads(shown.stdout)["torchrun"]
    assert len(lines) == 2
    path = f"{Path(LAUNCH).parent}:{os.environ['PATH']}"
    shells = [
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    ]
    outputs = [shell.communicate(timeout=LIMIT_S)[0] for shell in shells]
    assert [shell.returncode for shell in shells] == [0, 0], "\n".join(outputs)
    assert outputs[0].splitlines()[-1] == f"weights_sha256 {undisturbed['weights_sha256']}"


def test_a_rank_that_freezes_is_noticed_after_the_timeout_of_the_recipe(launch: Launch, recipe_file: Path) -> None:
    """F072: nothing of it can answer, so the timeout of the collectives is what notices."""
    endless = ("train.until=1000000 steps", "checkpoint.every=1000000 steps", "train.log_every=1 steps")
    run = launch(recipe_file, *endless, "network.timeout=5s", "faults.max_restarts=0")
    run.until(lambda: run.run.metrics.exists() and read_metrics(run.run.metrics))
    (worker,) = run.happened("worker_started", rank=1)
    os.kill(worker["pid"], signal.SIGSTOP)
    assert run.wait() == 1, run.text
    assert run.result["cause"] == "hang"
    assert run.result["first_failure"]["rank"] == 0
    # What gloo says of the operation that has waited, and of those behind it: which of them is asked first is chance.
    assert re.search("5000ms|Application timeout", run.result["first_failure"]["message"])
    assert run.happened("stacks_requested", attempt=1)
