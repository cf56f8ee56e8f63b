from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_values
from agent_values import TOKEN

from launcher.planning.plan import Plan
from launcher.runs.rundir import RunDir


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Plan, RunDir]]:
    """A plan and a run directory with what an agent needs."""

    def make(**fields: Any) -> tuple[Plan, RunDir]:
        plan = runs_values.plan(tmp_path, **fields)
        plan = dataclasses.replace(plan, recipe={"tracking": {"wandb": {"mode": "disabled"}}})
        run = RunDir(Path(plan.run_dir))
        run.path.mkdir(parents=True)
        run.token.write_text(TOKEN.hex())
        return plan, run

    return make
