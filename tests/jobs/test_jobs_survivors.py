"""Ranks that outlive another one: all of them notice, and what each keeps is the newest step, bit by bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import HOOKS, Kill, completed, environment, has_happened
from ranks import Ranks, Start
from survivors import Agent
from tiny import tiny
from torch import Tensor

from jobs.folders import complete, read_state
from jobs.manifest import verify
from jobs.state import open_tensors, read_tensors
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

NORMED = """
from torch import nn
from jobs.registry import model

@model("normed")
def normed():
    hidden = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(20, 16), *hidden, nn.Linear(16, 4))
"""
NEVER_SAVED = """
import threading
import jobs.checkpoint
jobs.checkpoint.Checkpoints.write = lambda *_, **__: threading.Event().wait()
"""
STEPS = 24


def normed(ranks: int, **checkpoint: Any) -> dict[str, Any]:
    """Batch norms, dropout, AdamW; each rank has 6 samples of a batch. Of 5 ranks gradients travel in two buckets."""
    recipe = tiny(
        data={"global_batch_size": 6 * ranks},
        train={"until": f"{STEPS} steps", "eval_every": "6 steps", "schedule": {"name": "cosine", "warmup": "3 steps"}},
        checkpoint={"every": "20 steps", "keep": 100, **checkpoint},
    )
    recipe["model"] = {"name": "normed"}
    if ranks == 5:
        recipe["parallelism"] = {"strategy": "ddp", "bucket_cap_mb": 1}  # not its default: never in one row
    return recipe


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.close()


@pytest.fixture
def load(tmp_path: Path) -> list[str]:
    for name, text in (("normed.py", NORMED), ("hooks.py", HOOKS)):
        (tmp_path / name).write_text(text)
    return [str(tmp_path / "normed.py"), str(tmp_path / "hooks.py")]


@dataclass(frozen=True)
class Setting:
    """Where the ranks of a test run."""

    start: Start
    folder: Path
    agent: Agent
    load: list[str]

    def memory(self, node: int) -> Path:
        """Of one node; each rank is on a node of its own."""
        return self.folder / "memory" / f"node-{node}"

    def run(self, recipe: dict[str, Any], ranks: int, *, attempt: int = 1, kill: Kill | None = None) -> Ranks:
        """Start an attempt; with a kill, wait until the rank is dead."""
        places = {
            rank: {"LAUNCH_MEMORY_DIR": str(self.memory(rank)), "LAUNCH_NODE": str(rank)} for rank in range(ranks)
        }
        started = self.start(
            self.folder / "run",
            recipe,
            ranks=ranks,
            attempt=attempt,
            local_size=1,
            env={**self.agent.env, **environment([kill] if kill else [])},
            rank_env=places,
            load=[*self.load, *(self.agent.load if kill else [])],
        )
        if kill is not None:
            self.agent.meet(ranks)
            started.until(lambda: has_happened(self.folder / "run", 1) and is_dead(started.pids[kill.rank]))
        return started


@pytest.fixture
def setting(start: Start, tmp_path: Path, agent: Agent, load: list[str]) -> Setting:
    return Setting(start, tmp_path, agent, load)


def is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    reader = open_tensors(folder)
    into = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in reader.tensors.items()}
    read_tensors(reader, folder, into, None, alone=True)
    return into


def losses(ranks: Ranks) -> dict[int, tuple[str, ...]]:
    names = ("train/loss", "train/lr", "samples_seen", "eval/loss", "eval/accuracy")
    return {
        record["step"]: tuple(float(record[name]).hex() for name in names if name in record)
        for record in read_metrics(ranks.metrics)
    }


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (3, [Kill(1, "forward", 0), Kill(9, "half", 1), Kill(14, "bucket", 2)]),
        (5, [Kill(7, "updated", 0), Kill(11, "bucket", 3), Kill(19, "half", 2)]),
    ],
)
def test_all_survivors_notice_and_keep_the_newest_step_bit_by_bit(
    start: Start, tmp_path: Path, load: list[str], ranks: int, kills: list[Kill]
) -> None:
    """Of five ranks in a ring, two do not have the dead one for a neighbour, and would wait for it for ever."""
    whole = start(tmp_path / "whole", normed(ranks, every="1 steps"), ranks=ranks, load=load)
    assert whole.wait() == [0] * ranks, whole.log()
    for number, kill in enumerate(kills):
        (folder := tmp_path / f"kill-{number}").mkdir()
        setting = Setting(start, folder, Agent(folder), load)
        killed = setting.run(normed(ranks), ranks, kill=kill)
        survivors = [rank for rank in range(ranks) if rank != kill.rank]
        held = setting.agent.report(survivors)
        newest = completed(killed.run_dir, 1, killed=kill.rank, begin=0)
        assert max(step or 0 for step in held.values()) == newest
        for rank in survivors:
            killed.until(lambda rank=rank, killed=killed: "waiting for the agent" in killed.log(rank))
        keep_and_compare(setting, held, whole)
        killed.signal(signal.SIGKILL, *survivors)
        setting.agent.close()
    again = setting.run(normed(ranks), ranks, attempt=2)
    assert again.wait() == [0] * ranks, again.log()
    started = again.event("training_started")
    assert (started["step"], started["resumed_from"]) == (newest, f"step-{newest}")
    assert losses(again) == losses(whole)
    assert again.weights == whole.weights


def keep_and_compare(setting: Setting, held: dict[int, int | None], whole: Ranks) -> None:
    """Each has the state that a run had at that step which nobody disturbed."""
    for rank, step in held.items():
        if step is None:
            assert setting.agent.keep(rank, setting.memory(rank)) == {"not_kept": "there is no whole state"}
            continue
        name = setting.agent.keep(rank, setting.memory(rank))["kept"]
        assert name == f"step-{step}"
        verify(setting.memory(rank) / name)
        kept, expected = tensors(setting.memory(rank) / name), tensors(whole.run_dir / "checkpoints" / name)
        assert kept.keys() == expected.keys()
        assert [key for key in kept if not torch.equal(kept[key], expected[key])] == []


def test_what_is_broken_in_memory_is_named_and_the_next_newest_is_used(setting: Setting) -> None:
    killed = setting.run(normed(3, every="4 steps"), 3, kill=Kill(11, "half", 1))
    assert setting.agent.report([0, 2]) == {0: 11, 2: 11}
    assert setting.agent.keep(2, setting.memory(2)) == {"kept": "step-11"}
    killed.signal(signal.SIGKILL, 0, 2)
    killed.wait()
    [file] = setting.memory(2).glob("step-11/rank-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)
    again = setting.run(normed(3, every="4 steps"), 3, attempt=2)
    assert again.wait() == [0, 0, 0], again.log()
    newest = again.event("training_started")["resumed_from"]
    assert newest in ("step-4", "step-8")
    said = again.log().splitlines()[0]
    assert said.startswith(f"resumes from {newest}; ")
    assert f"; step-11 in the memory of node 2 is broken: {file.name} has the hash " in said
    assert not list(setting.memory(2).iterdir()), "it is of no use any more"


def test_what_is_newer_on_disk_wins_and_memory_is_given_back_with_the_next_save(setting: Setting) -> None:
    (setting.folder / "flush.py").write_text("import jobs.metrics\njobs.metrics.FLUSH_S = 0.0\n")
    first = replace(setting, load=[*setting.load, str(setting.folder / "flush.py")])
    killed = first.run(normed(3), 3, kill=Kill(11, "half", 1))
    assert setting.agent.report([0, 2]) == {0: 11, 2: 11}
    assert setting.agent.keep(0, setting.memory(0)) == {"kept": "step-11"}
    assert setting.agent.keep(2, setting.memory(2)) == {"kept": "step-11"}
    lines = read_state(setting.memory(2) / "step-11")["lines"]
    assert [line["step"] for line in lines] == [11], "rank 0 has told that the others are in the file"
    killed.signal(signal.SIGKILL, 0, 2)
    killed.wait()
    again = setting.run(normed(3), 3, attempt=2)
    assert again.wait() == [0, 0, 0], again.log()
    assert "resumes from step-11, kept in the memory of node 0 (rank 0)" in again.log()
    assert complete(again.run_dir / "checkpoints") == ["step-20", "step-24"]
    assert [list(setting.memory(node).iterdir()) for node in (0, 2)] == [[], []]


def test_a_save_that_was_due_and_died_with_its_attempt_is_made_up_for(setting: Setting) -> None:
    (setting.folder / "never.py").write_text(NEVER_SAVED)
    first = replace(setting, load=[*setting.load, str(setting.folder / "never.py")])
    killed = first.run(normed(3, every="10 steps"), 3, kill=Kill(13, "half", 1))
    assert setting.agent.report([0, 2]) == {0: 13, 2: 13}
    assert setting.agent.keep(2, setting.memory(2)) == {"kept": "step-13"}
    killed.signal(signal.SIGKILL, 0, 2)
    killed.wait()
    assert complete(killed.run_dir / "checkpoints") == []
    again = setting.run(normed(3, every="10 steps"), 3, attempt=2)
    assert again.wait() == [0, 0, 0], again.log()
    assert complete(again.run_dir / "checkpoints") == ["step-13", "step-20", "step-24"]


def test_a_state_in_memory_goes_on_with_fewer_ranks(setting: Setting) -> None:
    """The batch and the schedule stay, the micro-batch does not grow; the sums are made in another order."""
    recipe = tiny(
        model={"dropout": 0},
        data={"global_batch_size": 18},
        train={"until": f"{STEPS} steps", "eval_every": "6 steps"},
        checkpoint={"every": "20 steps"},
    )
    whole = setting.start(setting.folder / "whole", recipe, ranks=3)
    assert whole.wait() == [0, 0, 0], whole.log()
    killed = setting.run(recipe, 3, kill=Kill(10, "bucket", 2))
    held = setting.agent.report(
        [0, 1]
    )  # one may be a step behind the other: it was still to hear of the dead one's part
    step, rank = max((step or 0, rank) for rank, step in held.items())
    assert setting.agent.keep(rank, setting.memory(rank)) == {"kept": f"step-{step}"}
    killed.signal(signal.SIGKILL, 0, 1)
    killed.wait()
    again = setting.run(recipe, 2, attempt=2)
    assert again.wait() == [0, 0], again.log()
    assert "ranks 3 -> 2: accumulate 1 -> 3, micro-batch 6 -> 3; global batch 18 -> 18" in again.log()
    assert read_state(again.run_dir / "checkpoints" / f"step-{STEPS}")["world_size"] == 2
    both = [[record["train/loss"] for record in read_metrics(ranks.metrics)] for ranks in (whole, again)]
    assert both[1] == pytest.approx(both[0], rel=1e-5)
    seen = [[record["samples_seen"] for record in read_metrics(ranks.metrics)] for ranks in (whole, again)]
    assert seen[0] == seen[1]
