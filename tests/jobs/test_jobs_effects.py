"""That keys of a recipe have their effect in real ranks: where curves alone would not show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

pytestmark = pytest.mark.process

HOLDS = """
import json
from jobs.trainer import Trainer

inner = Trainer.run

def own(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def run(self, *, stop=False):
    done = inner(self, stop=stop)
    states = [value for state in self._parts.optimizer.state.values() for value in state.values()]
    held = {
        "model": sum(own(each).numel() for each in self._parts.net.parameters()),
        "optimizer": sum(own(each).numel() for each in states if each.dim()),
    }
    print("probe " + json.dumps(held), flush=True)
    return done

Trainer.run = run
"""

PROBE = """
import gc, json
import torch
import jobs.gradients, jobs.hygiene, jobs.layers

made, again, collected = jobs.gradients.Gradients.make, jobs.layers.checkpoint, jobs.hygiene.Garbage.collect
counts = {"again": 0, "collected": 0}

def checkpoint(*args, **kwargs):
    counts["again"] += 1
    return again(*args, **kwargs)

def collect(self, step, *, pauses):
    counts["collected"] += 1
    return collected(self, step, pauses=pauses)

def make(gradients, share, step):
    if step == 3:
        weights = [each for each in gradients._parts.net.parameters() if each.dim() == 4]
        print("probe " + json.dumps({
            **counts,
            "gc": gc.isenabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "channels_last": all(each.is_contiguous(memory_format=torch.channels_last) for each in weights),
            "threads": torch.get_num_threads(),
        }), flush=True)
    return made(gradients, share, step)

jobs.layers.checkpoint, jobs.hygiene.Garbage.collect, jobs.gradients.Gradients.make = checkpoint, collect, make
"""

GROWS = """
from dataclasses import replace
import jobs.memory_use

measure, looks = jobs.memory_use.measure_use, []

def grown(device):
    looks.append(0)
    return replace(measure(device), now=(100 + 10 * len(looks)) << 20)

jobs.memory_use.measure_use = grown
"""

ASIDE = """
import torch
from torch import nn
from jobs.registry import model

class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.seen = nn.Linear(20, 4), nn.Linear(20, 4), 0

    def forward(self, inputs):
        self.seen += self.training
        return self.one(inputs) if self.seen % 3 else self.other(inputs)

@model("aside")
def aside():
    return Aside()
"""

GPT = {"name": "gpt", "vocabulary": 9, "context": 6, "layers": 2, "heads": 2, "width": 8}
TOKENS = {"name": "synthetic", "kind": "tokens", "samples": 64, "eval_samples": 9, "shape": "6", "classes": 9}
CONVNET = {"name": "convnet", "image_size": 14, "channels": 4, "hidden": 16, "classes": 4, "dropout": 0.1}
IMAGES = {"name": "synthetic", "samples": 90, "eval_samples": 33, "shape": "1x14x14", "classes": 4}


def recipe(model: dict[str, Any], data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    train = {"until": "4 steps", "eval_every": None, **sections.pop("train", {})}
    made = tiny(data={**data, "global_batch_size": 16}, train=train, **sections)
    return {**made, "model": model}


def run(start: Start, folder: Path, made: dict[str, Any], script: str, *, ranks: int) -> tuple[Ranks, list[Any]]:
    """Train to the end; what each rank has printed."""
    folder.mkdir()
    (folder / "probe.py").write_text(script)
    group = start(folder / "run", made, ranks=ranks, load=[str(folder / "probe.py")])
    assert group.wait() == [0] * ranks, "\n".join(group.log(rank) for rank in range(ranks))
    lines = [line for rank in range(ranks) for line in group.log(rank).splitlines()]
    return group, [json.loads(line.removeprefix("probe ")) for line in lines if line.startswith("probe ")]


def test_each_rank_holds_its_part_of_model_and_optimizer(start: Start, tmp_path: Path) -> None:
    """The curves are those of one rank whoever holds what; this is what the strategies are for."""
    held: dict[str, list[dict[str, int]]] = {}
    for name, parallelism in {
        "ddp": {"strategy": "ddp"},
        "fsdp": {"strategy": "fsdp"},
        "tp": {"tp": 2},
        "pp": {"pp": 2},
    }.items():
        made = recipe(GPT, TOKENS, parallelism=parallelism, train={"accumulate": 2})
        _, held[name] = run(start, tmp_path / name, made, HOLDS, ranks=2)
    whole = held["ddp"][0]
    assert held["ddp"] == [whole, whole]
    assert whole["optimizer"] == 2 * whole["model"], "two moments"
    for name in ("fsdp", "pp"):
        assert sum(each["model"] for each in held[name]) == whole["model"], name
        assert sum(each["optimizer"] for each in held[name]) == whole["optimizer"], name
    assert all(each["model"] < 0.6 * whole["model"] for each in held["fsdp"])
    for each in held["tp"]:
        assert 0.5 * whole["model"] < each["model"] < 0.7 * whole["model"]
        assert each["optimizer"] == 2 * each["model"]


def test_keys_of_the_step_are_in_force(start: Start, tmp_path: Path) -> None:
    keys = {"activation_checkpointing": True, "channels_last": True, "deterministic": True}
    _, (plain,) = run(start, tmp_path / "plain", recipe(CONVNET, IMAGES), PROBE, ranks=1)
    _, (found,) = run(start, tmp_path / "keys", recipe(CONVNET, IMAGES, train=keys), PROBE, ranks=1)
    assert plain == {**plain, "again": 0, "gc": False, "deterministic": False, "channels_last": False, "threads": 1}
    assert found == {**plain, "again": found["again"], "deterministic": True, "channels_last": True}
    assert found["again"] >= 3, "with each of the steps before"
    assert plain["collected"] >= 3, "between steps"


def test_memory_that_grows_with_every_step_is_reported_once(start: Start, tmp_path: Path) -> None:
    made = recipe(CONVNET, IMAGES, train={"until": "20 steps", "log_every": "1 steps"})
    group, _ = run(start, tmp_path / "grows", made, GROWS, ranks=1)
    event = group.event("memory_grows")
    assert (event["from_step"], event["to_step"]) == (1, 12)
    assert event["to_bytes"] - event["from_bytes"] == 110 << 20
    assert group.log().count("memory grows steadily: 110.0 MiB at step 1, 220.0 MiB at step 12, 10.0 MiB per step") == 1


def test_layers_that_a_forward_leaves_out_are_allowed_where_the_recipe_says_so(start: Start, tmp_path: Path) -> None:
    data = {"name": "synthetic", "samples": 90, "eval_samples": 33, "shape": "20", "classes": 4}
    made = recipe({"name": "aside"}, data, parallelism={"strategy": "ddp", "find_unused_parameters": True})
    group, _ = run(start, tmp_path / "aside", made, ASIDE, ranks=2)
    assert group.event("summary")["step"] == 4
