"""Runs on SLURM seen from a login node: from the queue to the end, and when nobody says what became of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from launched import LAUNCH, LIMIT_S
from slurm_cluster import COMMAND, SlurmCluster
from slurm_launched import Login, OnSlurm, quickest_s

from launcher.executors.base import observe_job
from launcher.runs import fold
from launcher.runs.create import record_event
from launcher.runs.load import read_record
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause, RunState

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm")]

LIMIT_OF_STATUS_S = 1.0
WAITS = """
import toy
print("hello from", toy.ATTEMPT, flush=True)
toy.mark("up")
toy.wait_for(f"go{toy.ATTEMPT}")
"""
STOPS = """
import signal, sys, toy
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
toy.mark("up")
toy.wait_for("never")
"""


def status_of(login: Login, run_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(login("status", run_id, "--json").stdout)
    return fields


def test_a_run_is_followed_from_the_queue_over_a_requeue_to_its_end(
    slurm_cluster: SlurmCluster, on_slurm: OnSlurm, login: Login, recipe: Callable[..., Path]
) -> None:
    """F042: what an earlier allocation wrote is still there. F076: it is known who said what."""
    run = on_slurm(recipe(WAITS, nodes=2, nproc=1, resume="self"), "--begin", "now+1hour")
    run.wait_for_state("PENDING")
    fields = status_of(login, run.run_id)
    assert (fields["state"], fields["queue"]["reason"]) == ("PENDING", "BeginTime")
    assert fields["queue"]["starts_s"] == pytest.approx(time.time() + 3600, abs=60)
    assert "begin time" in fields["queue"]["meaning"]

    with subprocess.Popen(
        [COMMAND, "run", LAUNCH, "logs", run.run_id, "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stderr is not None
        first = follower.stderr.readline()
        job = run.job
        slurm_cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        run.wait_for_marks("up", ranks=2)
        fields = status_of(login, run.run_id)
        assert (fields["state"], fields["queue"]["state"], fields["attempts"]) == ("RUNNING", "RUNNING", 1)
        assert [each["job"] for each in fields["allocations"]] == [job]
        slurm_cluster.run("scontrol", "requeue", job)
        run.wait_for_marks("up", ranks=2, attempt=2)
        (run.run.path / "go2").touch()
        said, told = follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 0, told
    assert "0:0 hello from 1" in said
    assert "0:0 hello from 2" in said
    assert "waits: BeginTime" in first
    assert "waits: BeginTime" in told, told
    assert "allocation 1 ended: requeued from outside" in told
    assert f"{run.run_id}  SUCCEEDED" in told.splitlines()[-1]
    assert login("logs", run.run_id, "--attempt", "1", "--rank", "1").stdout == "hello from 1\n"

    report = json.loads(login("report", run.run_id, "--json").stdout)
    assert [each["cause"] for each in report["allocations"]] == ["requeued", "done"]
    assert [row["allocation"] for row in report["attempts"]] == [1, 2]
    assert report["time"]["queue_s"] > 5.0, "a requeued job waits at least that long here"


def test_a_cancelled_run_leaves_the_queue_or_saves_first(
    slurm_cluster: SlurmCluster, on_slurm: OnSlurm, login: Login, recipe: Callable[..., Path]
) -> None:
    waiting = on_slurm(recipe(STOPS, nodes=2, nproc=1), "--begin", "now+1hour")
    running = on_slurm(recipe(STOPS, nodes=2, nproc=1))
    waiting.wait_for_state("PENDING")
    cancelled = login("cancel", waiting.run_id)
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert cancelled.stdout.splitlines()[-1].startswith(f"{waiting.run_id} CANCELLED: stopped on request")
    assert slurm_cluster.state_of(waiting.job) == "CANCELLED"
    assert login("cancel", waiting.run_id).stdout == f"{waiting.run_id} has ended already: CANCELLED\n"

    running.wait_for_marks("up", ranks=2)
    cancelled = login("cancel", running.run_id)
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert f"{running.run_id} CANCELLED" in cancelled.stdout
    fields = status_of(login, running.run_id)
    assert (fields["state"], fields["exit_code"]) == ("CANCELLED", 75), "it was asked, not killed"
    table = login("status", waiting.run_id, running.run_id).stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [[run.run_id, "CANCELLED"] for run in (waiting, running)]


def is_batch_side(cmdline: Path, run_id: str) -> bool:
    try:
        words = cmdline.read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--batch" in words and any(word.endswith(run_id.encode()) for word in words)


@pytest.fixture
def no_accounting(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """slurmdbd is down meanwhile."""
    assert slurm_cluster.command("stop", "slurmdbd").returncode == 0
    yield
    slurm_cluster.command("start")
    assert ("ctl", "slurmdbd") in slurm_cluster.pids()


@pytest.fixture
def vanished(slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RunDir]:
    """A run whose job is not one of ours; its last words need no time to arrive."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.config))
    monkeypatch.setattr(fold, "_LAST_WORDS_S", 0.0)

    def make(job: str) -> RunDir:
        run = values.create(tmp_path / "runs", run_id=f"vanished-{job}")
        run.slurm.mkdir()
        record_event(run, "submitted", ref=f"slurm:{job}")
        return run

    return make


