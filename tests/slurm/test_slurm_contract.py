"""The contract of executors, on a real cluster."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from test_contract_executors import (  # noqa: F401 - they are collected here, with the place below
    LIMIT_S,
    STAYS,
    Place,
    test_a_job_is_seen_from_its_submission_to_its_end,
    test_a_job_that_never_was_is_no_error,
    test_a_reference_is_text_that_another_process_can_use,
    test_checking_changes_nothing,
    wait_until_gone,
)

from launcher.executors.slurm import SlurmExecutor
from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.recipe.loader import script_recipe
from launcher.runs.create import create, resolved_recipe
from launcher.runs.events import read_events
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]


@pytest.fixture
def place(slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Jobs of one node. This process is on the login node once it knows the configuration."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.config))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "stays.py"
    script.write_text(STAYS)

    def make() -> tuple[Plan, RunDir]:
        loaded, facts = script_recipe(script, (), ("faults.grace=2s",)), gather_facts(slurm=True)
        plan = make_plan(loaded, facts, run_id="r0", runs_dir="runs", executor="slurm")
        run = create(plan, recipe_text="", resolved=resolved_recipe(plan), command=["launch"], facts=facts)
        return plan, run

    return Place(SlurmExecutor(), make, lambda run: (run.path / "go").touch())


def test_a_request_to_stop_ends_a_job_that_runs(place: Place) -> None:
    """One that waits leaves the queue, and nothing of it ever runs: that it was cancelled is in the events."""
    plan, run = place.make()
    ref = place.executor.submit(plan, run, attached=False)
    deadline_s = time.monotonic() + LIMIT_S
    while "worker_started" not in [event["event"] for event in read_events(run.path)]:
        assert time.monotonic() < deadline_s, "no worker was started"
        time.sleep(0.05)
    assert place.executor.cancel(ref, signum=signal.SIGTERM) is True
    wait_until_gone(place, ref)
