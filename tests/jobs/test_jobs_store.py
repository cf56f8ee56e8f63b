"""Ranks whose run directories are on disks of their own: checkpoints whole on two of them, and sent where one is lost.

Two disks are two folders here; who sees which is what the ranks find out themselves. The same on machines without a
shared folder: tests/faults/test_faults_store.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start, write_plan
from tiny import tiny

from jobs.folders import complete
from jobs.manifest import verify
from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "train": {"until": "30 steps", "eval_every": "10 steps"},
            "checkpoint": {"every": "10 steps", "keep": 2, "store": "replicate"},
            **sections,
        }
    )


def on_disks(start: Start, disks: list[Path], recipe: dict[str, Any], **more: Any) -> Ranks:
    """One rank, a node of its own, on each of these disks."""
    for disk in disks:
        write_plan(disk / "run", recipe, len(disks), grace_s=30.0)
    env = {rank: {"LAUNCH_RUN_DIR": str(disk / "run")} for rank, disk in enumerate(disks)}
    return start(disks[0] / "run", recipe, ranks=len(disks), local_size=1, rank_env=env, **more)


def disks_of(folder: Path, count: int = 2) -> list[Path]:
    """So many empty ones."""
    disks = [folder / f"disk{number}" for number in range(count)]
    for disk in disks:
        (disk / "run").mkdir(parents=True)
    return disks


def checkpoints(disk: Path) -> list[str]:
    """Names of those that are whole there, down to the last bit."""
    folder = disk / "run" / "checkpoints"
    for name in complete(folder):
        verify(folder / name)
    return complete(folder)


def contents(disk: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (disk / "run" / "checkpoints" / name).iterdir()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_is_whole_on_two_disks_and_each_copy_is_the_same(
    start: Start, tmp_path: Path, strategy: str
) -> None:
    disks = disks_of(tmp_path)
    ranks = on_disks(start, disks, recipe_of(parallelism={"strategy": strategy}))
    assert ranks.wait() == [0, 0], ranks.log()
    assert checkpoints(disks[0]) == checkpoints(disks[1]) == ["step-20", "step-30"]
    assert contents(disks[0], "step-30") == contents(disks[1], "step-30")
    assert (disks[1] / "run" / "checkpoints" / "latest").read_text() == "step-30\n"
    assert "kept on the disks of node 0 and node 1" in ranks.log()


def test_with_the_disk_of_node_0_lost_the_run_goes_on_from_the_other_copy(start: Start, tmp_path: Path) -> None:
    whole = on_disks(start, disks_of(tmp_path / "whole"), recipe_of())
    assert whole.wait() == [0, 0], whole.log()
    disks = disks_of(tmp_path)
    first = on_disks(start, disks, recipe_of(train={"until": "20 steps", "eval_every": "10 steps"}))
    assert first.wait() == [0, 0], first.log()
    shutil.rmtree(disks[0] / "run")
    second = on_disks(start, disks, recipe_of(), attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert "step-20 was sent from the disk of node 1 to node 0" in second.log()
    assert second.event("training_started")["resumed_from"] == "step-20"
    assert second.weights == whole.weights
    assert checkpoints(disks[0]) == checkpoints(disks[1]) == ["step-20", "step-30"]
    steps = [record["step"] for record in read_metrics(RunDir(disks[0] / "run").metrics)]
    assert steps == list(range(1, 31)), "the curve of before is there again"


def test_shared_that_is_not_shared_is_refused_with_the_key(start: Start, tmp_path: Path) -> None:
    ranks = on_disks(start, disks_of(tmp_path), recipe_of(checkpoint={"every": "10 steps", "store": "shared"}))
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert "checkpoint.store: shared, and " in ranks.log(rank) or rank, ranks.log(rank)
        assert "set checkpoint.store: replicate" in ranks.log()


def test_replicate_on_a_shared_folder_copies_nothing(start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", recipe_of(), local_size=1)
    assert ranks.wait() == [0, 0], ranks.log()
    assert "all nodes see one folder, so a checkpoint is there once, and not copied" in ranks.log()
    assert complete(tmp_path / "run" / "checkpoints") == ["step-20", "step-30"]
    assert not (tmp_path / "run" / "replica").exists()
