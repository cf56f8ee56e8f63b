"""F062: what of a run W&B has not got yet, and in which order it is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.metrics import fold_metrics
from launcher.runs.sync import find_parts, mark_synced, parts_text, read_sent, sent_path, steps_text, unsent_steps

RUN_ID = "mnist-1130-0214-k7qz"


def part(folder: Path, time: str, wandb_id: str = RUN_ID, *, files: int = 1) -> None:
    path = folder / f"offline-run-{time}-{wandb_id}"
    path.mkdir(parents=True)
    for number in range(files):
        (path / f"run-{wandb_id}{number or ''}.wandb").touch()


def test_three_attempts_are_three_parts_in_their_order(tmp_path: Path) -> None:
    for time in ("20261201_000003", "20261130_235959", "20261201_000001"):
        part(tmp_path, time)
    (tmp_path / "run-20261201_000002-online").mkdir()
    part(tmp_path, "20261201_000002", files=0)  # an attempt that was killed before W&B wrote anything
    (tmp_path / "latest-run").symlink_to(f"offline-run-20261201_000003-{RUN_ID}")
    parts = find_parts(tmp_path)
    assert [each.time for each in parts] == ["20261130_235959", "20261201_000001", "20261201_000003"]
    assert {each.wandb_id for each in parts} == {RUN_ID}
    assert parts_text(parts, RUN_ID)[0] == f"part 1 of 3  offline-run-20261130_235959-{RUN_ID}  to upload"


def test_parts_of_another_id_stay_apart(tmp_path: Path) -> None:
    part(tmp_path, "20261130_000002")
    part(tmp_path, "20261130_000001", "own-id")
    part(tmp_path, "20261130_000003", "own-id")
    assert [each.wandb_id for each in find_parts(tmp_path)] == [RUN_ID, "own-id", "own-id"]
    assert parts_text(find_parts(tmp_path), RUN_ID)[1].endswith("to upload, its own id own-id")


def test_what_was_uploaded_is_known_by_the_mark_that_wandb_makes_itself(tmp_path: Path) -> None:
    part(tmp_path, "20261130_000001")
    (each,) = find_parts(tmp_path)
    assert not each.synced
    mark_synced([each])
    assert (each.path / f"run-{RUN_ID}.wandb.synced").exists()
    assert find_parts(tmp_path)[0].synced


def test_no_wandb_folder_is_no_part(tmp_path: Path) -> None:
    assert find_parts(tmp_path / "wandb") == []


def test_steps_that_wandb_has_are_not_sent_again(tmp_path: Path) -> None:
    """Three attempts: the second resumed from 2, the third from 4."""
    lines = [
        {"attempt": 1, "resumed_from": 0},
        *({"attempt": 1, "step": step, "train/loss": 1.0} for step in (1, 2, 3)),
        {"attempt": 2, "resumed_from": 2},
        *({"attempt": 2, "step": step, "train/loss": 2.0} for step in (3, 4)),
        {"attempt": 2, "step": 4, "eval/loss": 2.0},
        {"attempt": 3, "resumed_from": 4},
        {"attempt": 3, "step": 5, "train/loss": 3.0},
    ]
    metrics = fold_metrics(lines)
    assert unsent_steps(metrics, read_sent(tmp_path / "nothing")) == [1, 2, 3, 4, 5]
    sent = sent_path(tmp_path, "wandb")
    sent.write_text(f"{4:020d} {0:020d}")
    assert unsent_steps(metrics, read_sent(sent)) == [4, 5], "the evaluation at 4 is still to be sent"
    sent.write_text(f"{5:020d} {4:020d}")
    assert unsent_steps(metrics, read_sent(sent)) == []


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "nothing: every step was sent"),
        ([7], "1 step, 7 to 7"),
        ([1, 2, 3, 1000], "4 steps, 1 to 1,000"),
    ],
)
def test_steps_as_people_read_them(steps: list[int], text: str) -> None:
    assert steps_text(steps) == text
