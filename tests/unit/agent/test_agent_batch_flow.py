"""The batch side from its start to its exit code, against programs that answer as SLURM's do. One node, no agents."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_values import slurm_plan

from launcher.agent import start
from launcher.agent.allocation import record_of
from launcher.planning.plan import NodePlan
from launcher.runs.events import Event, EventWriter, read_events
from launcher.runs.rundir import RunDir

SCONTROL = """
case "$1 $2" in
    "show hostnames") cat "$SITE/hosts" ;;
    "show job") cat "$SITE/job" ;;
    requeue*) echo "requeue $2" >>"$SITE/calls" ;;
esac
"""
SBATCH = """
echo "sbatch $*" >>"$SITE/calls"
cat >"$SITE/again.sh"
echo 900
"""
SRUN = """
import json, os, pathlib, sys, time
site, run = pathlib.Path(os.environ["SITE"]), pathlib.Path(os.environ["RUN"])
(site / "told").write_text(json.dumps(dict(os.environ)))
(site / "argv").write_text(json.dumps(sys.argv[1:]))
with open(run / "events" / "head.jsonl", "a") as file:
    for event in json.loads((site / "says").read_text()):
        print(json.dumps({"time": time.time(), **event}), file=file)
if (site / "result").exists():
    (site / "result").rename(run / "result.json")
sys.exit(int((site / "code").read_text()))
"""
LIMIT_S = 60.0
STOPPED = {"event": "stopped", "reason": "SIGTERM", "cause": "signal", "saved": True, "exit_code": 75}
FINISHED = {"event": "finished", "state": "FAILED", "cause": "worker_error", "exit_code": 7, "reason": "rank 1"}


class Job:
    """A job whose tasks say what the test lets them say."""

    def __init__(self, folder: Path, run: RunDir) -> None:
        self.site, self.run = folder, run
        self.started: list[subprocess.Popen[bytes]] = []
        scripts = {"scontrol": SCONTROL, "squeue": 'cat "$SITE/left"', "sbatch": SBATCH}
        texts = {name: f"#!/bin/sh\n{text}\n" for name, text in scripts.items()}
        for name, text in {**texts, "srun": f"#!{sys.executable}\n{SRUN}"}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.says(hosts="n1\n", job="JobId=41 JobState=RUNNING Restarts=0\n", left="1:00:00\n", says="[]", code="0")

    def says(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.site / name).write_text(text)

    def begin(self, *, tasks: list[Event] | None = None, code: int = 0, **env: str) -> int:
        """One allocation, in which the head agent writes these events; the exit code of its batch script."""
        self.says(says=json.dumps(tasks or []), code=str(code))
        return self.start(**env).wait(LIMIT_S)

    def start(self, **env: str) -> subprocess.Popen[bytes]:
        """Its batch script."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        own = {"PATH": f"{self.site}:/usr/bin:/bin", "SITE": str(self.site), "RUN": str(self.run.path)}
        job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
        argv = [sys.executable, "-P", start.__file__, "--run-dir", str(self.run.path), "--batch"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(argv, env={**clean, **own, **job, **env}, stdin=quiet, stdout=quiet, stderr=quiet)
        self.started.append(process)
        return process

    def end(self) -> None:
        """Of what a failed test has left: nothing."""
        (self.site / "heard").touch()  # the task ends
        for process in self.started:
            process.kill()
            process.wait()

    def happened(self, name: str) -> list[Event]:
        return [event for event in read_events(self.run.path) if event["event"] == name]

    @property
    def calls(self) -> list[str]:
        """What SLURM was asked to do."""
        path = self.site / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.run.result.read_text()))


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(*, nodes: int = 1, plan_nodes: tuple[NodePlan, ...] | None = None, **fields: Any) -> Job:
        plan = slurm_plan(tmp_path, **{"srun": ("srun", "--nodes=1"), "script": "#!/bin/bash\n# it\n", **fields})
        plan = dataclasses.replace(plan, nodes=(plan_nodes or plan.nodes)[:nodes])
        run = RunDir(Path(plan.run_dir))
        run.path.mkdir(parents=True)
        run.plan.write_text(plan.to_json())
        EventWriter(run.path, "launch-0").write("created")
        folder = tmp_path / "site"
        folder.mkdir()
        jobs.append(Job(folder, run))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def stopped(allocation: int = 1) -> list[Event]:
    return [{"event": "stop_requested", "reason": "SIGTERM", "grace_s": 25}, {**STOPPED, "allocation": allocation}]


