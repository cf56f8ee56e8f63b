"""Every strategy: the curve of one rank, the same bits after a kill, checkpoints that go from one to another."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from jobs import registry
from jobs.folders import read_state
from jobs.optim import adamw
from jobs.state import TrainingState
from jobs.weights import weights_sha256
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

MLP = {"name": "mlp", "in_features": 20, "hidden": 12, "classes": 4, "dropout": 0.0}
GPT = {"name": "gpt", "vocabulary": 9, "context": 6, "layers": 2, "heads": 2, "width": 8}
NUMBERS = {"name": "synthetic", "samples": 73, "eval_samples": 9, "shape": "20", "classes": 4}
TOKENS = {"name": "synthetic", "kind": "tokens", "samples": 73, "eval_samples": 9, "shape": "6", "classes": 9}
STEPS = 12
"""Of 16 samples; each fifth step has 9, so with 8 micro-batches a rank has none for one of them."""
CLOSE = 1e-5

Case = tuple[dict[str, Any], int, int, dict[str, Any]]
"""The section, ranks, accumulate, and the model."""
CASES: dict[str, Case] = {
    "single-2": ({"strategy": "single"}, 1, 2, MLP),
    "ddp": ({"strategy": "ddp"}, 2, 1, MLP),
    "ddp-4": ({"strategy": "ddp"}, 2, 4, MLP),
    "ddp-static": ({"strategy": "ddp", "static_graph": True, "bucket_cap_mb": 1}, 2, 2, MLP),
    "ddp-unused": ({"strategy": "ddp", "find_unused_parameters": True}, 2, 1, MLP),
    "data_parallel": ({"strategy": "data_parallel"}, 1, 1, MLP),
    "split": ({"strategy": "split", "devices": 2}, 1, 1, GPT),
    "fsdp": ({"strategy": "fsdp"}, 2, 1, MLP),
    "fsdp-8": ({"strategy": "fsdp", "sync_each_batch": True}, 2, 8, MLP),
    "tp": ({"strategy": "ddp", "tp": 2}, 2, 1, MLP),
    "tp-4": ({"strategy": "ddp", "tp": 2}, 2, 4, GPT),
    "pp": ({"strategy": "ddp", "pp": 2}, 2, 4, GPT),
    "pp-gpipe": ({"strategy": "ddp", "pp": 2, "pipeline": "gpipe"}, 2, 2, MLP),
    "hsdp": ({"strategy": "hsdp", "dp": 2}, 4, 1, MLP),
    "hsdp-1": ({"strategy": "hsdp", "fsdp": 1}, 2, 1, MLP),
    "fsdp-tp": ({"strategy": "fsdp", "fsdp": 2, "tp": 2}, 4, 2, GPT),
    "ddp-pp": ({"strategy": "ddp", "dp": 2, "pp": 2}, 4, 2, MLP),
}
LONG_CASES: dict[str, Case] = {
    "fsdp-uneven": ({"strategy": "fsdp", "reshard_after_forward": False}, 4, 1, GPT),
    "ddp-tp": ({"strategy": "ddp", "dp": 2, "tp": 2}, 4, 1, MLP),
    "fsdp-pp": ({"strategy": "fsdp", "fsdp": 2, "pp": 2}, 4, 2, GPT),
    "ddp-tp-pp": ({"strategy": "ddp", "dp": 2, "tp": 2, "pp": 2}, 8, 2, GPT),
}
"""One of the four ranks of `fsdp-uneven` has nothing of the last layer: 9 rows, three by three."""
ALL_CASES = {**CASES, **LONG_CASES}


def with_long(names: Iterable[str], long: Iterable[str]) -> list[Any]:
    return [*names, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


def recipe(parallelism: dict[str, Any], accumulate: int, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    made = tiny(
        data={**(TOKENS if model is GPT else NUMBERS), "global_batch_size": 16},
        train={"until": f"{STEPS} steps", "eval_every": None, "accumulate": accumulate, **train},
        checkpoint={"every": "5 steps"},
        parallelism=parallelism,
    )
    return {**made, "model": model}


def losses(ranks: Ranks) -> list[float]:
    return [record["train/loss"] for record in read_metrics(ranks.metrics)]


def evaluated(ranks: Ranks) -> dict[str, float]:
    metrics: dict[str, float] = ranks.event("summary")["metrics"]
    return metrics


NORMED = """
from torch import nn
from jobs.registry import model

@model("normed")
def normed():
    return nn.Sequential(
        nn.Linear(20, 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4),
    )
"""


NO_PICKLE = """
import torch.distributed as dist

def refuse(*args, **kwargs):
    raise AssertionError("a pickle would travel between two stages")

dist.send_object_list = dist.recv_object_list = refuse
"""


_REFERENCES: dict[str, tuple[list[float], dict[str, float]]] = {}


def of_one_rank(start: Start, tmp_path: Path, model: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Losses and the evaluation, from `single`."""
    name = model["name"]
    if name not in _REFERENCES:
        ranks = start(tmp_path / "single", recipe({"strategy": "single"}, 1, model), ranks=1)
        assert ranks.wait() == [0], ranks.log()
        _REFERENCES[name] = losses(ranks), evaluated(ranks)
    return _REFERENCES[name]


