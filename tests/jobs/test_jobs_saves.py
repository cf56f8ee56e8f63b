"""Saves of real ranks behind the training's back: what fails on one of them, when all know it, and what is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from jobs.folders import complete
from jobs.manifest import verify
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SPOIL = """
import json, os, threading, time
import jobs.saving, jobs.storage
from jobs.checkpoint import Checkpoints

SPOIL = json.loads(os.environ.get("SPOIL", "{}"))
if "limit_s" in SPOIL:
    jobs.saving.LIMIT_S, jobs.saving.SETTLE_S = SPOIL["limit_s"], 0.1
real = jobs.storage.Layout.write_part
def write_part(layout, folder, parts):
    # of one rank: while these steps are saved its disk is full, or hangs
    name = folder.name.partition(".")[0]
    if name in SPOIL.get("full", ()):
        raise OSError(28, os.strerror(28), str(folder))
    if name in SPOIL.get("hangs", ()):
        time.sleep(3600)
    return real(layout, folder, parts)
jobs.storage.Layout.write_part = write_part
"""

SLOW_COPY = """
import threading, time
from jobs.background import Background

real = Background._copy
def copy(*args, **options):
    # Behind the training's back: it would be at its next update long before this ends.
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.03)
    return real(*args, **options)
Background._copy = copy
"""


def recipe(**checkpoint: Any) -> dict[str, Any]:
    return tiny(
        data={"global_batch_size": 12},
        train={"until": "40 steps", "eval_every": None},
        checkpoint={"every": "10 steps", "keep": 10, **checkpoint},
    )


def spoiled(start: Start, tmp_path: Path, spoil: dict[str, Any], **checkpoint: Any) -> Ranks:
    """Three ranks, of which one has a bad disk."""
    (tmp_path / "spoil.py").write_text(SPOIL)
    env, limits = {1: {"SPOIL": json.dumps(spoil)}}, {key: spoil[key] for key in ("limit_s",) if key in spoil}
    return start(
        tmp_path / "run",
        recipe(**checkpoint),
        ranks=3,
        load=[str(tmp_path / "spoil.py")],
        env={"SPOIL": json.dumps(limits)},
        rank_env=env,
    )


def events(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(ranks.run_dir) if event["event"] == name]


def test_a_save_that_fails_on_one_rank_ends_all_of_them_at_the_same_step(start: Start, tmp_path: Path) -> None:
    """F083: the second one; it names the step that could not be saved, and what was there before is still there."""
    ranks = spoiled(start, tmp_path, {"full": ["step-20"]})
    assert ranks.wait() == [1, 1, 1]
    errors = {ranks.log(rank).splitlines()[-1] for rank in range(3)}
    [error] = errors
    assert error.startswith(f"jobs.checkpoint.SaveError: step-20 could not be written to {tmp_path}/run/checkpoints")
    assert ": rank 1: [Errno 28] No space left on device: " in error
    [failed] = events(ranks, "save_failed")
    assert (failed["step"], failed["in_a_row"]) == (20, 1)
    assert "THE SAVE OF STEP 20 HAS FAILED, 1 in a row: rank 1: " in ranks.log()
    assert complete(ranks.run_dir / "checkpoints") == ["step-10"]
    assert [event["step"] for event in events(ranks, "checkpoint_saved")] == [10]


def test_where_the_recipe_allows_it_the_training_goes_on_and_saves_again(start: Start, tmp_path: Path) -> None:
    """The last save is no exception: it is tried again until it is there."""
    ranks = spoiled(start, tmp_path, {"full": ["step-20"]}, max_failed_saves=1)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert [event["step"] for event in events(ranks, "save_failed")] == [20]
    assert complete(ranks.run_dir / "checkpoints") == ["step-10", "step-30", "step-40"]
    assert ranks.event("summary")["saves"]["failed"] == 1
    assert len({record["step"] for record in read_metrics(ranks.metrics)}) == 40


def test_a_last_save_that_keeps_failing_is_an_error_whatever_the_recipe_allows(start: Start, tmp_path: Path) -> None:
    ranks = spoiled(start, tmp_path, {"full": ["step-40"]}, max_failed_saves=2)
    assert ranks.wait() == [1, 1, 1]
    assert "step-40 could not be written" in ranks.log().splitlines()[-1]
    assert [event["in_a_row"] for event in events(ranks, "save_failed")] == [1, 2, 3]
    assert complete(ranks.run_dir / "checkpoints") == ["step-10", "step-20", "step-30"]


def test_a_save_that_hangs_on_one_rank_is_a_failed_one(start: Start, tmp_path: Path) -> None:
    """Row 17 of the fault model."""
    ranks = spoiled(start, tmp_path, {"hangs": ["step-20"], "limit_s": 1.0})
    assert ranks.wait() == [1, 1, 1]
    for rank in range(3):
        error = ranks.log(rank).splitlines()[-1]
        assert error.startswith("jobs.checkpoint.SaveError: step-20 could not be written to "), error
        assert "it has not ended after " in error
    assert complete(ranks.run_dir / "checkpoints") == ["step-10"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_all_saves_of_a_training_are_complete_when_it_has_ended(
    start: Start, tmp_path: Path, asynchronous: bool
) -> None:
    """F083: also the one that was begun last; and behind the training's back they are the same, bit by bit."""
    (tmp_path / "slow.py").write_text(SLOW_COPY)
    ranks = start(
        tmp_path / "run", recipe(asynchronous=asynchronous, every="1 steps"), load=[str(tmp_path / "slow.py")]
    )
    assert ranks.wait() == [0, 0], ranks.log()
    folder = ranks.run_dir / "checkpoints"
    assert complete(folder) == [f"step-{step}" for step in range(31, 41)]
    for name in complete(folder):
        verify(folder / name)
    saved = events(ranks, "checkpoint_saved")
    assert [event["step"] for event in saved] == list(range(1, 41))
    assert all(event["blocked_s"] >= 0 for event in saved)
    summary = ranks.event("summary")
    assert summary["saves"]["started"] == 40
    assert summary["times"]["save_s"] >= sum(event["blocked_s"] for event in saved) * 0.5
    twin = start(tmp_path / "twin", recipe(asynchronous=not asynchronous, every="5 steps"))
    assert twin.wait() == [0, 0], twin.log()
    for name in (f"step-{step}/rank-{rank}.safetensors" for step in (35, 40) for rank in (0, 1)):
        assert (folder / name).read_bytes() == (twin.run_dir / "checkpoints" / name).read_bytes()


def test_no_room_for_a_checkpoint_is_found_before_the_training(start: Start, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("import jobs.room\njobs.room.free_bytes = lambda folder: 1000\n")
    ranks = start(tmp_path / "run", recipe(), load=[str(tmp_path / "small.py")])
    assert ranks.wait() == [1, 1]
    error = ranks.log().splitlines()[-1]
    assert "SaveError: no checkpoint can be written to " in error
    assert "bytes, and 1,000 are free; make room there" in error
    assert events(ranks, "training_started") == []
