"""The course of two runs, compared."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.cli.diff import diff_fields, diff_text, loss_lines
from launcher.planning.code import CodeChanges
from launcher.runs.curves import Apart, apart, median_step_s, read_course
from launcher.runs.diff import Row, RunDiff
from launcher.runs.rundir import RunDir


def course_of(path: Path, *, step_s: float = 0.1, shift: float = 0.0) -> RunDir:
    path.mkdir()
    lines: list[dict[str, float]] = [{"attempt": 1, "resumed_from": 0}]
    for step in range(1, 41):
        pause = 100.0 if step > 20 else 0.0  # an evaluation
        values = {"train/loss": 1 / step + (shift if step > 5 else 0), "samples_per_s": 64 / step_s}
        lines.append({"attempt": 1, "step": step, **values, "time": step * step_s + pause, "memory/peak_bytes": step})
    run = RunDir(path)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.devices(0).parent.mkdir()
    for node in (0, 1):
        use = {"workers/rss_bytes": 2**20, "gpu0/memory_used_bytes": (node + 1) * 2**20}
        run.devices(node).write_text(json.dumps(use) + "\n")
    return run


def test_speed_memory_and_loss_of_a_run(tmp_path: Path) -> None:
    course = read_course(course_of(tmp_path / "a"))
    assert course.numbers() == {
        "step (median)": course.step_s,
        "samples/s (median)": 640.0,
        "memory/peak_bytes (peak)": 40,
        "workers' memory, all nodes (peak)": 2 * 2**20,
        "GPU memory in use (peak)": 2 * 2**20,
    }
    assert course.step_s is not None
    assert abs(course.step_s - 0.1) < 1e-9  # the evaluation is in none of the typical spans
    assert course.loss[4] == 0.25


def test_steps_of_another_attempt_are_not_taken_together() -> None:
    lines = [{"attempt": step // 11, "step": step, "time": float(step), "train/loss": 1.0} for step in range(1, 20)]
    assert median_step_s(lines) is None  # ten steps of the one, nine of the other
    assert median_step_s([]) is None


def test_curves_are_compared_at_the_steps_that_both_have() -> None:
    a = {1: 1.0, 2: 0.5, 3: 0.25}
    assert apart(a, a) == Apart(steps=3, last=(3, 0.25, 0.25))
    assert apart(a, {2: 0.5, 3: 0.5, 4: 1.0}) == Apart(steps=2, most=0.25, at_step=3, first=3, last=(3, 0.25, 0.5))
    assert apart(a, {}) == Apart()


def test_the_difference_is_said_in_words() -> None:
    a = {1: 1.0, 2: 0.5, 3: 0.25}
    assert list(loss_lines(apart(a, a))) == ["loss: equal at all 3 steps that both have, at the last (step 3) 0.25"]
    assert list(loss_lines(apart(a, {**a, 2: 0.75, 3: 0.3}))) == [
        "loss: at step 3, the last that both have, A 0.25, B 0.3 (+0.05)",
        "  equal up to step 1",
        "  furthest apart at step 2, by 0.25",
    ]
    assert list(loss_lines(Apart())) == []


def test_launch_diff_shows_speed_and_memory() -> None:
    rows = (
        Row("step (median)", 0.1, 0.05),
        Row("samples/s (median)", 640.0, 1280.0),
        Row("GPU memory in use (peak)", None, 3 * 2**20),
    )
    found = RunDiff(recipe=(), code=(), files=CodeChanges(), environment=(), metrics=(), course=rows)
    text = diff_text(("a", "b"), found, [])
    assert "  step (median)             100 ms  50 ms   x 0.50" in text
    assert "  samples/s (median)        640     1,280   x 2.00" in text
    assert "  GPU memory in use (peak)  -       3 MiB" in text
    assert diff_fields(("a", "b"), found, [])["course"]["step (median)"] == [0.1, 0.05]
