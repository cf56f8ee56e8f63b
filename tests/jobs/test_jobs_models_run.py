"""Models, data sets and tasks together, trained by real ranks: killed once, they end with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, Start
from tiny import tiny

from jobs.data.cifar10 import HELD_OUT, TRAIN
from jobs.folders import complete
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process


def whole_and_broken(start: Start, folder: Path, recipe: dict[str, Any], **options: Any) -> Ranks:
    """The ranks of a run that was killed in the middle and resumed; it has ended as one that was left alone."""
    whole = start(folder / "whole", recipe, **options)
    assert set(whole.wait()) == {0}, whole.log()
    broken = start(folder / "broken", recipe, **options)
    broken.until(lambda: bool(complete(broken.run_dir / "checkpoints")))
    broken.signal(signal.SIGKILL)
    broken.wait()
    last = start(folder / "broken", recipe, attempt=2, **options)
    assert set(last.wait()) == {0}, last.log()
    assert "resumes from step-" in last.log()
    assert last.weights == whole.weights
    return whole


def last_metrics(ranks: Ranks) -> dict[str, Any]:
    return {key: value for record in read_metrics(ranks.metrics) for key, value in record.items()}


def test_a_gpt_learns_a_text_that_two_nodes_prepare_once(start: Start, tmp_path: Path) -> None:
    """F006."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    recipe = tiny(
        model={"name": "gpt", "layers": 1, "heads": 2, "width": 32, "context": 16, "dropout": 0.1},
        train={"until": "60 steps", "eval_every": "30 steps"},
        checkpoint={"every": "10 steps"},
    )
    del recipe["model"]["in_features"], recipe["model"]["hidden"], recipe["model"]["classes"]
    recipe["data"] = {
        "name": "text",
        "path": str(tmp_path / "text.txt"),
        "cache": str(tmp_path / "cache"),
        "context": 16,
        "global_batch_size": 16,
    }
    whole = whole_and_broken(start, tmp_path, recipe, local_size=1)
    logs = [whole.log(rank) for rank in range(2)]
    assert sum("4,501 tokens, in" in log for log in logs) == 1, logs
    assert " tokens/s" in logs[0]
    metrics = last_metrics(whole)
    assert metrics["eval/loss"] < 3
    assert metrics["eval/perplexity"] == pytest.approx(np.exp(metrics["eval/loss"]))
    assert metrics["tokens_per_s"] == pytest.approx(16 * metrics["samples_per_s"], rel=0.05)


def test_a_resnet_sees_each_image_moved_and_mirrored_as_before(start: Start, tmp_path: Path) -> None:
    """Augmentation in loader processes, batch norm and its buffers."""
    (tmp_path / "cifar").mkdir()
    generator = np.random.default_rng(0)
    for name in TRAIN + HELD_OUT:
        rows = generator.integers(0, 256, (12, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(tmp_path / "cifar" / name)
    recipe = tiny(train={"until": "30 steps", "eval_every": None}, checkpoint={"every": "5 steps"})
    recipe["model"] = {"name": "resnet18", "channels": 4}
    recipe["data"] = {
        "name": "cifar10",
        "root": str(tmp_path / "cifar"),
        "crop": 4,
        "flip": True,
        "loader_workers": 1,
        "global_batch_size": 8,
    }
    whole_and_broken(start, tmp_path, recipe)


def test_functions_of_the_user_make_model_and_data(start: Start, tmp_path: Path) -> None:
    """And what the data says that it is for is the task."""
    source = tmp_path / "code" / "mine_of_test"
    source.mkdir(parents=True)
    (source / "parts.py").write_text(
        "from torch import nn\n"
        "from jobs.data.synthetic import synthetic\n"
        "def net(*, width: int):\n"
        "    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))\n"
        "def data(*, count: int):\n"
        "    return synthetic(kind='regression', samples=count, eval_samples=10, shape='20', classes=2)\n"
        "def nothing():\n"
        "    return None\n"
    )
    recipe = tiny(train={"until": "30 steps"})
    recipe["model"] = {"target": "mine_of_test.parts:net", "width": 8}
    recipe["data"] = {"target": "mine_of_test.parts:data", "count": 64, "global_batch_size": 16}
    ranks = start(tmp_path / "run", recipe, path=[str(tmp_path / "code")])
    assert ranks.wait() == [0, 0], ranks.log()
    assert {"eval/loss", "eval/rmse", "eval/mae"} <= last_metrics(ranks).keys()

    recipe["model"] = {"target": "mine_of_test.parts:nothing"}
    ranks = start(tmp_path / "wrong", recipe, path=[str(tmp_path / "code")])
    assert 0 not in ranks.wait()
    assert "model.target: mine_of_test.parts:nothing returns a NoneType, and no nn.Module" in ranks.log()