def test_a_stop_that_has_saved_is_requeued_once(make_job: MakeJob) -> None:
    """F043: and the exit code is that of a job that has done what it should."""
    job = make_job()
    worked = [{"event": "attempt_started", "attempt": 1}, {"event": "progress", "attempt": 1, "step": 12}]
    assert job.begin(tasks=[*worked, *stopped()]) == 0
    assert job.calls == ["requeue 41"]
    (ended,) = job.happened("allocation_ended")
    assert (ended["cause"], ended["saved"], ended["step"]) == ("signal", True, 12)
    assert job.happened("requeued")[0]["ref"] == "slurm:41"
    assert not job.run.result.exists()
    assert job.happened("finished") == []


def test_what_somebody_else_has_requeued_is_not_requeued_again(make_job: MakeJob) -> None:
    job = make_job()
    job.says(job="JobId=41 JobState=COMPLETING Restarts=1\n")
    assert job.begin(tasks=stopped()) == 0
    assert job.calls == []
    assert (job.happened("requeued")[0]["cause"], job.happened("requeued")[0]["how"]) == ("requeued", "requeue")


def test_a_job_that_was_requeued_before_is_not_taken_for_requeued_now(make_job: MakeJob) -> None:
    job = make_job()
    job.says(job="JobId=41 JobState=RUNNING Restarts=1\n")
    assert job.begin(tasks=stopped(), SLURM_RESTART_COUNT="1") == 0
    assert job.calls == ["requeue 41"]
    assert job.happened("requeued")[0]["cause"] == "signal"


def test_a_new_job_has_the_same_script_and_of_an_array_the_same_task(make_job: MakeJob) -> None:
    job = make_job(continue_how="resubmit")
    task = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    assert job.begin(tasks=stopped(), **task) == 0
    assert job.calls == ["sbatch --parsable --array=3"]
    assert (job.site / "again.sh").read_text() == "#!/bin/bash\n# it\n"
    assert job.happened("requeued")[0]["ref"] == "slurm:900"


def test_the_end_of_the_run_is_the_end_of_the_job_with_its_exit_code(make_job: MakeJob) -> None:
    """F013: and a job of a run that has ended does nothing, whoever starts it again."""
    job = make_job()
    job.says(result=json.dumps(FINISHED))
    assert job.begin(tasks=[FINISHED], code=1) == 7
    (ended,) = job.happened("allocation_ended")
    assert (ended["cause"], ended["exit_code"]) == ("worker_error", 7)
    assert job.calls == []
    before = len(read_events(job.run.path))
    assert job.begin() == 0
    assert len(read_events(job.run.path)) == before
    assert "this run is finished" in job.run.console.read_text()


@pytest.mark.parametrize("ended", [True, False])
def test_a_spoiled_result_is_no_end_unless_an_event_says_so(make_job: MakeJob, ended: bool) -> None:
    job = make_job()
    if ended:
        EventWriter(job.run.path, "head").write(**FINISHED)
    job.run.result.write_bytes(b"\0" * 40)
    assert job.begin(tasks=stopped()) == 0
    assert job.calls == ([] if ended else ["requeue 41"])
    assert (job.run.path / "result-damaged.json").exists() is not ended


def test_the_tasks_are_told_where_the_head_is_when_the_job_ends_and_which_allocation_it_is(make_job: MakeJob) -> None:
    job = make_job()
    job.begin(tasks=stopped())
    told = json.loads((job.site / "told").read_text())
    head = job.happened("allocation_started")[0]["head"]
    assert told["LAUNCH_HEAD"] == f"{head['address']}:{head['port']}"
    assert (told["LAUNCH_SECONDS_LEFT"], told["LAUNCH_ALLOCATION"]) == ("3600", "1")
    job.run.stop_file.touch()  # of the allocation that was stopped
    job.says(left="UNLIMITED\n")
    job.begin(tasks=stopped(2))
    told = json.loads((job.site / "told").read_text())
    assert told["LAUNCH_ALLOCATION"] == "2"
    assert "LAUNCH_SECONDS_LEFT" not in told
    assert not job.run.stop_file.exists()


