"""Saves on two nodes, in real runs: what goes wrong in them on one rank, and that all are there at the end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import criteria
import pytest
from launched import Launch, Launched
from tiny import tiny

from jobs.folders import complete
from jobs.manifest import verify

pytestmark = pytest.mark.process

SITECUSTOMIZE = r"""
import os, re, sys, time

def full(trainer):
    # The disk of rank 1 is full while step 20 is saved.
    import jobs.storage
    inner = jobs.storage.Layout.write_part
    def write_part(layout, folder, parts):
        if folder.name.startswith("step-20.") and os.environ["RANK"] == "1":
            raise OSError(28, os.strerror(28), str(folder))
        return inner(layout, folder, parts)
    jobs.storage.Layout.write_part = write_part

def own_metric(trainer):
    # Each rank sees another one in its own evaluation.
    sys.modules[trainer.__module__].evaluate = lambda *_, **__: {"eval/accuracy": float(os.environ["RANK"])}

def never_saves(trainer):
    # Rank 3 stays away from the save of step 10.
    inner = trainer._check_weights
    def check(each):
        while each.progress.step == 10 and os.environ["RANK"] == "3":
            time.sleep(1)
        inner(each)
    trainer._check_weights = check

SPOIL = {"full": full, "own_metric": own_metric, "never_saves": never_saves}

def begins(module, inputs):
    # In every worker, at the rehearsal before its first step; the trainer is who has called.
    frame = sys._getframe(1)
    while frame is not None and type(frame.f_locals.get("self")).__name__ != "Trainer":
        frame = frame.f_back
    if frame is not None:
        SPOIL.pop(os.environ["SPOIL_OF_THIS_TEST"], lambda _: None)(type(frame.f_locals["self"]))

if re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):
    from torch.nn.modules.module import register_module_forward_pre_hook
    register_module_forward_pre_hook(begins)
"""


def on_two_nodes(tmp_path: Path, *, nproc: int = 1, **sections: Any) -> Path:
    recipe = tiny(resources={"nproc_per_node": nproc, "threads": 1}, **sections)
    path = tmp_path / "saves.yaml"
    path.write_text(json.dumps(recipe))
    return path


def spoiled(launch: Launch, tmp_path: Path, how: str, path: Path) -> Launched:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return launch(path, "--nodes", "2", env={"PYTHONPATH": str(tmp_path), "SPOIL_OF_THIS_TEST": how})


def test_a_save_that_fails_on_the_other_node_ends_the_run_and_names_its_step(launch: Launch, tmp_path: Path) -> None:
    """F083: the second one; the first one is still there."""
    path = on_two_nodes(tmp_path, train={"until": "60 steps", "eval_every": None}, checkpoint={"every": "10 steps"})
    run = spoiled(launch, tmp_path, "full", path)
    assert run.wait() == 1, run.text
    result = run.result
    assert (result["state"], result["cause"], result["attempts"]) == ("FAILED", "disk", 1), run.text
    assert "step-20 could not be written to" in result["first_failure"]["message"]
    assert "rank 1: [Errno 28] No space left on device" in result["first_failure"]["message"]
    assert [event["step"] for event in run.happened("save_failed")] == [20]
    assert complete(run.run.checkpoints) == ["step-10"]
    verify(run.run.checkpoints / "step-10")


def test_fifty_saves_one_behind_the_other_are_all_complete_also_the_one_at_the_exit(
    launch: Launch, tmp_path: Path
) -> None:
    """F083."""
    path = on_two_nodes(
        tmp_path, train={"until": "50 steps", "eval_every": None}, checkpoint={"every": "1 steps", "keep": 3}
    )
    run = launch(path, "--nodes", "2")
    assert run.wait() == 0, run.text
    assert [event["step"] for event in run.happened("checkpoint_saved")] == list(range(1, 51))
    assert complete(run.run.checkpoints) == ["step-48", "step-49", "step-50"]
    for name in complete(run.run.checkpoints):
        verify(run.run.checkpoints / name)
    assert run.result["checkpoint"]["latest"] == 50


def test_a_metric_that_each_of_four_ranks_sees_otherwise_stops_no_save(launch: Launch, tmp_path: Path) -> None:
    """F017: which one is the best is decided once."""
    path = on_two_nodes(
        tmp_path,
        nproc=2,
        train={"until": "30 steps", "eval_every": "5 steps"},
        checkpoint={"every": "10 steps", "best": "eval/accuracy max"},
    )
    run = spoiled(launch, tmp_path, "own_metric", path)
    assert run.wait() == 0, run.text
    assert [event["step"] for event in run.happened("checkpoint_saved")] == [10, 20, 30]
    assert run.result["checkpoint"]["latest"] == 30


def test_a_rank_that_never_comes_to_a_save_is_named(launch: Launch, tmp_path: Path) -> None:
    """F017: within the timeout of the recipe."""
    path = on_two_nodes(
        tmp_path,
        nproc=2,
        train={"until": "30 steps", "eval_every": None},
        checkpoint={"every": "10 steps"},
        network={"timeout": "3s"},
        faults={"max_restarts": 0},
    )
    run = spoiled(launch, tmp_path, "never_saves", path)
    assert run.wait() == 1, run.text
    assert run.result["cause"] == "hang"
    assert "still running then: rank 3 on node 1" in run.result["first_failure"]["message"]
    (ended,) = run.happened("attempt_ended")
    (started,) = run.happened("training_started")
    assert ended["time"] - started["time"] < 3.0 + 10.0
    assert complete(run.run.checkpoints) == []


@pytest.mark.parametrize("how", ["cut off", pytest.param("zeroed", marks=pytest.mark.long)])
def test_the_newest_checkpoint_is_broken_and_the_one_before_is_gone_on_from(
    launch: Launch, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, how: str
) -> None:
    """F009: of one that a stop has written, the part of the other node."""
    path = on_two_nodes(
        tmp_path, train={"until": "80 steps", "eval_every": None}, checkpoint={"every": "10 steps", "keep": 3}
    )
    run = launch(path, "--nodes", "2", env={**criteria.install(tmp_path), "TEST_STEP_S": "0.05"})
    run.wait_for_event("checkpoint_saved", step=20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    *_, before, newest = complete(run.run.checkpoints)
    victim = run.run.checkpoints / newest / "rank-1.safetensors"
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2] if how == "cut off" else bytes(len(content)))
    resumed = command("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumes from {before}; {newest} is broken: rank-1.safetensors " in resumed.stdout
    started = run.happened("training_started")[-1]
    assert started["resumed_from"] == before
    assert [each["name"] for each in started["rejected"]] == [newest]
    assert run.result["checkpoint"]["latest"] == 80
    assert run.result["checkpoint"]["verified"]
