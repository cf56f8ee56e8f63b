"""What SLURM prints, read; what it says when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent import scheduler
from launcher.agent.scheduler import JobView, SchedulerError

RUNNING = (
    "JobId=1046 JobName=probe.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 QOS=normal "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:07 TimeLimit=UNLIMITED TimeMin=N/A PreemptEligibleTime=2026-11-30T09:26:55 PreemptTime=None "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-30T09:26:55 Scheduler=Main Partition=low"
)


def test_a_job_that_runs() -> None:
    assert scheduler.read_job(RUNNING) == JobView(state="RUNNING")


def test_a_job_in_the_grace_time_of_a_preemption() -> None:
    preempted = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-30T09:41:27")
    assert scheduler.read_job(preempted).preempted


def test_a_job_that_was_requeued_while_its_batch_script_lives() -> None:
    """As 22.05 has it: still COMPLETING, one restart more, and no fields of preemption at all."""
    text = "JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=Unknown SuspendTime=None"
    assert scheduler.read_job(text) == JobView(state="COMPLETING", restarts=1)


@pytest.mark.parametrize(
    ("limit", "used", "left_s"),
    [("00:01:00", "00:01:04", -4.0), ("1-00:00:00", "00:30:00", 84600.0), ("UNLIMITED", "00:01:00", None)],
)
def test_how_long_a_job_has_until_its_limit_as_it_is_now(limit: str, used: str, left_s: float | None) -> None:
    view = scheduler.read_job(f"JobState=COMPLETING Restarts=0 RunTime={used} TimeLimit={limit} TimeMin=N/A")
    assert view.seconds_left == left_s


def test_fields_that_a_version_does_not_have() -> None:
    assert scheduler.read_job("") == JobView(state="UNKNOWN")
    assert scheduler.read_job("JobState=FUTURE_STATE Restarts=many") == JobView(state="FUTURE_STATE")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59", None),
        ("0:59\n", 59.0),
        ("12:34", 754.0),
        ("2:03:04", 7384.0),
        ("1-02:03:04", 93784.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", 0.0),
        ("364-23:59:59", None),
        ("", None),
    ],
)
def test_time_left(text: str, seconds: float | None) -> None:
    assert scheduler.read_time_left(text) == seconds


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_refusal_is_said_in_slurms_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "scontrol", "echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SchedulerError) as caught:
        scheduler.requeue("7")
    assert str(caught.value) == "`scontrol requeue 7`: Requested operation is presently disabled for job 7"
    assert not caught.value.unreachable


def test_a_controller_that_is_not_reached_has_refused_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SchedulerError) as caught:
        scheduler.job_view("7")
    assert caught.value.unreachable


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F034 F046: inside an image there may be none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="there is no `squeue` on this node"):
        scheduler.seconds_left("7")


def test_a_job_is_submitted_again_as_from_a_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(
        tmp_path,
        "sbatch",
        f"cat > {tmp_path}/script; env > {tmp_path}/env; echo \"$@\" > {tmp_path}/argv; echo '42;dev'",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/elsewhere.conf")
    monkeypatch.setenv("MINE", "x")
    assert scheduler.submit("#!/bin/bash\ntrue\n", ["--array=3"], cwd=str(tmp_path)) == "42"
    env = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in env
    assert "SLURM_CONF=/etc/elsewhere.conf" in env, "how SLURM is found is no part of the job"
    assert "MINE=x" in env
    assert (tmp_path / "script").read_text() == "#!/bin/bash\ntrue\n"
    assert (tmp_path / "argv").read_text() == "--parsable --array=3\n"


def answers(*texts: str) -> Callable[[], str]:
    left = list(texts)

    def ask() -> str:
        text = left.pop(0)
        if text.startswith("scontrol"):
            return text
        raise SchedulerError(text, unreachable="no" not in text)

    return ask


def test_a_controller_that_is_away_is_asked_again() -> None:
    """It is restarted in the seconds in which a run has to go on."""
    away = "Unable to contact slurm controller (connect failure)"
    found = scheduler.persist(answers(away, away, "scontrol 7"), is_in_vain=lambda _: False, limit_s=60, pause_s=0)
    assert found == "scontrol 7"


@pytest.mark.parametrize(
    ("limit_s", "in_vain", "said"), [(0, False, "away"), (60, True, "away"), (60, False, "no such job")]
)
def test_it_is_not_asked_for_ever_nor_in_vain(limit_s: float, said: str, *, in_vain: bool) -> None:
    with pytest.raises(SchedulerError, match=said):
        scheduler.persist(answers(said, "scontrol"), is_in_vain=lambda _: in_vain, limit_s=limit_s, pause_s=0)


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("`sbatch`: Unable to contact slurm controller (connect failure)", False),
        ("`sbatch`: Socket timed out on send/recv operation", True),
        ("`sbatch --parsable` gave no answer in 60 s", True),
    ],
)
def test_what_may_have_been_heard_is_not_asked_for_twice(text: str, *, heard: bool) -> None:
    assert SchedulerError(text, unreachable=True).heard == heard


def test_nodes_that_are_down() -> None:
    """Once for each partition; `down*` has not answered for long."""
    text = "n1 idle\nn2 down*\nn2 down*\nn3 draining\nn4 down\nn5 failing\nn6 idle*\n\nsinfo: odd line\n"
    assert scheduler.read_down(text) == ("n2", "n4", "n5")


def test_a_submission_from_inside_a_job_takes_nothing_of_the_job_along_and_every_setting() -> None:
    settings = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OMPI_MCA_btl": "tcp", "MPI_HOME": "/opt/mpi"}
    settings |= {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    job = {"SLURM_JOB_ID": "1", "SALLOC_NTASKS": "2", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "RANK": "0"}
    job |= {"MPI_LOCALRANKID": "0", "TORCHELASTIC_RUN_ID": "x", "LAUNCH_HEAD": "n1:5", "LAUNCH_ATTEMPT": "3"}
    assert scheduler.outside({**settings, **job}) == settings