@pytest.mark.parametrize("hosts", ["n1\nn2\nn3\n", "n1\n"])
def test_a_job_of_another_size_starts_nothing(make_job: MakeJob, hosts: str) -> None:
    """F034"""
    job = make_job(nodes=2)
    job.says(hosts=hosts)
    assert job.begin() == 3
    assert (job.result["state"], job.result["cause"]) == ("FAILED", "refused")
    assert [event["cause"] for event in job.happened("allocation_ended")] == ["refused"]
    assert not (job.site / "told").exists()


FOUR = tuple(NodePlan(index=index, host="", address="", cpus=(), gpus=()) for index in range(4))


@pytest.mark.parametrize(("least", "hosts"), [(2, 1), (1, 5)])
def test_a_job_outside_of_the_range_starts_nothing(make_job: MakeJob, least: int, hosts: int) -> None:
    job = make_job(nodes=4, plan_nodes=FOUR, min_nodes=least)
    job.says(hosts="".join(f"n{number}\n" for number in range(hosts)))
    assert job.begin() == 3
    assert f"{least} to 4 nodes were asked for (resources.nodes), and the job has {hosts}" in job.result["reason"]


def test_of_a_range_the_agents_are_as_many_as_the_job_has_nodes(make_job: MakeJob) -> None:
    """The line of the plan is for the most; what the user has added to it stays."""
    job = make_job(nodes=4, plan_nodes=FOUR, min_nodes=1, srun=("srun", "--nodes=4", "--ntasks=4", "x", "--nodes=4"))
    assert job.begin(tasks=stopped()) == 0
    assert json.loads((job.site / "told").read_text())["LAUNCH_NODES"] == "1"
    assert json.loads((job.site / "argv").read_text()) == ["--nodes=1", "--ntasks=1", "x", "--nodes=4"]


def test_a_node_that_could_not_begin_ends_a_run_of_a_range_only_where_it_is_the_first(make_job: MakeJob) -> None:
    failed = {"event": "node_failed", "host": "n", "cause": "setup", "exit_code": 9, "message": "no module"}
    job = make_job(nodes=4, plan_nodes=FOUR, min_nodes=1)
    assert job.begin(tasks=[{**failed, "node": 2}, *stopped()]) == 0
    assert job.calls == ["requeue 41"]
    assert job.begin(tasks=[{**failed, "node": 0}]) == 9
    assert job.result["cause"] == "setup"


def test_nodes_are_in_the_order_of_slurm(make_job: MakeJob) -> None:
    """F032: whatever their names; there is no way to these, so nothing starts."""
    job = make_job(nodes=2)
    job.says(hosts="n9.invalid\nn1.invalid\n")
    assert job.begin() == 1
    assert job.happened("allocation_started")[0]["nodes"] == ["n9.invalid", "n1.invalid"]
    assert job.result["cause"] == "rendezvous"
    assert "no address of n9.invalid leads to the other nodes" in job.result["reason"]


def test_a_cancel_between_two_allocations_is_heard(make_job: MakeJob) -> None:
    job = make_job()
    assert job.begin(tasks=stopped()) == 0
    EventWriter(job.run.path, "launch-1").write("cancel_requested")
    assert job.begin() == 143
    assert (job.result["state"], job.result["reason"]) == ("CANCELLED", "cancelled between two allocations")
    assert job.calls == ["requeue 41"], "not again"


def test_an_allocation_whose_batch_side_was_lost_is_closed_by_the_next(make_job: MakeJob) -> None:
    """F094: with the node that was lost."""
    job = make_job()
    lost = EventWriter(job.run.path, "batch-1")
    lost.write("allocation_started", allocation=1, job="41", nodes=["n7"])
    assert job.begin(tasks=stopped(2)) == 0
    first, second = job.happened("allocation_ended")
    assert (first["allocation"], first["cause"], first["host"]) == (1, "node_lost", "n7")
    assert (second["allocation"], second["cause"]) == (2, "signal")
    job.begin(tasks=stopped(3))
    assert [event["allocation"] for event in job.happened("allocation_ended")] == [1, 2, 3], "once"


