"""`profiler:` in real trainings of two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Start
from tiny import tiny

from launcher.runs.profile import newest_profile, profile_text
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

SHORT = {"until": "12 steps", "eval_every": None}


def trained(start: Start, run_dir: Path, **profiler: Any) -> Any:
    sections = {"profiler": profiler} if profiler else {}
    ranks = start(run_dir, tiny(train=SHORT, **sections))
    assert ranks.wait() == [0, 0], ranks.log()
    return ranks


def test_some_steps_of_one_rank_are_recorded_and_the_weights_are_the_same(start: Start, tmp_path: Path) -> None:
    plain = trained(start, tmp_path / "plain")
    ranks = trained(start, tmp_path / "profiled", steps="3-6", ranks=[1])
    assert ranks.weights == plain.weights
    run = RunDir(ranks.run_dir)
    (summary,) = newest_profile(run)
    assert (summary["rank"], summary["steps"], summary["tool"]) == (1, [3, 6], "torch")
    shares = summary["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert min(shares["compute"], shares["communication"], shares["input"]) > 0
    calls = {row["name"]: row["calls"] for row in summary["operators"]}
    assert any(count % 4 == 0 for count in calls.values())  # of four steps
    trace = json.loads(gzip.decompress((run.profile / summary["files"]["trace"]).read_bytes()))
    steps = {each["name"] for each in trace["traceEvents"] if str(each.get("name")).startswith("ProfilerStep")}
    assert len(steps) == 4
    assert "aten::" in (run.profile / summary["files"]["table"]).read_text()
    text = profile_text([summary])
    assert text.startswith("profile of attempt 1, rank 1, steps 3 to 6 (torch): ")
    assert "compute" in text
    assert "steps 3 to 6 of this attempt, in " in ranks.log(1)
    assert "USDT" not in ranks.log(1)
    assert "profiler" not in ranks.log(0)


def test_the_first_step_and_one_beyond_the_end(start: Start, tmp_path: Path) -> None:
    """What the training does not reach is not recorded; what it has reached is kept."""
    early = trained(start, tmp_path / "early", steps="1-100")
    (summary,) = newest_profile(RunDir(early.run_dir))
    assert summary["steps"] == [1, 12]
    late = trained(start, tmp_path / "late", steps="50-60")
    assert newest_profile(RunDir(late.run_dir)) == []
    assert "profiler.steps 50-60: this attempt ends after 12; nothing recorded" in late.log()
