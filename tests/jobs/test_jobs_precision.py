"""Fewer bits, and clipped gradients: the order of a step, what an overflow leaves behind, and exact resuming."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from jobs.folders import complete, read_state
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SCRIPTED = """
import json, os
import torch
from torch.distributed.tensor import DTensor
import jobs.clip, jobs.precision

INFS = set(json.loads(os.environ["INFS"]))
RANK = os.environ["RANK"]

def note(call):
    with open(os.environ["LAUNCH_RUN_DIR"] + "/calls-" + RANK, "a") as file:
        file.write(call + "\\n")

class Scripted(torch.amp.GradScaler):
    unscaled = 0
    def scale(self, loss):
        note("scale")
        return super().scale(loss)
    def unscale_(self, optimizer):
        note("unscale")
        super().unscale_(optimizer)
        self.unscaled += 1
        if self.unscaled in INFS:
            grads = [each.grad for group in optimizer.param_groups for each in group["params"]]
            parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            next(part for part in parts if part.numel()).view(-1)[0] = float("inf")
    def step(self, optimizer):
        note("step")
        return super().step(optimizer)
    def update(self, *args):
        note("update")
        super().update(*args)

inner = jobs.clip.GradientCheck.clip
def clip(check, norm, largest):
    note("clip")
    inner(check, norm, largest)

