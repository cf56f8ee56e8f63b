"""Samples that do not fit into shared memory, and samples that come too slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import Start
from tiny import tiny

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SMALL_MEMORY = """
import os
from types import SimpleNamespace
real = os.statvfs
small = SimpleNamespace(f_bavail=16, f_blocks=16, f_frsize=4096)
os.statvfs = lambda path: small if str(path) == "/dev/shm" else real(path)
"""
SLOW_SAMPLES = """
import time
from jobs.data.base import TensorSamples
at_once = TensorSamples.__getitems__
def slowly(samples, indices):
    time.sleep(0.03)
    return at_once(samples, indices)
TensorSamples.__getitems__ = slowly
"""


def file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "before.py"
    path.write_text(text)
    return [str(path)]


def test_f008_a_shared_memory_that_is_too_small_is_found_before_the_training(start: Start, tmp_path: Path) -> None:
    recipe = tiny()
    recipe["data"].update({"shape": "4096", "loader_workers": 2})
    recipe["model"]["in_features"] = 4096
    group = start(tmp_path / "run", recipe, load=file(tmp_path, SMALL_MEMORY))
    assert 0 not in group.wait()
    for rank in (0, 1):
        assert "data.loader_workers 2 x data.prefetch 2 batches of 0.1 MiB on 2 ranks" in group.log(rank)
        assert "set data.loader_workers to 0, or give the container more (docker.shm_size)" in group.log(rank)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_training_that_waits_for_its_samples_is_told_so(start: Start, tmp_path: Path) -> None:
    recipe: dict[str, Any] = tiny(train={"until": "40 steps", "eval_every": None, "log_every": "20 steps"})
    group = start(tmp_path / "run", recipe, load=file(tmp_path, SLOW_SAMPLES))
    assert group.wait() == [0, 0], group.log()
    told = [line for line in read_metrics(group.metrics) if "train/data_wait_s" in line]
    assert [line["step"] for line in told] == [20, 40]
    assert all(0.025 < line["train/data_wait_s"] < 1 for line in told)
    found = group.event("summary")["input"]
    assert found["wait_s"] >= 39 * 0.03
    assert found["advice"].startswith("input-bound ")
    assert group.log().count("input-bound ") == 1


def test_a_training_that_does_not_wait_is_told_nothing(start: Start, tmp_path: Path) -> None:
    group = start(tmp_path / "run", tiny(train={"until": "40 steps", "eval_every": None}), ranks=1)
    assert group.wait() == [0], group.log()
    assert group.event("summary")["input"]["advice"] == ""
    assert "input-bound" not in group.log()
