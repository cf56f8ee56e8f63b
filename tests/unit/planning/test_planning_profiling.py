"""What `profiler:` may ask for, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs_values
from tiny import tiny

from launcher.planning.profiling import check_recording
from launcher.planning.topology import Remarks
from launcher.recipe.schema import Recipe


def remarks_of(
    profiler: dict[str, object], *, script: bool = False, device: str = "cpu", engine: str = "agent"
) -> Remarks:
    document = {"name": "x", "script": "x.py"} if script else tiny()
    remarks = Remarks()
    recipe = Recipe.model_validate({**document, "profiler": profiler})
    check_recording(recipe, remarks, device=device, world_size=2, engine=engine)
    return remarks


@pytest.mark.parametrize(
    ("profiler", "options", "message"),
    [
        ({"steps": "15-10"}, {}, "profiler.steps: 15-10 ends at 10, before it begins at 15"),
        ({"ranks": [0, 2, 5]}, {}, "profiler.ranks: 2, 5, and this run has ranks 0 to 1"),
        ({"ranks": []}, {}, "profiler.ranks: no rank is recorded"),
        ({"tool": "torch"}, {"script": True}, "profiler.tool: torch is switched on in our own training loop"),
        ({"tool": "nsys"}, {"engine": "torchrun"}, "profiler.tool: nsys is put before the workers by our agent"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    profiler: dict[str, object], options: dict[str, bool], message: str
) -> None:
    (problem,) = remarks_of(profiler, **options).problems  # type: ignore[arg-type]
    assert problem.message.startswith(message)
    assert problem.hint


def test_all_of_it_is_said_at_once() -> None:
    keys = [problem.key for problem in remarks_of({"steps": "9-3", "ranks": [7]}).problems]
    assert keys == ["profiler.steps", "profiler.ranks"]


def test_nsys_records_all_of_a_script_and_of_a_run_on_the_cpu() -> None:
    for remarks in (remarks_of({"tool": "nsys"}, script=True, device="cuda"), remarks_of({"tool": "nsys"})):
        assert remarks.problems == []
        assert "nsys records everything" in remarks.notes[0]
    assert remarks_of({"tool": "nsys"}, device="cuda").notes == []


def test_a_recipe_without_a_profiler_is_not_looked_at() -> None:
    remarks = Remarks()
    check_recording(Recipe.model_validate(tiny()), remarks, device="cpu", world_size=1, engine="agent")
    assert (remarks.problems, remarks.notes) == ([], [])


def test_the_command_that_is_put_before_a_worker(tmp_path: Path) -> None:
    from launcher.agent.nsight import nsys_command
    from launcher.runs.rundir import RunDir

    run = RunDir(tmp_path)
    section = {"profiler": {"tool": "nsys", "ranks": [0, 2], "steps": "10-15"}}
    job = runs_values.plan(tmp_path, recipe=section, device="cuda")
    assert nsys_command(job, run, attempt=2, rank=2) == (
        "nsys",
        "profile",
        f"--output={tmp_path}/profile/attempt-2-rank-2",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt,cudnn,cublas",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    )
    assert nsys_command(job, run, attempt=2, rank=1) == ()
    on_cpu = nsys_command(runs_values.plan(tmp_path, recipe=section), run, attempt=1, rank=0)
    assert on_cpu[-1] == "--trace=osrt,nvtx"
    for other in ({}, {"profiler": None}, {"profiler": {"tool": "torch", "ranks": [0]}}):
        assert nsys_command(runs_values.plan(tmp_path, recipe=other), run, attempt=1, rank=0) == ()
