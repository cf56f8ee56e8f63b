"""Ranks whose run directories are on disks of their own: checkpoints whole on two of them, and sent where one is lost.

Two disks are two folders here; who sees which is what the ranks find out themselves. The same on machines without a
shared folder: tests/faults/test_faults_store.py.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start, write_plan
from tiny import tiny

from jobs.folders import complete
from jobs.manifest import verify
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

S3 = os.environ.get("LAUNCH_TEST_S3", "")


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "train": {"until": "30 steps", "eval_every": "10 steps"},
            "checkpoint": {"every": "10 steps", "keep": 2, "store": "replicate"},
            **sections,
        }
    )


def on_disks(
    start: Start,
    disks: list[Path],
    recipe: dict[str, Any],
    *,
    of_rank: dict[int, dict[str, str]] | None = None,
    **more: Any,
) -> Ranks:
    """One rank, a node of its own, on each of these disks."""
    for disk in disks:
        write_plan(disk / "run", recipe, len(disks), grace_s=30.0)
    env = {
        rank: {"LAUNCH_RUN_DIR": str(disk / "run"), **(of_rank or {}).get(rank, {})} for rank, disk in enumerate(disks)
    }
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_with_the_disk_of_node_0_lost_the_run_goes_on_from_the_other_copy(
    start: Start, tmp_path: Path, strategy: str
) -> None:
    parallelism = {"strategy": strategy}
    whole = on_disks(start, disks_of(tmp_path / "whole"), recipe_of(parallelism=parallelism))
    assert whole.wait() == [0, 0], whole.log()
    disks = disks_of(tmp_path)
    train = {"until": "20 steps", "eval_every": "10 steps"}
    first = on_disks(start, disks, recipe_of(train=train, parallelism=parallelism))
    assert first.wait() == [0, 0], first.log()
    shutil.rmtree(disks[0] / "run")
    second = on_disks(start, disks, recipe_of(parallelism=parallelism), attempt=2)
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


KILL_AT = """
import os, signal, sys
at, seen = int(os.environ.get("KILL_AT", "0")), 0
def see(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir") and "/checkpoints/step-20" in str(args[0]):
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(see)
"""
"""Dies before so many of the things that a rank does to the files of the checkpoint of step 20."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_anywhere_in_a_replication_leaves_this_checkpoint_or_the_one_before(
    start: Start, tmp_path: Path, rank: int
) -> None:
    undisturbed = on_disks(start, disks_of(tmp_path / "whole"), recipe_of())
    assert undisturbed.wait() == [0, 0], undisturbed.log()
    for at in itertools.count(1):
        disks = disks_of(tmp_path / f"killed-{at}")
        if not is_killed(start, disks, rank, at):
            break
        second = on_disks(start, disks, recipe_of(), attempt=2)
        assert second.wait() == [0, 0], second.log()
        assert second.event("training_started")["step"] >= max(told(disks[0], attempt=1)), "what was told is there"
        assert second.weights == undisturbed.weights, at
        # An old one may be there still, where nothing was saved since the kill.
        assert checkpoints(disks[0])[-2:] == checkpoints(disks[1])[-2:] == ["step-20", "step-30"]
        assert contents(disks[0], "step-20") == contents(disks[1], "step-20")
    assert at > 8, "there are that many chances at least"


def told(disk: Path, *, attempt: int) -> list[int]:
    """Steps whose checkpoints an attempt has told to be complete."""
    saved = [event for event in read_events(disk / "run") if event["event"] == "checkpoint_saved"]
    return [event["step"] for event in saved if event["attempt"] == attempt]


def is_killed(start: Start, disks: list[Path], rank: int, at: int) -> bool:
    """Start a training in which a rank dies there; whether it has come so far."""
    load = disks[0] / "kill.py"
    load.write_text(KILL_AT)
    first = on_disks(
        start, disks, recipe_of(), env={"KILL_AT": "0"}, load=[str(load)], of_rank={rank: {"KILL_AT": str(at)}}
    )
    codes = first.wait()
    if 20 in told(disks[0], attempt=1):
        assert "step-20" in checkpoints(disks[0]), "it is said when it is on both"
        assert "step-20" in checkpoints(disks[1])
    assert codes == [0, 0] or codes[rank] == 137, first.log(rank)
    return codes != [0, 0]


