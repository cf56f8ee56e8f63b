"""Layers that are computed again, compiled, or lie channels last, in a training that is killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

CONVNET = {"name": "convnet", "image_size": 14, "channels": 4, "hidden": 16, "classes": 4, "dropout": 0.1}
IMAGES = {"name": "synthetic", "samples": 90, "eval_samples": 33, "shape": "1x14x14", "classes": 4}


def recipe_of(steps: int, **train: Any) -> dict[str, Any]:
    recipe = tiny(checkpoint={"every": "10 steps", "keep": 9})
    recipe["model"], recipe["data"] = dict(CONVNET), {**IMAGES, "global_batch_size": 16}
    recipe["train"] = {"until": f"{steps} steps", "optimizer": {"name": "adamw", "lr": 0.01}, **train}
    return recipe


def losses(ranks: Ranks) -> list[float]:
    return [record["train/loss"] for record in read_metrics(ranks.metrics)]


def killed_and_resumed(start: Start, folder: Path, recipe: dict[str, Any]) -> Ranks:
    broken = start(folder, recipe)
    broken.until((folder / "checkpoints" / "step-20").exists)
    broken.signal(signal.SIGKILL)
    assert 0 not in broken.wait()
    last = start(folder, recipe, attempt=2)
    assert last.wait() == [0, 0], last.log()
    assert last.event("training_started")["step"] >= 20
    return last


def test_channels_last_and_computed_again_resume_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    """The optimizer's state lies as its parameters do, and is read back so."""
    plain = start(tmp_path / "plain", recipe_of(80))
    assert plain.wait() == [0, 0], plain.log()
    keys = {"channels_last": True, "activation_checkpointing": True, "deterministic": True}
    whole = start(tmp_path / "whole", recipe_of(80, **keys))
    assert whole.wait() == [0, 0], whole.log()
    last = killed_and_resumed(start, tmp_path / "broken", recipe_of(80, **keys))
    assert last.weights == whole.weights
    assert losses(last) == losses(whole)
    assert losses(whole) == pytest.approx(losses(plain), abs=1e-4)


def test_memory_is_in_the_metrics_and_the_summary(start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", recipe_of(12, log_every="5 steps"), ranks=1)
    assert ranks.wait() == [0], ranks.log()
    told = {record["step"]: record for record in read_metrics(ranks.metrics) if "memory/peak_bytes" in record}
    assert list(told) == [5, 10, 12]
    assert all(record["memory/peak_bytes"] >= record["memory/used_bytes"] > 50 << 20 for record in told.values())
    assert ranks.event("summary")["memory"]["peak_bytes"] >= told[12]["memory/used_bytes"]
    assert ranks.event("summary")["compiled"] is None


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_training_resumes_with_the_same_bits(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the resumed process meets the shapes in another order. In processes that were forked."""
    monkeypatch.setattr("ranks.WAIT_S", 280.0)  # on a slow machine, the first forward takes more than a minute
    whole = start(tmp_path / "whole", recipe_of(60, compile=True))
    assert whole.wait() == [0, 0], whole.log()
    last = killed_and_resumed(start, tmp_path / "broken", recipe_of(60, compile=True))
    assert last.weights == whole.weights
    assert losses(last) == losses(whole)
    compiled = whole.event("summary")["compiled"]
    assert compiled["graphs"] - compiled["recompiles"] >= 2, "the last batch of an epoch too, before the first step"
    assert compiled["recompiles"] >= 1, "the evaluation"
    assert compiled["time_s"] > 0


def test_without_a_compiler_no_step_is_made(start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", recipe_of(10, compile=True), ranks=1, env={"CXX": "no-such-compiler"})
    assert ranks.wait() == [1]
    assert "train.compile: true, and there is no C++ compiler (no-such-compiler) on this machine" in ranks.log()
    assert not ranks.metrics.exists()


def test_channels_last_goes_with_layers_that_are_shared_out(start: Start, tmp_path: Path) -> None:
    """Shards of FSDP2, and a stage of a pipeline."""
    plain = start(tmp_path / "plain", recipe_of(8, accumulate=2))
    assert plain.wait() == [0, 0], plain.log()
    for keys in ({"strategy": "fsdp"}, {"pp": 2}):
        recipe = {**recipe_of(8, channels_last=True, accumulate=2), "parallelism": keys}
        ranks = start(tmp_path / next(iter(keys)), recipe)
        assert ranks.wait() == [0, 0], ranks.log()
        # with stages the dropout draws from seeds of its own
        assert "pp" in keys or losses(ranks) == pytest.approx(losses(plain), abs=1e-4)


def test_a_batch_norm_with_one_sample_is_found_before_the_first_step(start: Start, tmp_path: Path) -> None:
    """17 samples in batches of 16; of the first step alone it is no matter."""
    recipe = recipe_of(8)
    recipe["model"] = {"name": "resnet18", "in_channels": 1, "channels": 4, "classes": 4, "small_images": False}
    recipe["data"] |= {"samples": 17}
    ranks = start(tmp_path / "run", recipe)
    assert ranks.wait() == [1, 1]
    assert not ranks.metrics.exists() or not losses(ranks)
    assert "a rank gets a micro-batch of one sample in the last batch of an epoch, which has 1, and" in ranks.log()
    whole = start(tmp_path / "first", {**recipe, "train": {**recipe["train"], "until": "1 steps"}})
    assert whole.wait() == [0, 0], whole.log()
