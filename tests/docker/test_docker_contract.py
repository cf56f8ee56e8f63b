"""The contract of executors, in containers of a real engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from engine import BASE, Engine, site_packages
from test_contract_executors import (  # noqa: F401 - they are collected here, with the place below
    STAYS,
    Place,
    test_a_job_is_seen_from_its_submission_to_its_end,
    test_a_job_that_never_was_is_no_error,
    test_a_reference_is_text_that_another_process_can_use,
    test_a_request_to_stop_ends_the_job,
    test_checking_changes_nothing,
)

from launcher.executors.docker import DockerExecutor
from launcher.executors.docker_probe import probe_docker
from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.recipe.loader import script_recipe
from launcher.runs.create import create, resolved_recipe
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("docker"), pytest.mark.timeout(180)]


@pytest.fixture
def place(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """One container."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "stays.py"
    script.write_text(STAYS)
    source = site_packages()[1].split(":")[0]
    arguments = ["--env", "PYTHONPATH=/site-packages"]
    overrides = [f"docker.image={BASE}", f"docker.mounts=[{source}:/site-packages:ro]", "faults.grace=2s"]

    def make() -> tuple[Plan, RunDir]:
        loaded = script_recipe(script, (), (*overrides, f"docker.args={json.dumps(arguments)}"))
        facts = gather_facts()
        facts = dataclasses.replace(facts, docker=(probe_docker(loaded.recipe, gpus=False, folder=str(tmp_path)),))
        plan = make_plan(loaded, facts, run_id="stays-1", runs_dir="runs", executor="docker")
        run = create(plan, recipe_text="", resolved=resolved_recipe(plan), command=["launch"], facts=facts)
        return plan, run

    return Place(DockerExecutor(), make, lambda run: (run.path / "go").touch())
