from __future__ import annotations

from pathlib import Path

from jobs.metrics import MetricsLog, MetricsMemory
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


def test_the_others_remember_what_rank_0_has_not_written(tmp_path: Path) -> None:
    """Both are told of the same lines; `written` travels from rank 0 to the others."""
    log, memory = MetricsLog(tmp_path / "metrics.jsonl", attempt=1, resumed_from=0), MetricsMemory(attempt=1)
    for step in (1, 2, 3):
        for each in (log, memory):
            each.write(step, **{"train/loss": float(step)})
        if step == 2:
            log.flush()
            memory.forget(log.written)
    assert log.written == 2
    assert losses(memory.unwritten()) == losses(log.unwritten()) == {3: 3.0}
    memory.forget(log.written)
    assert losses(memory.unwritten()) == {3: 3.0}, "it was told before"


def test_lines_that_came_with_the_state_are_added_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, attempt=1, resumed_from=0)
    first.write(1, **{"train/loss": 1.0})
    first.flush()
    kept = [{"attempt": 1, "step": step, "train/loss": float(step)} for step in (1, 2)]
    kept.append({"attempt": 1, "step": 2, "eval/loss": 0.5})
    for attempt in (2, 3):
        again = MetricsLog(path, attempt=attempt, resumed_from=2, kept=kept)
        assert again.written == 0
        again.close()
    assert path.read_text().count('"step": 1') == 1
    assert path.read_text().count('"step": 2') == 2, "training and evaluation"
    assert losses(read_metrics(path)) == {1: 1.0, 2: 2.0}
