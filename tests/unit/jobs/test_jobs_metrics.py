from __future__ import annotations

from pathlib import Path

from jobs.metrics import MetricsLog
from launcher.runs.metrics import fold_metrics, read_metrics


def losses(records: list[dict[str, float]]) -> dict[float, float]:
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


def test_what_a_dead_attempt_did_not_keep_is_gone() -> None:
    lines = [
        {"attempt": 1, "resumed_from": 0},
        *({"attempt": 1, "step": step, "train/loss": 1.0} for step in range(1, 8)),
        {"attempt": 2, "resumed_from": 4},
        {"attempt": 2, "step": 5, "train/loss": 2.0},
    ]
    assert losses(fold_metrics(lines)) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0}


def test_an_evaluation_that_is_made_up_for_joins_its_step() -> None:
    lines = [
        {"attempt": 1, "step": 4, "train/loss": 1.0},
        {"attempt": 2, "resumed_from": 4},
        {"attempt": 2, "step": 4, "eval/accuracy": 0.5},
    ]
    assert fold_metrics(lines) == [{"attempt": 2, "step": 4, "train/loss": 1.0, "eval/accuracy": 0.5}]


def test_a_writer_that_was_given_up_is_not_heard() -> None:
    lines = [{"attempt": 2, "step": 1, "train/loss": 2.0}, {"attempt": 1, "step": 1, "train/loss": 1.0}]
    assert losses(fold_metrics(lines)) == {1: 2.0}


def test_half_a_line_of_a_killed_writer_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, attempt=1, resumed_from=0)
    first.write(1, **{"train/loss": 1.0})
    first.close()
    with path.open("a") as file:
        file.write('{"attempt": 1, "step": 2, "tra')
    second = MetricsLog(path, attempt=2, resumed_from=1)
    second.write(2, **{"train/loss": 3.0})
    second.close()
    assert losses(read_metrics(path)) == {1: 1.0, 2: 3.0}


def test_nothing_is_lost_without_a_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []
