"""`jobs.evaluate` and `jobs.export`: what is done with the checkpoints of a training, by one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, Start
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny

from jobs.folders import complete, progress_of
from jobs.weights import sha256_of
from launcher.recipe.schema import Recipe

pytestmark = pytest.mark.process

RECIPE = tiny(train={"until": "40 steps", "eval_every": "20 steps"}, parallelism={"strategy": "ddp"})


def trained(start: Start, run_dir: Path, recipe: dict[str, Any]) -> Ranks:
    ranks = start(run_dir, recipe)
    assert ranks.wait() == [0, 0], ranks.log()
    return ranks


def ask(module: str, order: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", module]
    return subprocess.run(argv, input=json.dumps(order), capture_output=True, text=True, check=False, timeout=120)


def order_of(ranks: Ranks, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    resolved = Recipe.model_validate(recipe).model_dump(mode="json", by_alias=True)
    folder = str(ranks.run_dir / "checkpoints" / name)
    return {"checkpoint": folder, "recipe": resolved, "threads": 1}


def test_an_evaluation_by_itself_finds_what_the_training_found(start: Start, tmp_path: Path) -> None:
    ranks = trained(start, tmp_path / "run", RECIPE)
    checkpoints = ranks.run_dir / "checkpoints"
    assert complete(checkpoints) == ["step-20", "step-40"]
    for name in complete(checkpoints):
        done = ask("jobs.evaluate", order_of(ranks, name, RECIPE))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["metrics"] == found["recorded"] == progress_of(checkpoints / name).metrics
        assert (found["step"], found["samples"], found["device"]) == (int(name[5:]), 33, "cpu")
    single = {**RECIPE, "parallelism": {"strategy": "single"}}  # as the run would go on from here
    done = ask("jobs.evaluate", order_of(ranks, "step-40", single))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == found["recorded"]
    other = ask("jobs.evaluate", order_of(ranks, "step-40", tiny(**{**RECIPE, "data": {"eval_samples": 7}})))
    assert json.loads(other.stdout)["samples"] == 7
    wider = ask("jobs.evaluate", order_of(ranks, "step-40", tiny(**{**RECIPE, "data": {"shape": "21", "classes": 9}})))
    assert (wider.returncode, wider.stdout) == (1, "")
    assert wider.stderr.startswith(
        "launch: model.in_features: 20, and a sample of the data is 21; make it 21\nmodel.cl"
    )
    (checkpoints / "step-40" / "rank-0.safetensors").write_bytes(b"gone")
    broken = ask("jobs.evaluate", order_of(ranks, "step-40", RECIPE))
    assert (broken.returncode, broken.stdout) == (1, "")
    assert broken.stderr.startswith(f"launch: {checkpoints / 'step-40'}: rank-0.safetensors has 4 bytes instead of ")
    assert broken.stderr.endswith("; --step takes an older one\n")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_model_of_any_ranks_is_one_file_that_others_read(start: Start, tmp_path: Path, strategy: str) -> None:
    recipe = {**RECIPE, "parallelism": {"strategy": strategy}}
    ranks = trained(start, tmp_path / "run", recipe)
    file = tmp_path / "model.safetensors"
    order = {"checkpoint": str(ranks.run_dir / "checkpoints" / "step-40"), "file": str(file), "run_id": "r1"}
    done = ask("jobs.export", order)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    tensors = load_file(file)
    assert told["weights_sha256"] == sha256_of(sorted(tensors.items())) == ranks.weights
    assert (told["step"], told["tensors"], told["size_bytes"]) == (40, len(tensors), file.stat().st_size)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert about == {"format": "pt", "run_id": "r1", "step": "40", "weights_sha256": ranks.weights}
    from jobs.models.mlp import mlp

    net = mlp(in_features=20, hidden=16, classes=4, dropout=0.1)
    net.load_state_dict(tensors)
    assert net(torch.zeros(1, 1, 20)).shape == (1, 4)