def damage(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def half_way(start: Start, tmp_path: Path) -> list[Path]:
    """Two disks with checkpoints of steps 10 and 20."""
    disks = disks_of(tmp_path)
    first = on_disks(start, disks, recipe_of(train={"until": "20 steps", "eval_every": "10 steps"}))
    assert first.wait() == [0, 0], first.log()
    assert checkpoints(disks[0]) == checkpoints(disks[1]) == ["step-10", "step-20"]
    return disks


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("file", ["rank-1.safetensors", "manifest.json", "state.json"])
def test_a_copy_with_a_flipped_bit_is_replaced_by_the_other_one(
    start: Start, tmp_path: Path, node: int, file: str
) -> None:
    disks = half_way(start, tmp_path)
    damage(disks[node] / "run" / "checkpoints" / "step-20" / file)
    second = on_disks(start, disks, recipe_of(), attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert second.event("training_started")["resumed_from"] == "step-20"
    assert f"step-20 was sent from the disk of node {1 - node} to node {node}" in second.log()
    assert (disks[node] / "run" / "checkpoints" / "step-20.broken-2").is_dir() or complete(
        disks[node] / "run" / "checkpoints"
    ) == ["step-20", "step-30"]
    assert checkpoints(disks[0]) == checkpoints(disks[1]) == ["step-20", "step-30"]


def test_two_broken_copies_are_no_whole_one(start: Start, tmp_path: Path) -> None:
    """Each has a half that is good, and the two together would make one; it is not made."""
    disks = half_way(start, tmp_path)
    for node, disk in enumerate(disks):
        damage(disk / "run" / "checkpoints" / "step-20" / f"rank-{node}.safetensors")
    second = on_disks(start, disks, recipe_of(), attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert second.event("training_started")["resumed_from"] == "step-10"
    assert [other["name"] for other in second.event("training_started")["rejected"]] == ["step-20"]


def test_of_copies_of_different_steps_the_newest_is_taken_wherever_it_is(start: Start, tmp_path: Path) -> None:
    disks = half_way(start, tmp_path)
    shutil.rmtree(disks[0] / "run" / "checkpoints" / "step-20")
    shutil.rmtree(disks[1] / "run" / "checkpoints" / "step-10")
    second = on_disks(start, disks, recipe_of(), attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert second.event("training_started")["resumed_from"] == "step-20"
    assert checkpoints(disks[0]) == checkpoints(disks[1]) == ["step-20", "step-30"]


def test_what_the_run_has_gone_on_without_is_not_gone_back_to(start: Start, tmp_path: Path) -> None:
    """A disk was away with step 20 on it; the run went on from step 10, with other batches, and has saved step 15."""
    disks = half_way(start, tmp_path)
    other = recipe_of(train={"until": "15 steps"}, checkpoint={"every": "5 steps", "keep": 2, "store": "replicate"})
    away = disks[1] / "run" / "checkpoints"
    away.rename(disks[1] / "away")
    shutil.rmtree(disks[0] / "run" / "checkpoints" / "step-20")
    second = on_disks(start, disks, other, attempt=2)
    assert second.wait() == [0, 0], second.log()
    shutil.rmtree(away)
    (disks[1] / "away").rename(away)
    third = on_disks(start, disks, recipe_of(), attempt=3)
    assert third.wait() == [0, 0], third.log()
    started = third.event("training_started")
    assert started["resumed_from"] == "step-15"
    assert {"name": "step-20", "problem": "is of attempt 1, and a later one has gone on without it"} in started[
        "rejected"
    ]


def test_the_best_one_comes_to_a_new_disk_too(start: Start, tmp_path: Path) -> None:
    disks = disks_of(tmp_path)
    best = {"every": "5 steps", "keep": 1, "store": "replicate", "best": "eval/loss max"}
    first = on_disks(start, disks, recipe_of(train={"until": "20 steps", "eval_every": "5 steps"}, checkpoint=best))
    assert first.wait() == [0, 0], first.log()
    kept = checkpoints(disks[0])
    assert len(kept) == 2, kept
    shutil.rmtree(disks[0] / "run")
    train = {"until": "25 steps", "eval_every": "25 steps"}
    second = on_disks(start, disks, recipe_of(train=train, checkpoint=best), attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert checkpoints(disks[0]) == checkpoints(disks[1])
    assert kept[0] in checkpoints(disks[0])


def test_of_three_disks_two_have_all_and_the_third_nothing(start: Start, tmp_path: Path) -> None:
    disks = disks_of(tmp_path, 3)
    data = {**recipe_of()["data"], "global_batch_size": 12}
    first = on_disks(start, disks, recipe_of(data=data, train={"until": "20 steps"}))
    assert first.wait() == [0, 0, 0], first.log()
    assert [checkpoints(disk) for disk in disks] == [["step-10", "step-20"], ["step-10", "step-20"], []]
    shutil.rmtree(disks[0] / "run")
    second = on_disks(start, disks, recipe_of(data=data), attempt=2)
    assert second.wait() == [0, 0, 0], second.log()
    assert "step-20 was sent from the disk of node 1 to node 0, node 2" in second.log()
    assert [checkpoints(disk) for disk in disks] == [["step-20", "step-30"], ["step-20", "step-30"], []]


def at_url(url: str, **sections: Any) -> dict[str, Any]:
    return recipe_of(**{"checkpoint": {"every": "10 steps", "keep": 2, "store": url}, **sections})


def uploaded(ranks: Ranks) -> list[int]:
    return [event["step"] for event in read_events(ranks.run_dir) if event["event"] == "uploaded"]


@pytest.mark.parametrize("apart", [False, True])
def test_the_newest_checkpoint_is_at_the_url_too_and_a_run_whose_disks_are_lost_fetches_it(
    start: Start, tmp_path: Path, apart: bool
) -> None:
    recipe = at_url(f"file://{tmp_path}/bucket")
    run = on_disks if apart else on_one
    whole = run(
        start, disks_of(tmp_path / "whole"), recipe_of(checkpoint={**recipe["checkpoint"], "store": "replicate"})
    )
    assert whole.wait() == [0, 0], whole.log()
    disks = disks_of(tmp_path)
    first = run(start, disks, {**recipe, "train": {**recipe["train"], "until": "20 steps"}})
    assert first.wait() == [0, 0], first.log()
    assert uploaded(first)[-1] == 20
    there = tmp_path / "bucket" / "run" / "checkpoints"
    verify(there / "step-20")
    assert contents(disks[0], "step-20") == {path.name: path.read_bytes() for path in (there / "step-20").iterdir()}
    for disk in disks:
        shutil.rmtree(disk / "run", ignore_errors=True)
    second = run(start, disks, recipe, attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert f"step-20 was fetched from file://{tmp_path}/bucket/run/checkpoints" in second.log()
    assert second.event("training_started")["resumed_from"] == "step-20"
    assert second.weights == whole.weights
    assert complete(there) == ["step-20", "step-30"], "what is kept is kept there, too"
    assert checkpoints(disks[0]) == ["step-20", "step-30"]
    if apart:
        assert checkpoints(disks[1]) == [], "one disk holds all"


def on_one(start: Start, disks: list[Path], recipe: dict[str, Any], **more: Any) -> Ranks:
    """Two nodes that see the first of these disks."""
    return start(disks[0] / "run", recipe, local_size=1, **more)


def test_one_that_is_broken_at_the_url_is_not_used_and_an_older_one_is(start: Start, tmp_path: Path) -> None:
    recipe = at_url(f"file://{tmp_path}/bucket")
    for attempt, until in enumerate(("10 steps", "20 steps"), start=1):  # the end of each waits for its upload
        train = {**recipe["train"], "until": until}
        ranks = start(tmp_path / "run", {**recipe, "train": train}, ranks=1, attempt=attempt)
        assert ranks.wait() == [0], ranks.log()
    there = tmp_path / "bucket" / "run" / "checkpoints"
    assert complete(there) == ["step-10", "step-20"]
    damage(there / "step-20" / "rank-0.safetensors")
    shutil.rmtree(tmp_path / "run")
    last = start(tmp_path / "run", recipe, ranks=1, attempt=3)
    assert last.wait() == [0], last.log()
    assert "step-20 at " in last.log()
    assert "is broken: rank-0.safetensors has the hash" in last.log()
    assert last.event("training_started")["resumed_from"] == "step-10"
    for name in complete(there):
        verify(there / name)


def test_an_upload_that_fails_is_said_and_never_ends_the_training(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bucket").touch()  # no folder can be made there
    ranks = start(tmp_path / "run", at_url(f"file://{tmp_path}/bucket"), ranks=1)
    assert ranks.wait() == [0], ranks.log()
    assert "THE UPLOAD OF STEP 30 to file://" in ranks.log()
    assert "HAS FAILED: " in ranks.log()
    assert ranks.event("upload_failed")["step"] == 30
    assert complete(tmp_path / "run" / "checkpoints") == ["step-20", "step-30"]


@pytest.mark.parametrize(
    ("url", "told"),
    [("nowhere://bucket", "Protocol not known: nowhere"), ("dropbox://bucket/runs", "DropboxFileSystem requires")],
)
def test_a_url_that_cannot_be_used_is_refused_before_a_step(start: Start, tmp_path: Path, url: str, told: str) -> None:
    ranks = start(tmp_path / "run", at_url(url))
    assert ranks.wait() == [1, 1]
    assert f"checkpoint.store: {url} cannot be used here: {told}" in ranks.log().replace("\n", " "), ranks.log()


@pytest.mark.skipif(not S3, reason="LAUNCH_TEST_S3 names no bucket; it takes s3fs")
def test_a_run_that_has_lost_its_disk_goes_on_from_a_bucket(start: Start, tmp_path: Path) -> None:
    """LAUNCH_TEST_S3=s3://bucket/folder; where and who: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY."""
    recipe = at_url(f"{S3}/{tmp_path.name}")
    first = start(tmp_path / "run", {**recipe, "train": {**recipe["train"], "until": "20 steps"}})
    assert first.wait() == [0, 0], first.log()
    assert uploaded(first)[-1] == 20, first.log()
    shutil.rmtree(tmp_path / "run")
    second = start(tmp_path / "run", recipe, attempt=2)
    assert second.wait() == [0, 0], second.log()
    assert "step-20 was fetched from s3://" in second.log()
    assert second.event("training_started")["resumed_from"] == "step-20"
    assert uploaded(second)[-1] == 30
