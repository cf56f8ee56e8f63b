"""The final words of a run: golden texts (accept a change with `--force-regen`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from pytest_regressions.file_regression import FileRegressionFixture

from launcher.cli.screen import status_line
from launcher.cli.summary import final_block
from launcher.runs.fold import fold
from launcher.runs.observed import ALIVE, GONE

RUNS = Path("/home/ada/runs")
RUN_ID = values.RUN_ID
EVENTS: list[dict[str, Any]] = [
    {"event": "created", "host": "here"},
    *({"event": "agent_started", "node": k, "host": "here", "pid": 10 + k} for k in (0, 1)),
    {"event": "attempt_started", "attempt": 1},
    {"event": "training_started", "step": 0, "total_steps": 632, "steps_per_epoch": 79},
    {"event": "checkpoint_saved", "step": 300, "path": "checkpoints/step-300"},
]
OFFLINE = {"event": "tracking", "wandb": {"mode": "offline", "id": RUN_ID, "sync": "wandb sync runs/x/wandb/offline-1"}}
ONLINE = {"event": "tracking", "wandb": {"mode": "online", "id": RUN_ID}}
RESULT: dict[str, Any] = {
    "state": "SUCCEEDED",
    "cause": "done",
    "exit_code": 0,
    "reason": "all workers finished",
    "first_failure": None,
    "step": 632,
    "samples_seen": 80896,
    "metrics": {"eval/accuracy": 0.97812, "eval/loss": 0.0812, "train/loss": 0.05},
    "attempts": 1,
    "restarts": 0,
    "samples_per_s": 4050.4,
    "time": {"total_s": 21.2, "start_s": 1.31, "train_s": 17.2, "eval_s": 1.6, "save_s": 0.44},
    "checkpoint": {"latest": 632, "best": 632, "verified": True},
    "stop_reason": None,
}
FAILURE = {
    "node": 1,
    "rank": 1,
    "cause": "worker_error",
    "exit_code": 7,
    "message": "ValueError: boom",
    "place": "train.py:31 in step",
    "log": "logs/attempt-4/node-1/rank-1.log",
    "log_line": 12,
}
FAILED = {
    **RESULT,
    "state": "FAILED",
    "cause": "worker_error",
    "exit_code": 7,
    "reason": "ValueError: boom; not retried: 3 of 3 restarts are used up",
    "first_failure": FAILURE,
    "step": 312,
    "restarts": 3,
    "checkpoint": {"latest": 300, "best": None},
}
STOPPED = {**FAILED, "state": "CANCELLED", "cause": "cancelled", "exit_code": 75, "first_failure": None, "restarts": 0}
NOTHING = {
    "reason": "nosuch cannot be imported",
    "first_failure": None,
    "attempts": 0,
    "step": None,
    "metrics": {},
    "samples_per_s": None,
    "time": {"total_s": 2.1},
    "checkpoint": {},
}
SCRIPT = dataclasses.replace(values.plan(RUNS).worker, kind="script", module=None, script="/home/ada/train.py")

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, Any]]] = {
    "succeeded": ([*EVENTS, OFFLINE], RESULT, {}),
    "online": ([*EVENTS, ONLINE], RESULT, {}),
    "one-node": (EVENTS, RESULT, {"nodes": values.plan(RUNS).nodes[:1], "device": "cuda", "backend": "nccl"}),
    "failed": (EVENTS, FAILED, {}),
    "out-of-memory": (EVENTS, {**FAILED, "cause": "oom", "first_failure": {**FAILURE, "cause": "oom"}}, {}),
    "killed": (
        EVENTS,
        {**FAILED, "exit_code": 137, "first_failure": {**FAILURE, "message": "", "cause": "signal"}},
        {},
    ),
    "stopped": (EVENTS, STOPPED, {}),
    "stopped-early": (EVENTS[:1], {**STOPPED, **NOTHING, "exit_code": 143, "checkpoint": {}, "metrics": {}}, {}),
    "script-failed": (EVENTS[:4], {**FAILED, "step": None, "metrics": {}}, {"worker": SCRIPT, "resumable": False}),
    "script-succeeded": (EVENTS[:4], {**RESULT, "step": None, "metrics": {}, "checkpoint": {}}, {"worker": SCRIPT}),
    "vanished": (EVENTS, None, {}),
    "never-started": (EVENTS[:1], {**FAILED, **NOTHING, "cause": "usage", "exit_code": 1, "restarts": 0}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_final_words(case: str, file_regression: FileRegressionFixture) -> None:
    events, result, fields = CASES[case]
    timed = [
        {"time": 100.0 + index, **event} for index, event in enumerate([*events, {"event": "submitted", "ref": "x"}])
    ]
    record = fold(timed, GONE, result, run_id=RUN_ID)
    text = final_block(record, result, values.plan(RUNS, **fields), cwd=Path("/home/ada"))
    file_regression.check(text + "\n", extension=".txt", basename=case)


def test_a_run_elsewhere_is_shown_by_its_whole_path() -> None:
    text = final_block(fold([], ALIVE, RESULT), RESULT, values.plan(Path("/data/runs")), cwd=Path("/home/ada"))
    assert f"run    /data/runs/{RUN_ID}" in text


def test_the_live_line() -> None:
    lines = [{"step": step, "samples_seen": 128 * step, "time": 1000.0 + step / 40} for step in (20, 60, 120)]
    lines.append({"step": 120, "eval/loss": 0.1, "time": 1007.0})
    assert status_line("r", "RUNNING", lines, 632) == "r  RUNNING  120/632 steps  5,120 samples/s  eta 13 s"
    assert status_line("r", "STARTING", [], None) == "r  STARTING"
    assert status_line("r", "RUNNING", lines[:1], None) == "r  RUNNING  step 20"


def test_steps_that_were_left_out_are_in_the_final_words() -> None:
    record = fold(EVENTS, GONE, RESULT)
    plan = values.plan(RUNS)
    text = final_block(record, {**RESULT, "steps_left_out": 3}, plan, cwd=Path("/home/ada"))
    assert "632/632 steps   3 steps left out (faults.on_nan)   4,050 samples/s" in text
    assert "left out" not in final_block(record, {**RESULT, "steps_left_out": 0}, plan, cwd=Path("/home/ada"))


def test_what_the_precision_the_memory_and_the_compiler_did_is_in_the_final_words() -> None:
    record, plan = fold(EVENTS, GONE, RESULT), values.plan(RUNS)
    made = {"graphs": 9, "recompiles": 3, "graph_breaks": 1, "time_s": 40.4}
    result = {**RESULT, "steps_skipped": 2, "memory": {"peak_bytes": 3 << 30}, "compiled": made}
    text = final_block(record, result, plan, cwd=Path("/home/ada"))
    assert "632/632 steps   2 steps skipped (fp16 overflow)   4,050 samples/s   eval" in text
    assert "compiled 9 graphs in 40.4 s, 3 of them for shapes or modes that came later, 1 graph break\n" in text
    on_gpu = final_block(record, result, dataclasses.replace(plan, device="cuda"), cwd=Path("/home/ada"))
    assert "4,050 samples/s   3.0 GiB of GPU memory   eval" in on_gpu


def test_what_to_do_about_a_wait_for_samples_is_in_the_final_words() -> None:
    record, plan = fold(EVENTS, GONE, RESULT), values.plan(RUNS)
    advice = "input-bound 38 %: try data.loader_workers=2"
    text = final_block(record, {**RESULT, "input": {"wait_s": 6.5, "advice": advice}}, plan, cwd=Path("/home/ada"))
    assert f"\n  {advice}\n" in text
    text = final_block(record, {**RESULT, "input": {"wait_s": 0.5, "advice": ""}}, plan, cwd=Path("/home/ada"))
    assert text == final_block(record, RESULT, plan, cwd=Path("/home/ada"))
