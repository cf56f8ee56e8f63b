"""One curve over a crash, in the file that the real W&B package writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ranks import Start
from tiny import tiny
from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.process

_FILE_HEADER, _RECORD_HEADER, _BLOCK = 7, 7, 1 << 15
_NOTHING, _WHOLE, _LAST = 0, 1, 4

CRASH = """
import os, signal, time
import jobs.gradients
from pathlib import Path
inner = jobs.gradients.Gradients.make

def sent():
    notes = (Path(os.environ["LAUNCH_RUN_DIR"]) / "tracking").glob("*.sent")
    return max((int(note.read_text().split()[0]) for note in notes if note.stat().st_size), default=0)

def update(gradients, share, step):
    if step == 212 and os.environ["LAUNCH_ATTEMPT"] == "1":
        gradients._parts.report.flush()
        end = time.monotonic() + 60
        while sent() < 212 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(gradients, share, step)

jobs.gradients.Gradients.make = update
"""


def records(path: Path) -> list[Record]:
    """The package does not read its files in Python any more: LevelDB's log, in blocks of 32 KiB, behind 7 bytes."""
    data, place, parts, found = path.read_bytes(), _FILE_HEADER, b"", []
    assert data[:4] == b":W&B"
    while place + _RECORD_HEADER <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _RECORD_HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind == _NOTHING:
            break
        parts += data[place + _RECORD_HEADER : place + _RECORD_HEADER + length]
        place += _RECORD_HEADER + length
        if kind in (_WHOLE, _LAST):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def points(path: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def test_after_a_crash_no_point_is_rejected_and_none_is_missing(start: Start, tmp_path: Path) -> None:
    """F019: checkpoint 200, crash at 212, all of it sent: 201 to 212 are there once, and the axis is our own step."""
    (tmp_path / "crash.py").write_text(CRASH)
    recipe = tiny(
        train={"until": "230 steps", "eval_every": None},
        checkpoint={"every": "200 steps"},
        tracking={"wandb": {"mode": "offline"}},
    )
    for attempt, code in ((1, 137), (2, 0)):
        ranks = start(tmp_path / "run", recipe, attempt=attempt, load=[str(tmp_path / "crash.py")])
        assert code in ranks.wait(), ranks.log()
    assert ranks.event("training_started")["resumed_from"] == "step-200"
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-run.wandb"))
    assert len(files) == 2
    first, second = (points(path) for path in files)
    assert [point["step"] for point in [*first, *second] if "train/loss" in point] == list(range(1, 231))
    assert [point["step"] for point in first][-1] == 212
    for logged in (first, second):
        internal = [point["_step"] for point in logged]
        assert internal == sorted(set(internal)), "W&B rejects a step that does not increase"
    for path in files:
        metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
        assert {(metric.name or metric.glob_name): metric.step_metric for metric in metrics}["*"] == "step"