@pytest.mark.parametrize("name", with_long(CASES, LONG_CASES))
def test_the_curve_is_that_of_one_rank(start: Start, tmp_path: Path, name: str) -> None:
    parallelism, world, accumulate, model = ALL_CASES[name]
    expected, metrics = of_one_rank(start, tmp_path, model)
    (tmp_path / "no_pickle.py").write_text(NO_PICKLE)
    load = [str(tmp_path / "no_pickle.py")]
    ranks = start(tmp_path / "run", recipe(parallelism, accumulate, model), ranks=world, load=load)
    assert ranks.wait() == [0] * world, "\n".join(ranks.log(rank) for rank in range(world))
    assert losses(ranks) == pytest.approx(expected, abs=CLOSE)
    assert evaluated(ranks) == pytest.approx(metrics, abs=CLOSE)
    assert weights_of_checkpoint(ranks, model) == ranks.weights


def weights_of_checkpoint(ranks: Ranks, model: dict[str, Any]) -> str:
    """The fingerprint of the newest checkpoint, read by one process."""
    net = registry.build("model", model["name"], {key: value for key, value in model.items() if key != "name"})
    state = TrainingState(net, adamw(net.parameters()))
    folder = ranks.run_dir / "checkpoints" / f"step-{ranks.event('summary')['step']}"
    state.restore(folder, read_state(folder)["optimizer"], None, alone=True)
    return weights_sha256(net)


@pytest.mark.parametrize("name", with_long(["fsdp", "tp", "pp"], ["hsdp", "fsdp-tp", "ddp-pp"]))
def test_killed_once_and_resumed_it_ends_with_the_same_bits(start: Start, tmp_path: Path, name: str) -> None:
    """Some models with a batch norm, whose statistics are those of one rank, and with dropout."""
    parallelism, world, accumulate, model = ALL_CASES[name]
    (tmp_path / "normed.py").write_text(NORMED)
    if model is MLP:
        model = {"name": "normed"}
    whole_recipe = recipe(parallelism, accumulate, model, until="18 steps", eval_every="8 steps")
    whole_recipe["checkpoint"] = {"every": "5 steps", "asynchronous": False}
    options: dict[str, Any] = {"ranks": world, "load": [str(tmp_path / "normed.py")]}
    whole = start(tmp_path / "whole", whole_recipe, **options)
    assert whole.wait() == [0] * world, whole.log()
    broken = start(tmp_path / "broken", whole_recipe, **options)
    broken.until_step(7)
    broken.signal(signal.SIGKILL)
    broken.wait()
    last = start(tmp_path / "broken", whole_recipe, attempt=2, **options)
    assert last.wait() == [0] * world, last.log()
    assert "resumes from step-" in last.log()
    assert last.weights == whole.weights
    assert losses(last) == losses(whole)


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "ddp-fp16": ("ddp", {"comm": "fp16"}, {}, 1e-3),
    "ddp-powersgd": ("ddp", {"comm": "powersgd", "powersgd_start": 3}, {}, 0.1),
    "fsdp in fp16": ("fsdp", {}, {"precision": "fp16", "clip_norm": 1.0}, 1e-2),
    "fsdp and bf16 layers": ("fsdp", {"gather": "bf16"}, {}, 1e-2),
    "tp in fp16": ("tp-4", {}, {"precision": "fp16"}, 1e-2),
    "pp in bf16": ("pp", {}, {"precision": "bf16", "activation_checkpointing": True}, 1e-2),
    "tp and sgd": ("tp-4", {}, {"optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9}}, 0.5),
}
"""The case, options of the strategy, of the training, and how far from the curve of one rank."""


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_strategy_and_of_the_step_go_together(start: Start, tmp_path: Path, name: str) -> None:
    case, options, train, distance = OPTIONS[name]
    parallelism, world, accumulate, model = CASES[case]
    expected, _ = of_one_rank(start, tmp_path, model)
    ranks = start(tmp_path / "run", recipe({**parallelism, **options}, accumulate, model, **train), ranks=world)
    assert ranks.wait() == [0] * world, "\n".join(ranks.log(rank) for rank in range(world))
    assert losses(ranks) == pytest.approx(expected, abs=distance)
    assert losses(ranks) != pytest.approx(expected, abs=1e-7), "the option had an effect"
    said = "ends with other bits" in ranks.log()
    assert said == ("powersgd" in name)


def test_a_checkpoint_goes_from_any_strategy_to_any_other(start: Start, tmp_path: Path) -> None:
    expected, metrics = of_one_rank(start, tmp_path, GPT)
    way = ["fsdp", "ddp", "tp", "single-2", "pp", "fsdp-tp"]
    for attempt, name in enumerate(way, start=1):
        parallelism, world, accumulate, _ = ALL_CASES[name]
        steps = STEPS * attempt // len(way)
        ranks = start(
            tmp_path / "run",
            recipe(parallelism, accumulate, GPT, until=f"{steps} steps"),
            ranks=world,
            attempt=attempt,
        )
        assert ranks.wait() == [0] * world, f"{name}: {ranks.log()}"
        assert weights_of_checkpoint(ranks, GPT) == ranks.weights, name
    assert losses(ranks) == pytest.approx(expected, abs=CLOSE)
    assert evaluated(ranks) == pytest.approx(metrics, abs=CLOSE)
