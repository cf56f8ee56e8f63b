"""Recipe + facts -> plan and dry run, word for word. Accept a change with `pytest tests/golden --force-regen`.

A case is a folder: `recipe.yaml` (none: `launch script.py`), `facts.json`, perhaps `options.json`
{overrides, flags, script, args, verbose, executor}; what comes out is `plan.json` and `dry_run.txt`, or `problems.txt`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pytest_regressions.file_regression import FileRegressionFixture

from launcher.errors import LaunchError
from launcher.planning.facts import Facts, facts_from_json
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.planning.render import render_plan
from launcher.recipe.loader import LoadedRecipe, load_recipe, script_recipe

CASES = sorted((Path(__file__).parent / "cases").iterdir())
BAD = [case for case in CASES if case.name.startswith("error_")]
GOOD = [case for case in CASES if case not in BAD]
HOME = Path("/home/ada/project")
"""Where all cases pretend to lie, so that no path of a real machine gets into a record."""


def load_case(case: Path, options: dict[str, Any]) -> LoadedRecipe:
    """The recipe of a case, moved to HOME. The current folder has to be the case."""
    flags = {key: (flag, value) for key, (flag, value) in options.get("flags", {}).items()}
    overrides = options.get("overrides", [])
    if "script" in options:
        loaded = script_recipe(Path(options["script"]), options["args"], overrides, flags=flags)
    else:
        loaded = load_recipe(Path("recipe.yaml"), overrides, flags=flags)
    paths = {name: getattr(loaded.recipe, name) for name in ("script", "workdir", "runs_dir", "python")}
    moved: dict[str, Any] = {name: _moved(case, path) for name, path in paths.items() if path is not None}
    if (template := loaded.recipe.slurm.template) is not None:
        moved["slurm"] = loaded.recipe.slurm.model_copy(update={"template": _moved(case, template)})
    return dataclasses.replace(
        loaded,
        recipe=loaded.recipe.model_copy(update=moved),
        source=None if loaded.source is None else HOME / loaded.source.relative_to(case),
    )


def _moved(case: Path, path: str) -> str:
    """A path in the folder of the case, or the folder above it."""
    inside = Path(path).is_relative_to(case)
    return str(HOME / Path(path).relative_to(case) if inside else HOME.parent)


def plan_case(case: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Facts, dict[str, Any]]:
    monkeypatch.chdir(case)
    monkeypatch.setattr("launcher.planning.plan.AGENT_START", "/opt/launcher/agent/start.py")
    monkeypatch.setattr("launcher.__version__", "1.2.3")
    file = case / "options.json"
    options = json.loads(file.read_text()) if file.exists() else {}
    facts = facts_from_json((case / "facts.json").read_text())
    executor = options.get("executor", "local")
    plan = make_plan(load_case(case, options), facts, run_id="r0", runs_dir="runs", executor=executor)
    return plan, facts, options


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_plan_is_as_recorded(
    case: Path, file_regression: FileRegressionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, _ = plan_case(case, monkeypatch)
    file_regression.check(plan.to_json(), fullpath=case / "plan.json")


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_dry_run_is_as_recorded(
    case: Path, file_regression: FileRegressionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, facts, options = plan_case(case, monkeypatch)
    text = render_plan(plan, facts, verbose=options.get("verbose", False))
    file_regression.check(text, fullpath=case / "dry_run.txt")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_problems_are_as_recorded(
    case: Path, file_regression: FileRegressionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError) as caught:
        plan_case(case, monkeypatch)
    file_regression.check(f"{caught.value}\n", fullpath=case / "problems.txt")


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_recorded_plan_reads_back_to_an_equal_one(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = plan_case(case, monkeypatch)
    assert Plan.from_json((case / "plan.json").read_text()) == plan


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 25