@pytest.mark.usefixtures("no_accounting")
def test_all_that_is_seen_is_seen_without_accounting(
    on_slurm: OnSlurm, login: Login, recipe: Callable[..., Path], vanished: Callable[[str], RunDir]
) -> None:
    """F051: success, failure, a job that is cancelled, one that dies, one that nobody knows. No warning, no wait."""
    good = on_slurm(recipe("print('fine')", nodes=2, nproc=1, name="good"))
    bad = on_slurm(recipe("import sys; sys.exit(7)", nodes=1, nproc=1))
    gone = on_slurm(recipe("print('fine')", nodes=1, nproc=1, name="gone"), "--begin", "now+1hour")
    gone.cluster.run("scancel", gone.job)
    lost = on_slurm(recipe(WAITS, nodes=1, nproc=1, name="lost"))
    lost.wait_for_marks("up", ranks=1)
    batch_sides = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if is_batch_side(path, lost.run_id)]
    os.kill(int(batch_sides[0].name), signal.SIGKILL)  # as a node that dies: nobody says how the run has ended
    assert (good.wait_for_result()["state"], bad.wait_for_result()["exit_code"]) == ("SUCCEEDED", 7)
    for run, state in ((good, "SUCCEEDED"), (bad, "FAILED"), (gone, "CANCELLED")):
        said = login("status", run.run_id)
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.startswith(f"{run.run_id}  {state}"), said.stdout
        report = login("report", run.run_id)
        assert (report.returncode, report.stderr) == (0, "")
    listed = json.loads(login("ls", "--json").stdout)["runs"]
    assert {row["run_id"]: row["state"] for row in listed if row["run_id"] != lost.run_id} == {
        good.run_id: "SUCCEEDED",
        bad.run_id: "FAILED",
        gone.run_id: "CANCELLED",
    }
    lost.cluster.wait_until(lambda: "FAILED" in login("status", lost.run_id).stdout, lambda: lost.console)
    begun_s = time.monotonic()
    record = read_record(vanished("99999999"), observe_job)
    assert time.monotonic() - begun_s < 10.0
    assert record.state is RunState.FAILED
    assert "SLURM does not know job 99999999 any more" in record.sentence


def test_a_job_that_ended_before_anything_of_ours_ran_says_what_bash_said(
    slurm_cluster: SlurmCluster, vanished: Callable[[str], RunDir], tmp_path: Path
) -> None:
    """F027: the log, or where there should be one."""
    job = slurm_cluster.submit(
        "echo 'launch | setup failed: n1 has no python'; exit 127", f"--output={tmp_path}/%j.log"
    )
    slurm_cluster.wait_for(job, "FAILED")
    run = vanished(job)
    record = read_record(run, observe_job)
    assert (record.state, record.cause) == (RunState.FAILED, Cause.LAUNCHER_LOST)
    assert record.reason == f"it left no output in {run.slurm}: SLURM could not write there, or never ran it"
    shutil.copy(tmp_path / f"{job}.log", run.slurm)
    assert read_record(run, observe_job).reason == "launch | setup failed: n1 has no python"


def test_the_status_of_200_jobs_is_one_question(slurm_cluster: SlurmCluster, login: Login, tmp_path: Path) -> None:
    """Beside jobs of other tools: F052."""
    other = slurm_cluster.submit("sleep 1", "--begin=now+1hour", "--job-name=interactive | x")
    array = slurm_cluster.submit("sleep 1", "--begin=now+1hour", "--array=0-99")
    second = slurm_cluster.submit("sleep 1", "--begin=now+1hour", "--array=0-99")
    try:
        refs = [f"slurm:{job}_{task}" for job in (array, second) for task in range(100)]
        for index, ref in enumerate(refs):
            record_event(values.create(tmp_path / "runs", run_id=f"many-{index}"), "submitted", ref=ref)
        wrapper, calls, real = tmp_path / "bin" / "squeue", tmp_path / "calls", shutil.which("squeue")
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {real} "$@"\n')
        wrapper.chmod(0o755)
        path = {"PATH": f"{wrapper.parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}

        def ask() -> None:
            calls.unlink(missing_ok=True)
            said = login("status", "many-*", "--json", env=path)
            assert said.returncode == 0, said.stderr
            runs = json.loads(said.stdout)["runs"]
            assert [(run["state"], run["queue"]["state"]) for run in runs] == [("PENDING", "PENDING")] * 200
            assert len(calls.read_text().splitlines()) == 1

        assert quickest_s(ask, limit_s=LIMIT_OF_STATUS_S) < LIMIT_OF_STATUS_S
    finally:
        slurm_cluster.run("scancel", other, array, second)
