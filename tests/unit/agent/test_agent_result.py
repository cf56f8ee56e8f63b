"""result.json: how a run ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_values

from launcher.agent.causes import Failure
from launcher.agent.effects import Finish
from launcher.agent.result import make_result, write_result
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.ledger import PARTS
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause, RunState

DONE = Finish(RunState.SUCCEEDED, Cause.DONE, 0, "all workers finished")
FAILED = Finish(RunState.FAILED, Cause.WORKER_ERROR, 7, "boom; not retried")
FAILURE = Failure(
    attempt=1,
    node=1,
    rank=1,
    pid=77,
    exit_code=7,
    cause=Cause.WORKER_ERROR,
    message="boom",
    place="t.py:3 in main",
    log="logs/attempt-1/node-1/rank-1.log",
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return runs_values.plan(tmp_path)


def events(*named: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"event": name, "time": float(number), **fields} for number, (name, fields) in enumerate(named)]


SUMMARY = {
    "step": 632,
    "samples_seen": 80896,
    "steps_left_out": 3,
    "steps_skipped": 1,
    "memory": {"used_bytes": 5, "peak_bytes": 7},
    "compiled": None,
    "world_size": 2,
    "weights_sha256": "ab" * 32,
    "metrics": {"eval/accuracy": 0.978},
    "times": {"train_s": 17.2, "eval_s": 1.6, "save_s": 0.4},
    "input": {"wait_s": 6.5, "advice": "input-bound 38 %: try data.loader_workers=2"},
    "samples_per_s": 4050.0,
    "checkpoint_verified": True,
}


def test_of_a_training_that_finished(plan: Plan) -> None:
    story = events(
        ("created", {}),
        ("attempt_started", {"attempt": 1}),
        ("training_started", {"attempt": 1, "step": 0, "total_steps": 632}),
        ("checkpoint_saved", {"attempt": 1, "step": 300, "best": True, "time_s": 0.25}),
        ("evaluated", {"attempt": 1, "step": 632, "time_s": 0.6}),
        ("checkpoint_saved", {"attempt": 1, "step": 632, "best": False, "time_s": 0.15}),
        ("summary", {"attempt": 1, **SUMMARY}),
        ("finished", {}),
    )
    result = make_result(plan, DONE, story, attempt=1, restarts=0, first=None, newest="checkpoints/step-632")
    assert result == {
        "state": "SUCCEEDED",
        "cause": "done",
        "exit_code": 0,
        "reason": "all workers finished",
        "first_failure": None,
        "step": 632,
        "total_steps": 632,
        "samples_seen": 80896,
        "steps_left_out": 3,
        "steps_skipped": 1,
        "memory": {"used_bytes": 5, "peak_bytes": 7},
        "compiled": None,
        "world_size": 2,
        "metrics": {"eval/accuracy": 0.978},
        "weights_sha256": "ab" * 32,
        "attempts": 1,
        "restarts": 0,
        "samples_per_s": 4050.0,
        "input": {"wait_s": 6.5, "advice": "input-bound 38 %: try data.loader_workers=2"},
        "policy": "",
        "goodput": 0.4286,
        "time": {
            "queue_s": 0.0,
            "start_s": 2.0,
            "train_s": 3.0,
            "eval_s": 0.6,
            "save_s": 0.4,
            "lost_s": 0.0,
            "down_s": 0.0,
            "end_s": 1.0,
            "total_s": 7.0,
        },
        "ledger": [
            {
                "attempt": 1,
                "devices": plan.world_size,
                **result["time"],
                "worker_hours": dict.fromkeys(PARTS, 0.0)
                | {
                    name: pytest.approx(time_s * plan.world_size / 3600, abs=1e-6)
                    for name, time_s in {
                        "start": 2.0,
                        "train": 3.0,
                        "eval": 0.6,
                        "save": 0.4,
                        "end": 1.0,
                        "total": 7.0,
                    }.items()
                },
            }
        ],
        "checkpoint": {"latest": 632, "best": 300, "verified": True, "path": "checkpoints/step-632"},
        "stop_reason": None,
    }


def test_of_a_failure_names_who_was_first_and_when(plan: Plan) -> None:
    who = {"attempt": 1, "node": 1, "rank": 1}
    story = events(("created", {}), ("failure", {**who, "pid": 76}), ("failure", {**who, "pid": 77}), ("finished", {}))
    result = make_result(plan, FAILED, story, attempt=1, restarts=0, first=FAILURE)
    assert result["first_failure"] == {
        "node": 1,
        "rank": 1,
        "cause": "worker_error",
        "exit_code": 7,
        "message": "boom",
        "place": "t.py:3 in main",
        "log": "logs/attempt-1/node-1/rank-1.log",
        "time": 2.0,
        "attempt": 1,
        "log_line": None,
        "exception": "",
        "step": None,
        "last_words": "",
    }


def test_a_failure_that_was_recovered_from_is_not_in_a_success(plan: Plan) -> None:
    assert make_result(plan, DONE, [], attempt=2, restarts=1, first=FAILURE)["first_failure"] is None


def test_the_summary_of_an_earlier_attempt_does_not_speak_for_a_later_one(plan: Plan) -> None:
    story = events(("summary", {"attempt": 1, **SUMMARY}), ("checkpoint_saved", {"step": 632}))
    result = make_result(plan, FAILED, story, attempt=2, restarts=1, first=None)
    assert result["weights_sha256"] is None
    assert result["samples_seen"] is None
    assert result["step"] == 632  # of the newest checkpoint
    later = make_result(plan, FAILED, story, attempt=2, restarts=1, first=None, step=640)
    assert later["step"] == 640  # of the metrics
    assert result["metrics"] == {"eval/accuracy": 0.978}


def test_what_one_worker_saved_for_all_is_the_step_that_was_reached(plan: Plan) -> None:
    story = events(("checkpoint_saved", {"attempt": 1, "step": 70}), ("checkpoint_saved", {"attempt": 2, "step": 65}))
    result = make_result(plan, FAILED, story, attempt=2, restarts=1, first=None, step=47)
    assert result["step"] == 65, "the metrics end before it, and what was saved before is broken"


def test_of_a_script_that_says_nothing(plan: Plan) -> None:
    result = make_result(plan, DONE, [], attempt=1, restarts=0, first=None)
    assert result["step"] is None
    assert result["checkpoint"] == {"latest": None, "best": None, "verified": None, "path": None}
    assert result["time"] == {}


def test_times_are_those_of_the_newest_resume(plan: Plan) -> None:
    story = events(
        ("created", {}),
        ("attempt_started", {"attempt": 1}),
        ("training_started", {"attempt": 1, "step": 0}),
        ("finished", {}),
        ("resumed", {}),
        ("attempt_started", {"attempt": 2}),
        ("training_started", {"attempt": 2, "step": 0}),
        ("summary", {"attempt": 2}),
        ("finished", {}),
    )
    times = make_result(plan, DONE, story, attempt=2, restarts=0, first=None)["time"]
    assert (times["start_s"], times["train_s"], times["end_s"], times["total_s"]) == (2.0, 1.0, 1.0, 4.0)


def test_a_stop_keeps_its_reason(plan: Plan) -> None:
    end = Finish(RunState.CANCELLED, Cause.CANCELLED, 75, "Ctrl-C")
    story = events(("stop_requested", {"reason": "Ctrl-C"}))
    assert make_result(plan, end, story, attempt=1, restarts=0, first=None)["stop_reason"] == "Ctrl-C"


def test_is_written_whole(make_run: Callable[..., tuple[Plan, RunDir]]) -> None:
    plan, run = make_run()
    writer = EventWriter(run.path, "worker")
    writer.write("summary", attempt=1, **SUMMARY)
    writer.close()
    write_result(run, plan, DONE, attempt=1, restarts=0, first=None)
    assert json.loads(run.result.read_text())["weights_sha256"] == "ab" * 32
    assert [path.name for path in run.path.glob("result*")] == ["result.json"]
