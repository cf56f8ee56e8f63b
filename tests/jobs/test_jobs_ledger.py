"""Which samples were trained on, step by step, as the network saw them: through kills, on other numbers of ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from outermost import OUTERMOST
from ranks import Ranks, Start
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SAMPLES, BATCH, EPOCHS = 90, 16, 2
PER_EPOCH = math.ceil(SAMPLES / BATCH)

LEDGER = f"""
import json, os, signal, torch
import jobs.gradients
from jobs.data.base import Data
from jobs.registry import dataset

class Numbered:
    # The first number of a sample says which one it is.
    def __len__(self): return {SAMPLES}
    def __getitem__(self, index):
        sample = torch.randn(20, generator=torch.Generator().manual_seed(index))
        sample[0] = index
        return sample, torch.tensor(index % 4)

class Source:
    def prepare(self): ...
    def load(self): return Data(Numbered())

@dataset("numbered")
def numbered(): return Source()

now = {{"step": None}}
inner = jobs.gradients.Gradients.make

def update(gradients, share, step):
    now["step"] = step + 1
    if now["step"] == int(os.environ.get("KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(gradients, share, step)
    now["step"] = None
    return result

jobs.gradients.Gradients.make = update

def saw(module, inputs):
    if now["step"] is not None and outermost():
        samples = inputs[0][:, 0].tolist()
        line = {{"attempt": int(os.environ["LAUNCH_ATTEMPT"]), "step": now["step"], "samples": samples}}
        with open(os.environ["LAUNCH_RUN_DIR"] + "/ledger-" + os.environ["RANK"], "a") as ledger:
            ledger.write(json.dumps(line) + "\\n")

from torch.nn.modules.module import register_module_forward_pre_hook
register_module_forward_pre_hook(saw)
"""


@pytest.fixture
def ledger(tmp_path: Path) -> list[str]:
    path = tmp_path / "ledger.py"
    path.write_text(OUTERMOST + LEDGER)
    return [str(path)]


def numbered(*, every: int = 1, loader_workers: int = 0, **train: Any) -> dict[str, Any]:
    recipe = tiny(
        train={
            "until": f"{EPOCHS} epochs",
            "schedule": {"name": "cosine", "warmup": "3 steps"},
            "eval_every": None,
            **train,
        },
        checkpoint={"every": f"{every} steps", "asynchronous": False},  # so that it is known from where a kill resumes
    )
    recipe["data"] = {"name": "numbered", "global_batch_size": BATCH, "loader_workers": loader_workers}
    return recipe


def read_ledger(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """By step: the micro-batches of all ranks, in the newest attempt that made the step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for path in run_dir.glob("ledger-*"):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).append(line)
    return {
        step: [line for line in lines if line["attempt"] == max(each["attempt"] for each in lines)]
        for step, lines in steps.items()
    }


def batches(run_dir: Path) -> dict[int, list[float]]:
    """By step: the samples of the batch."""
    return {
        step: sorted(sample for line in lines for sample in line["samples"])
        for step, lines in read_ledger(run_dir).items()
    }


def check_epochs(run_dir: Path) -> None:
    """Each sample exactly once per epoch."""
    found = batches(run_dir)
    assert sorted(found) == list(range(1, EPOCHS * PER_EPOCH + 1))
    for epoch in range(EPOCHS):
        steps = range(epoch * PER_EPOCH + 1, (epoch + 1) * PER_EPOCH + 1)
        assert Counter(sample for step in steps for sample in found[step]) == Counter(range(SAMPLES)), epoch


def rates(ranks: Ranks) -> dict[int, tuple[float, int]]:
    return {record["step"]: (record["train/lr"], record["samples_seen"]) for record in read_metrics(ranks.metrics)}


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_three_resumes_in_one_epoch_train_on_each_sample_once(
    start: Start, tmp_path: Path, ledger: list[str], loader_workers: int
) -> None:
    """F020."""
    recipe = numbered(every=2, loader_workers=loader_workers)
    for attempt, kill_at in enumerate((2, 4, 5), 1):
        killed = start(tmp_path / "run", recipe, attempt=attempt, load=ledger, rank_env={1: {"KILL_AT": str(kill_at)}})
        assert 137 in killed.wait()
    last = start(tmp_path / "run", recipe, attempt=4, load=ledger)
    assert last.wait() == [0, 0], last.log()
    assert last.event("training_started")["resumed_from"] == "step-4"
    check_epochs(last.run_dir)


def test_two_ranks_then_one_then_two_in_mid_epoch_train_as_two_do(
    start: Start, tmp_path: Path, ledger: list[str]
) -> None:
    """F070, F086: each sample once per epoch, the same batches and rates; no micro-batch grows."""
    recipe = numbered()
    whole = start(tmp_path / "whole", recipe, load=ledger)
    assert whole.wait() == [0, 0], whole.log()
    check_epochs(whole.run_dir)
    for attempt, (ranks, kill_at) in enumerate(((2, 3), (1, 5), (2, 0)), 1):
        last = start(
            tmp_path / "run", recipe, ranks=ranks, attempt=attempt, load=ledger, rank_env={0: {"KILL_AT": str(kill_at)}}
        )
        last.wait()
        if attempt == 2:
            assert "ranks 2 -> 1: accumulate 1 -> 2, micro-batch 8 -> 8; global batch 16 -> 16" in last.log()
    assert "ranks 1 -> 2: accumulate 2 -> 1, micro-batch 8 -> 8; global batch 16 -> 16" in last.log()
    started = last.event("training_started")
    assert (started["step"], started["world_size"], started["accumulate"]) == (4, 2, 1)
    check_epochs(last.run_dir)
    assert batches(last.run_dir) == batches(whole.run_dir)
    assert rates(last) == rates(whole)
    made = [line for lines in read_ledger(last.run_dir).values() for line in lines]
    assert {line["attempt"] for line in made} == {1, 2, 3}
    assert max(len(line["samples"]) for line in made) == BATCH // 2


def test_on_fewer_ranks_the_training_is_the_same(start: Start, tmp_path: Path, ledger: list[str]) -> None:
    """F070: from 4 ranks to 2: batch, rate and, but for the order of sums, loss; 3 are refused, with both numbers."""
    recipe = numbered(every=4)
    recipe["model"]["dropout"] = 0.0
    whole = start(tmp_path / "whole", recipe, ranks=4, load=ledger)
    assert set(whole.wait()) == {0}, whole.log()
    killed = start(tmp_path / "run", recipe, ranks=4, load=ledger, rank_env={3: {"KILL_AT": "6"}})
    killed.wait()
    odd = start(tmp_path / "run", recipe, ranks=3, attempt=2, load=ledger)
    assert set(odd.wait()) == {1}
    assert "16 does not divide by 3 (data-parallel ranks 3 x train.accumulate 1)" in odd.log()
    last = start(tmp_path / "run", recipe, ranks=2, attempt=3, load=ledger)
    assert last.wait() == [0, 0], last.log()
    assert "ranks 4 -> 2: accumulate 1 -> 2, micro-batch 4 -> 4" in last.log()
    assert batches(last.run_dir) == batches(whole.run_dir)
    assert rates(last) == rates(whole)
    losses = [[record["train/loss"] for record in read_metrics(ranks.metrics)] for ranks in (whole, last)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][:4] == losses[0][:4]


def test_a_checkpoint_of_four_ranks_is_the_same_on_any_number(start: Start, tmp_path: Path) -> None:
    """F086."""
    recipe = tiny(train={"until": "6 steps", "eval_every": None})
    first = start(tmp_path / "run", recipe, ranks=4)
    assert set(first.wait()) == {0}, first.log()
    files = {path.name for path in (first.run_dir / "checkpoints" / "step-6").glob("*.safetensors")}
    assert files == {f"rank-{rank}.safetensors" for rank in range(4)}, "each rank writes a part"
    for attempt, ranks in enumerate((2, 1, 8), 2):
        again = start(tmp_path / "run", recipe, ranks=ranks, attempt=attempt)
        assert set(again.wait()) == {0}, again.log()
        assert again.weights == first.weights
        assert again.event("training_started")["resumed_from"] == "step-6"