jobs.precision.GradScaler = Scripted
jobs.clip.GradientCheck.clip = clip
"""

OFTEN = """
import functools, torch, jobs.precision
jobs.precision.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**28, growth_interval=5)
"""
"""A scale with which numbers overflow of themselves, again and again."""


def recipe_of(precision: str, **train: Any) -> dict[str, Any]:
    recipe = tiny(checkpoint={"every": "10 steps", "keep": 9})
    recipe["train"] = {
        "until": "40 steps",
        "optimizer": {"name": "adamw", "lr": 0.01},
        "schedule": {"name": "linear"},
        "eval_every": None,
        "precision": precision,
        "clip_norm": 0.5,
        **train,
    }
    return recipe


def setting(folder: Path, text: str) -> list[str]:
    path = folder / "setting.py"
    path.write_text(text)
    return [str(path)]


def losses(ranks: Ranks) -> list[float]:
    return [record["train/loss"] for record in read_metrics(ranks.metrics)]


def norms(ranks: Ranks) -> list[float]:
    return [record["train/grad_norm"] for record in read_metrics(ranks.metrics) if "train/grad_norm" in record]


def skipped(ranks: Ranks) -> list[int]:
    return [event["step"] for event in read_events(ranks.run_dir) if event["event"] == "step_skipped"]


def test_f090_unscale_clip_step_update_and_a_schedule_of_the_steps_that_were_made(start: Start, tmp_path: Path) -> None:
    infs = [2, 3, 7]
    env = {"INFS": json.dumps(infs)}
    recipe = recipe_of("fp16", until="10 steps")
    ranks = start(tmp_path / "run", recipe, env=env, load=setting(tmp_path, SCRIPTED))
    assert ranks.wait() == [0, 0], ranks.log()
    for rank in range(2):
        calls = (ranks.run_dir / f"calls-{rank}").read_text().split()
        assert calls.pop(0) == "scale", "of the rehearsal"
        expected = [
            ["scale", "unscale", "update"] if step in infs else ["scale", "unscale", "clip", "step", "update"]
            for step in range(1, 11)
        ]
        assert calls == [call for step in expected for call in step]
    assert skipped(ranks) == infs
    lrs = [record["train/lr"] for record in read_metrics(ranks.metrics)]
    made = [sum(each not in infs for each in range(1, step)) for step in range(1, 11)]
    assert lrs == [pytest.approx(0.01 * (1 - done / 10)) for done in made]
    state = read_state(ranks.run_dir / "checkpoints" / complete(ranks.run_dir / "checkpoints")[-1])
    assert state["scaler"]["scale"] == 65536 / 8
    assert state["overflows"] == 3
    summary = ranks.event("summary")
    assert (summary["step"], summary["samples_seen"], summary["steps_skipped"]) == (10, 154, 3)
    assert "at scale 65,536: the step is skipped, the scale is halved" in ranks.log()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_killed_and_resumed_in_fewer_bits_ends_with_the_same_weights(
    start: Start, tmp_path: Path, precision: str
) -> None:
    """The scale, and how long it has not changed, are of the state; overflows come before and after the kill."""
    load = setting(tmp_path, OFTEN)
    recipe = recipe_of(precision, until="120 steps")
    whole = start(tmp_path / "whole", recipe, load=load)
    assert whole.wait() == [0, 0], whole.log()
    broken = start(tmp_path / "broken", recipe, load=load)
    broken.until((broken.run_dir / "checkpoints" / "step-40").exists)
    broken.signal(signal.SIGKILL)
    assert 0 not in broken.wait()
    last = start(tmp_path / "broken", recipe, attempt=2, load=load)
    assert last.wait() == [0, 0], last.log()
    resumed_from = last.event("training_started")["step"]
    assert resumed_from in range(40, 120, 10)
    assert last.weights == whole.weights
    assert losses(last) == losses(whole)
    overflows = skipped(whole)
    assert any(step <= resumed_from for step in overflows) == (precision == "fp16")
    assert any(step > resumed_from for step in overflows) == (precision == "fp16")
    assert last.event("summary")["steps_skipped"] == len(overflows)
    assert max(norms(whole)) > 0.5 > min(norms(whole)), "some are clipped and others are not"


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02), ("fp16", 0.005)])
def test_one_rank_and_two_have_the_same_curve(start: Start, tmp_path: Path, precision: str, tolerance: float) -> None:
    recipe = recipe_of(precision)
    recipe["model"]["dropout"] = 0.0
    recipe["data"]["samples"] = 96
    one, two = (start(tmp_path / f"ranks-{ranks}", recipe, ranks=ranks) for ranks in (1, 2))
    assert one.wait() == [0], one.log()
    assert two.wait() == [0, 0], two.log()
    assert losses(two) == pytest.approx(losses(one), abs=tolerance)


GPT = {"name": "gpt", "vocabulary": 11, "context": 6, "layers": 2, "heads": 2, "width": 8}
CUT: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "ddp", "tp": 2},
    "pp": {"strategy": "ddp", "pp": 2},
}


def cut(parallelism: dict[str, Any], precision: str = "fp32", **train: Any) -> dict[str, Any]:
    recipe = recipe_of(precision, until="12 steps", clip_norm=0.6, accumulate=2, **train)
    recipe["data"] = {"name": "synthetic", "kind": "tokens", "samples": 73, "eval_samples": 9, "shape": "6"}
    recipe["data"] |= {"classes": 11, "global_batch_size": 16}
    return {**recipe, "model": GPT, "parallelism": parallelism}


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, list[float]]:
    return {}


@pytest.mark.parametrize("name", CUT)
def test_the_norm_is_that_of_the_whole_model_whoever_holds_which_part(
    start: Start, tmp_path: Path, name: str, of_one_rank: dict[str, list[float]]
) -> None:
    """And blocks that are computed again are, where ranks hold different parts."""
    if not of_one_rank:
        one = start(tmp_path / "one", cut({"strategy": "single"}), ranks=1)
        assert one.wait() == [0], one.log()
        of_one_rank |= {"losses": losses(one), "norms": norms(one)}
        assert max(of_one_rank["norms"]) > 0.6
    ranks = start(tmp_path / name, cut(CUT[name], activation_checkpointing=True))
    assert ranks.wait() == [0, 0], ranks.log()
    assert norms(ranks) == pytest.approx(of_one_rank["norms"], rel=1e-4)
    assert losses(ranks) == pytest.approx(of_one_rank["losses"], abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_an_overflow_of_one_rank_is_one_of_all(start: Start, tmp_path: Path, name: str) -> None:
    recipe = cut(CUT[name], "fp16")
    env, rank_env = {"INFS": "[]"}, {1: {"INFS": "[3, 8]"}}
    ranks = start(tmp_path / name, recipe, env=env, rank_env=rank_env, load=setting(tmp_path, SCRIPTED))
    assert ranks.wait() == [0, 0], ranks.log()
    assert skipped(ranks) == [3, 8]
    assert "overflow at step 3: a gradient is not finite on another rank, at scale 65,536" in ranks.log()
    steps = [(ranks.run_dir / f"calls-{rank}").read_text().split().count("step") for rank in range(2)]
    assert steps == [10, 10]


def test_a_checkpoint_of_another_precision_is_an_error_that_says_both(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path / "run", recipe_of("fp16", until="10 steps"), ranks=1)
    assert first.wait() == [0], first.log()
    second = start(tmp_path / "run", recipe_of("bf16", until="20 steps"), ranks=1, attempt=2)
    assert second.wait() == [1]
    assert "train.precision: fp16 in the checkpoint, bf16 here" in second.log()


def test_gradients_that_overflow_without_a_scale_end_the_run_with_a_sentence(start: Start, tmp_path: Path) -> None:
    tiny_scale = "lambda device: Scripted(device, init_scale=2.0)"
    text = SCRIPTED.replace("GradScaler = Scripted", f"GradScaler = {tiny_scale}")
    env = {"INFS": json.dumps([3, 4])}
    ranks = start(tmp_path / "run", recipe_of("fp16"), env=env, load=setting(tmp_path, text))
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        line = ranks.log(rank).splitlines()[-1]
        assert line.startswith("FloatingPointError: overflow at step 4: the gradient of ")
        assert "at scale 1, which cannot be made smaller; try train.precision: bf16, or try a lower" in line