def test_an_allocation_that_was_followed_by_another_says_nothing_more(make_job: MakeJob) -> None:
    """F094: its node was cut off, and SLURM has started the job elsewhere."""
    job = make_job()
    record = record_of(job.run.path, 2)
    srun = job.site / "srun"
    srun.write_text(srun.read_text().replace("sys.exit(", f"open({str(record)!r}, 'w').close()\nsys.exit("))
    assert job.begin(tasks=stopped()) == 0
    assert job.calls == []
    assert job.happened("allocation_ended") == []


HEARS = """
import os, pathlib, signal, sys, time
site = pathlib.Path(os.environ["SITE"])
signal.signal(signal.SIGUSR1, lambda *_: (site / "heard").touch())
(site / "up").touch()
while not (site / "heard").exists():
    time.sleep(0.01)
"""


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_end_is_written_down_before_slurm_kills(make_job: MakeJob) -> None:
    """F016: whether the tasks have left or not."""
    job = make_job(kill_wait_s=3.0)
    job.says(job="JobId=41 JobState=COMPLETING Restarts=0\n", srun=f"#!{sys.executable}\n{HEARS}")
    process = job.start()
    wait_for(job.site / "up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143
    assert job.result["reason"] == "cancelled from outside (scancel)"


@pytest.mark.parametrize(("left", "ignored"), [("1:00:00\n", True), ("0:20\n", False)])
def test_a_warning_to_the_batch_script_alone_reaches_the_tasks(make_job: MakeJob, left: str, *, ignored: bool) -> None:
    """F015: srun passes it on, and the head agent decides; what it decides is known here too."""
    job = make_job()
    job.says(left=left, srun=f"#!{sys.executable}\n{HEARS}")
    process = job.start()
    wait_for(job.site / "up")
    process.send_signal(signal.SIGUSR1)
    process.wait(LIMIT_S)
    (heard,) = job.happened("signal_heard")
    assert (heard["signal"], heard["ignored"]) == ("SIGUSR1", ignored)


def test_what_cannot_go_on_has_the_last_word_here(make_job: MakeJob) -> None:
    """F043"""
    job = make_job(resumable=False)
    assert job.begin(tasks=stopped()) == 75
    assert job.calls == []
    assert len(job.happened("allocation_ended")) == 1
    assert (job.result["state"], job.result["exit_code"]) == ("CANCELLED", 75)
    assert "declares no `resume:`" in job.result["reason"]


def test_a_requeue_that_slurm_refuses_ends_the_run_with_its_words(make_job: MakeJob) -> None:
    job = make_job()
    refuses = "requeue*) echo 'Requeue is disabled for the job 41' >&2; exit 1 ;;\n    requeue*)"
    job.says(scontrol="#!/bin/sh\n" + SCONTROL.replace("requeue*)", refuses))
    assert job.begin(tasks=stopped()) == 75
    assert (job.result["state"], job.result["cause"]) == ("CANCELLED", "signal")
    assert "requeue was refused" in job.result["reason"]
    assert "Requeue is disabled" in job.result["reason"]


def test_a_node_that_may_be_cut_off_leaves_the_end_open(make_job: MakeJob) -> None:
    """F094: SLURM requeues the job by itself; a last word from here would be wrong."""
    job = make_job()
    away = "show\\ job) echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1 ;;\n"
    job.says(scontrol="#!/bin/sh\n" + SCONTROL.replace('    "show job")', f'    {away}    "show job")'))
    assert job.begin(tasks=[{"event": "node_lost", "node": 0, "host": "n1", "reason": "nothing heard"}]) == 1
    assert not job.run.result.exists()
    assert job.happened("finished") == []
    assert job.calls == []
    assert "if SLURM does not requeue the job, launch resume" in job.run.console.read_text()
