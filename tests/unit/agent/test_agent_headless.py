"""A job that SLURM keeps although its first node is gone: what another node does about it, and when nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_values import slurm_plan

from launcher.agent import headless, scheduler
from launcher.agent.allocation import Allocation, record_of
from launcher.agent.scheduler import JobView, SchedulerError
from launcher.runs.events import read_events
from launcher.runs.rundir import RunDir

PLACE = Allocation(number=1, head=("10.0.0.3", 20001), ends_s=None, nodes=2)


class Slurm:
    """What it is asked, and answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.hosts: list[tuple[str, ...] | SchedulerError] = [("n3", "n4"), ("n4",)]
        self.view = JobView(state="RUNNING")
        patch.setattr(scheduler, "job_hosts", self._hosts)
        patch.setattr(scheduler, "job_view", lambda job: self.view)
        patch.setattr(scheduler, "requeue", lambda job: self.calls.append(f"requeue {job}"))
        patch.setattr(scheduler, "cancel", lambda job: self.calls.append(f"cancel {job}"))
        patch.setattr(scheduler, "submit", self._submit)

    def _hosts(self, job: str) -> tuple[str, ...]:
        answer = self.hosts.pop(0)
        if isinstance(answer, SchedulerError):
            raise answer
        return answer

    def _submit(self, script: str, flags: list[str], *, cwd: str) -> str:
        self.calls.append(f"submit {' '.join(flags)}".strip())
        return "42"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(headless, "_LOOK_S", 0.0)
    monkeypatch.setattr(headless, "CLAIM_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    return Slurm(monkeypatch)


@pytest.fixture
def signals() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def see(folder: Path, signals: tuple[int, int], **fields: Any) -> RunDir:
    plan = slurm_plan(folder, min_nodes=1, **fields)
    named = [dataclasses.replace(node, host=f"n{node.index + 3}") for node in plan.nodes]
    run = RunDir(folder)
    headless.see_to_job(dataclasses.replace(plan, nodes=tuple(named)), run, 1, PLACE, signals=signals[0])
    return run


@pytest.mark.parametrize(
    ("how", "calls", "ref"),
    [
        ("requeue", ["requeue 41"], "slurm:41"),
        ("resubmit", ["submit", "cancel 41"], "slurm:42"),
        ("chain", ["cancel 41"], None),
        ("none", ["cancel 41"], None),
    ],
)
def test_the_job_goes_on_as_planned(  # noqa: PLR0917 - fixtures
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], how: str, calls: list[str], ref: str | None
) -> None:
    (tmp_path / "logs").mkdir()
    run = see(tmp_path, signals, continue_how=how)
    assert slurm.calls == calls
    found = [(event["ref"], event["cause"], event["allocation"]) for event in read_events(run.path)]
    assert found == ([] if ref is None else [(ref, "node_lost", 1)])
    assert "node 0 (n3) was lost, and SLURM has kept the job" in run.console.read_text()


def test_one_of_many_nodes_sees_to_it_and_the_next_where_that_one_is_gone(
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM may take long over a submission: nobody else may submit meanwhile."""
    (tmp_path / "logs").mkdir()
    views = [JobView(state="RUNNING")] * 4 + [JobView(state="COMPLETING")]
    monkeypatch.setattr(scheduler, "job_view", lambda job: views.pop(0))
    see(tmp_path, signals, continue_how="resubmit")
    assert slurm.calls == ["submit", "cancel 41"]
    slurm.hosts = [("n4",)]
    (tmp_path / "slurm" / "head-lost-1-1").touch()
    (tmp_path / "slurm" / "head-lost-1-2").touch()
    monkeypatch.setattr(headless, "_is_told_to_stop", lambda signals: False)
    see(tmp_path, signals, continue_how="resubmit")
    assert slurm.calls == ["submit", "cancel 41"], "three have claimed it, and the last one of them did it"
    assert not views
    slurm.hosts, slurm.view = [("n4",)], JobView(state="RUNNING")
    monkeypatch.setattr(scheduler, "job_view", lambda job: slurm.view)
    see(tmp_path, signals, continue_how="resubmit")
    assert slurm.calls == ["submit", "cancel 41"] * 2, "those that have claimed it are gone, and nothing has come of it"


def test_a_task_of_an_array_is_submitted_as_that_task(
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "40")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    see(tmp_path, signals, continue_how="resubmit")
    assert slurm.calls == ["submit --array=3", "cancel 40_3"]


def test_what_cannot_be_asked_now_is_asked_again(tmp_path: Path, slurm: Slurm, signals: tuple[int, int]) -> None:
    (tmp_path / "logs").mkdir()
    slurm.hosts = [SchedulerError("no answer", unreachable=True), (), ("n4",)]
    see(tmp_path, signals)
    assert slurm.calls == ["requeue 41"]


@pytest.mark.parametrize("view", [JobView(state="COMPLETING"), JobView(state="RUNNING", restarts=1)])
def test_another_node_was_faster(tmp_path: Path, slurm: Slurm, signals: tuple[int, int], view: JobView) -> None:
    slurm.view = view
    see(tmp_path, signals)
    assert slurm.calls == []


@pytest.mark.parametrize("which", ["result", "next allocation"])
def test_a_run_that_is_over_or_goes_on_elsewhere_needs_nobody(
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], which: str
) -> None:
    (tmp_path / "events").mkdir()
    (RunDir(tmp_path).result if which == "result" else record_of(tmp_path, 2)).touch()
    see(tmp_path, signals)
    assert slurm.calls == []
    assert len(slurm.hosts) == 2, "nobody has been asked"


def test_a_stop_ends_the_wait_and_the_end_of_a_command_does_not(
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headless, "_LOOK_S", 60.0)
    os.write(signals[1], bytes([signal.SIGCHLD, signal.SIGTERM]))
    see(tmp_path, signals)
    assert slurm.calls == []
    assert slurm.hosts == [("n4",)]


def test_a_first_node_that_stays_in_the_job_is_left_alone(
    tmp_path: Path, slurm: Slurm, signals: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this node that has lost the way to it: the run goes on there."""
    monkeypatch.setattr(headless, "DOWN_S", 0.0)
    see(tmp_path, signals)
    assert slurm.calls == []
