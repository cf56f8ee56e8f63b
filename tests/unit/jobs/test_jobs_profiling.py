"""Which steps a profiler records, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny

from jobs.job import job_alone
from jobs.marks import Marks
from jobs.profiling import MemoryHistory, NsightRange, Operators, Profiler, ProfilerError, make_profiler, watched
from jobs.world import World
from launcher.recipe.schema import ProfilerSection, Recipe
from launcher.runs.profile import newest_profile, profile_text
from launcher.runs.rundir import RunDir

CPU = torch.device("cpu")


class Noted:
    """A tool that notes when it is asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.now = 0

    def warm_up(self) -> None:
        self.calls.append(("warm_up", self.now))

    def begin(self) -> None:
        self.calls.append(("begin", self.now))

    def next(self) -> None:
        self.calls.append(("next", self.now))

    def end(self) -> dict[str, Any]:
        self.calls.append(("end", self.now))
        return {"files": {}}


def profiler_of(tool: Any, steps: str, path: Path) -> Profiler:
    section = ProfilerSection(steps=steps)
    return Profiler(tool, section, path, facts={"attempt": 1, "rank": 0, "device": "cpu"}, marks=Marks())


def driven(steps: str, path: Path, *, until: int) -> list[tuple[str, int]]:
    """The calls of an attempt of so many steps, each with how many were complete then."""
    tool = Noted()
    profiler = profiler_of(tool, steps, path)
    for tool.now in range(until + 1):
        profiler.step(tool.now, at=100 + tool.now)
    profiler.finish(at=100 + until)
    assert not profiler.recording
    return tool.calls


def test_it_warms_up_one_step_before_the_first_and_ends_after_the_last(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "attempt-1-rank-0"
    found = driven("10-12", path, until=20)
    assert found == [("warm_up", 8), ("begin", 9), ("next", 10), ("next", 11), ("end", 12)]
    summary = json.loads((tmp_path / "profile" / "attempt-1-rank-0.json").read_text())
    assert summary["steps"] == [10, 12]
    assert driven("2-2", path, until=3) == [("warm_up", 0), ("begin", 1), ("end", 2)]
    assert driven("1-1", path, until=3) == [("begin", 0), ("end", 1)]


def test_an_attempt_that_ends_early_keeps_what_it_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile" / "attempt-1-rank-0"
    assert driven("2-9", path, until=4)[-1] == ("end", 4)
    assert json.loads((tmp_path / "profile" / "attempt-1-rank-0.json").read_text())["steps"] == [2, 4]
    assert driven("30-40", path, until=4) == []
    assert "profiler.steps 30-40: this attempt ends after 4; nothing recorded" in capfd.readouterr().out


def test_batches_stay_the_same_whether_they_are_watched_or_not(tmp_path: Path) -> None:
    profiler = profiler_of(Noted(), "1-2", tmp_path / "profile" / "x")
    batches = iter([(torch.ones(1), torch.ones(1))] * 2)
    assert watched(None, batches) is watched(profiler, batches) is batches
    profiler.step(0, at=0)
    assert len(list(watched(profiler, batches))) == 2


def test_only_the_ranks_that_are_named_have_one(tmp_path: Path) -> None:
    def made(rank: int, **profiler: Any) -> Profiler | None:
        job = job_alone(Recipe.model_validate(tiny(profiler=profiler or None)))
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        return make_profiler(job, RunDir(tmp_path), world, CPU, Marks())

    assert made(0) is None
    assert made(0, ranks=[1]) is None
    assert made(1, ranks=[1]) is not None
    assert made(0, tool="nsys") is None  # the agent has put it before the worker, and on a CPU it records everything
    with pytest.raises(ProfilerError, match="memory is that of a GPU"):
        made(0, tool="memory")


def test_a_report_shows_shares_operators_and_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    profiler = profiler_of(Operators(run.profile / "attempt-2-rank-0", CPU), "2-3", run.profile / "attempt-2-rank-0")
    for step in range(4):
        profiler.step(step, at=step)
        torch.ones(64, 64) @ torch.ones(64, 64)
    (run.profile / "attempt-1-rank-0.json").write_text("{}")  # of an attempt before
    (run.profile / "attempt-2-rank-3.nsys-rep").touch()
    text = profile_text(newest_profile(run)).splitlines()
    assert text[0].startswith("profile of attempt 1, rank 0, steps 2 to 3 (torch): ")
    assert text[1].startswith("  compute ")
    assert text[2].split() == ["operator", "calls", "time", "share"]
    assert any("aten::mm" in line for line in text)
    assert text[-4:] == [
        "  trace     profile/attempt-2-rank-0.trace.json.gz   (https://ui.perfetto.dev, or chrome://tracing)",
        "  table     profile/attempt-2-rank-0.txt",
        "profile of attempt 2, rank 3: the whole process (nsys)",
        "  nsys      profile/attempt-2-rank-3.nsys-rep   (nsys-ui)",
    ]


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_its_compute(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "attempt-1-rank-0"
    profiler = profiler_of(Operators(path, torch.device("cuda")), "2-3", path)
    for step in range(4):
        profiler.step(step, at=step)
        x = torch.ones(2048, 2048, device="cuda")
        for _ in range(20):
            x = x @ x
        torch.cuda.synchronize()
    (summary,) = newest_profile(RunDir(tmp_path))
    assert summary["shares"]["compute"] > 0.3


@pytest.mark.gpu
def test_the_history_of_a_gpus_memory_is_a_file_for_its_viewer(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "attempt-1-rank-0"
    profiler = profiler_of(MemoryHistory(path), "1-1", path)
    profiler.step(0, at=0)
    kept = torch.ones(1 << 20, device="cuda")
    profiler.step(1, at=1)
    (summary,) = newest_profile(RunDir(tmp_path))
    assert summary["peak_bytes"] >= kept.nbytes
    assert (path.parent / summary["files"]["snapshot"]).stat().st_size > 0


@pytest.mark.gpu
def test_nsight_is_told_which_steps_count(tmp_path: Path) -> None:
    """Without nsys around it, the calls have no effect and no error."""
    path = tmp_path / "profile" / "attempt-1-rank-0"
    profiler = profiler_of(NsightRange(path), "1-1", path)
    profiler.step(0, at=0)
    torch.ones(2, device="cuda").sum().item()
    profiler.step(1, at=1)
    assert newest_profile(RunDir(tmp_path))[0]["files"] == {"nsys": "attempt-1-rank-0.nsys-rep"}
