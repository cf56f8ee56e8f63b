"""What SLURM says about jobs: outputs of several versions, and clients that are missing, slow or in trouble."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from launcher.errors import Refused
from launcher.executors import slurm_jobs
from launcher.executors.slurm_jobs import cancel_job, observe_jobs, parse_sacct, parse_squeue
from launcher.runs.observed import Observation

SQUEUE = {
    # 22.05, SLURM_TIME_FORMAT=%s
    "33|RUNNING|1796030645|1827566645|UNLIMITED|n[1-2]|None": Observation(alive=True, state="RUNNING", nodes="n[1-2]"),
    "32|RUNNING|1796030645|1827566645|365-00:00:00|n1|None": Observation(alive=True, state="RUNNING", nodes="n1"),
    "34_0|RUNNING|1796030645|1796030705|1:00|n1|None": Observation(
        alive=True, state="RUNNING", nodes="n1", ends_s=1796030705.0
    ),
    "34_3|PENDING|N/A|N/A|UNLIMITED||JobArrayTaskLimit": Observation(
        alive=True, state="PENDING", reason="JobArrayTaskLimit"
    ),
    "35|PENDING|1796034245|NONE|UNLIMITED||BeginTime": Observation(
        alive=True, state="PENDING", reason="BeginTime", starts_s=1796034245.0
    ),
    "36|FAILED|1796030645|1796030645|UNLIMITED|n3|NonZeroExitCode": Observation(
        alive=False, state="FAILED", nodes="n3", ends_s=1796030645.0
    ),
    "1|CANCELLED|1796030597|1796030597|UNLIMITED||BeginTime": Observation(
        alive=False, state="CANCELLED", ends_s=1796030597.0
    ),
    # 23.11: a reason with spaces and a bar
    "40|PENDING|N/A|N/A|1:00:00||Nodes required for job are DOWN, DRAINED | reserved": Observation(
        alive=True, state="PENDING", reason="Nodes required for job are DOWN, DRAINED | reserved"
    ),
    # 24.11: a pending heterogeneous job
    "41+0|PENDING|N/A|N/A|5:00||Priority": Observation(alive=True, state="PENDING", reason="Priority"),
    "42|COMPLETING|1796030645|1796030700|1:00|n1|None": Observation(
        alive=True, state="COMPLETING", nodes="n1", ends_s=1796030700.0
    ),
    # of the future
    "43|HIBERNATING|1796030645|1796030700|1:00|n1|None": Observation(
        alive=None,
        state="HIBERNATING",
        nodes="n1",
        ends_s=1796030700.0,
        detail="SLURM calls its state 'HIBERNATING', which is not known here",
    ),
}


@pytest.mark.parametrize("line", SQUEUE)
def test_a_line_of_squeue_is_an_observation(line: str) -> None:
    """F052."""
    assert list(parse_squeue(f"{line}\n").values()) == [SQUEUE[line]]


def test_what_is_no_line_of_a_job_is_passed_over() -> None:
    """F052: headers, banners of a site, another tool's format, half a line."""
    text = "Welcome to the cluster | have fun\nJOBID|STATE\n12|RUN\n\ninteractive|RUNNING|1|1|1|n1|None\n7|"
    assert parse_squeue(text) == parse_sacct(text) == {}


def test_a_time_that_is_not_in_seconds_is_local() -> None:
    line = "35|PENDING|2026-11-30T10:24:05|NONE|UNLIMITED||BeginTime"
    assert parse_squeue(line)["35"].starts_s == datetime(2026, 11, 30, 10, 24, 5).astimezone().timestamp()
    assert parse_squeue(line.replace("2026-11-30T10:24:05", "tomorrow"))["35"].starts_s is None


def test_what_the_accounting_says() -> None:
    text = """\
35|CANCELLED by 1000|0:0|1796030648|None assigned
36|FAILED|7:0|1796030645|n3
37|OUT_OF_MEMORY|0:125|1796030645|n3
38|NODE_FAIL|1:0|Unknown|n[3-4]
39|RUNNING|0:0|Unknown|n1
39.batch|COMPLETED|0:0|1796030645|n1
44|TIMEOUT+|0:15|1796030645|n1
"""
    found = parse_sacct(text)
    assert {ident: (each.state, each.exit_code) for ident, each in found.items() if ident != "39.batch"} == {
        "35": ("CANCELLED", 0),
        "36": ("FAILED", 7),
        "37": ("OUT_OF_MEMORY", None),
        "38": ("NODE_FAIL", 1),
        "39": ("", 0),
        "44": ("TIMEOUT", 143),
    }
    assert {each.alive for each in found.values()} == {False}
    assert found["39"].detail == "squeue does not know it, and the accounting calls it RUNNING"
    assert (found["36"].ends_s, found["38"].ends_s) == (1796030645.0, None)


Client = Callable[[str, str], None]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Make a client of SLURM of a few lines of shell; each call is noted with its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def make(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "$0 $*" >> "$CALLS"\n{script}\n')
        path.chmod(0o755)

    for name in ("squeue", "sacct", "scancel"):
        make(name, "echo not meant to be called >&2; exit 1")
    return make


def calls(tmp_path: Path, name: str) -> list[str]:
    lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return [line.partition(" ")[2] for line in lines if line.partition(" ")[0].endswith(f"/{name}")]


def test_any_number_of_jobs_is_one_call(client: Client, tmp_path: Path) -> None:
    client(
        "squeue", "seq 200 | sed 's/$/|RUNNING|1796030645|1796030700|1:00|n1|None/'; seq -f '900_%g|PENDING|||||' 50"
    )
    idents = [*(str(ident) for ident in range(1, 201)), *(f"900_{task}" for task in range(1, 51))]
    seen = observe_jobs(idents)
    assert list(seen) == idents
    assert {each.alive for each in seen.values()} == {True}
    (call,) = calls(tmp_path, "squeue")
    assert ",199,200,900 " in f"{call} ", "an array is asked for once"
    assert "--states=all" in call, "one that has just ended is known without accounting"
    assert calls(tmp_path, "sacct") == []


def test_more_jobs_than_fit_in_an_argument_are_still_one_call(client: Client, tmp_path: Path) -> None:
    client("squeue", "seq 30000 | sed 's/$/|RUNNING|1796030645|1796030700|1:00|n1|None/'")
    idents = [str(ident) for ident in range(1, 30001)]
    assert {each.state for each in observe_jobs(idents).values()} == {"RUNNING"}
    assert "--jobs" not in calls(tmp_path, "squeue")[0]


def test_what_squeue_has_forgotten_is_asked_of_the_accounting_at_once(client: Client, tmp_path: Path) -> None:
    client("squeue", "echo '7|RUNNING|1796030645|1796030700|1:00|n1|None'")
    client("sacct", "echo '8|FAILED|7:0|1796030645|n3'")
    seen = observe_jobs(["7", "8", "9"])
    assert [seen[ident].alive for ident in ("7", "8", "9")] == [True, False, False]
    assert (seen["8"].exit_code, seen["9"].detail) == (7, "SLURM does not know it any more")
    assert calls(tmp_path, "sacct")[0].endswith("--jobs=8,9")


def test_without_accounting_nothing_is_said_about_it(client: Client) -> None:
    """F051."""
    client("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    client("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert observe_jobs(["8"])["8"] == Observation(alive=False, detail="SLURM does not know it any more")


def test_accounting_that_is_down_is_one_note_and_a_bounded_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F051."""
    client("squeue", "exit 0")
    client("sacct", "echo 'sacct: error: Sending PersistInit msg: Connection refused' >&2; exit 1")
    assert "Connection refused" in observe_jobs(["8"])["8"].detail
    monkeypatch.setattr(slurm_jobs, "_SACCT_LIMIT_S", 0.2)
    client("sacct", "exec sleep 60")
    begun_s = time.monotonic()
    seen = observe_jobs(["8"])["8"]
    assert time.monotonic() - begun_s < 5.0
    assert (seen.alive, "sacct has not answered within 0.2 s" in seen.detail) == (False, True)


def test_a_controller_that_is_down_leaves_it_open(client: Client) -> None:
    client("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    seen = observe_jobs(["8"])["8"]
    assert seen.alive is None
    assert seen.detail == "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_machine_without_slurm_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = observe_jobs(["8"])["8"]
    assert seen.alive is None
    assert "there is no squeue on" in seen.detail
    assert "login node" in seen.detail


def test_a_format_or_filter_of_the_user_is_not_ours(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """F052."""
    monkeypatch.setenv("SQUEUE_FORMAT", "%A %j")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    client("squeue", 'echo "8|RUNNING|1796030645|1796030700|1:00|n1|$SQUEUE_FORMAT$SQUEUE_STATES$SLURM_TIME_FORMAT"')
    assert observe_jobs(["8"])["8"].reason == "%s"


WAITING, RUNNING = "8|PENDING|N/A|N/A|1:00||Resources", "8|RUNNING|1796030645|1796030700|1:00|n1|None"


@pytest.mark.parametrize(
    ("job", "again", "call"),
    [
        ((WAITING, ""), False, "8"),
        ((RUNNING, "8.0"), False, "--signal=TERM 8"),
        ((RUNNING, "8.batch"), False, "8"),
        ((RUNNING, "8.0"), True, "8"),
        ((WAITING, ""), True, "8"),
    ],
)
def test_what_runs_is_asked_to_save_and_what_waits_leaves(
    client: Client, tmp_path: Path, job: tuple[str, str], again: bool, call: str
) -> None:
    line, steps = job
    client("squeue", f"case \"$*\" in *--steps*) echo '{steps}';; *) echo '{line}';; esac")
    client("scancel", "")
    assert cancel_job("8", again=again)
    assert calls(tmp_path, "scancel") == [call]


def test_what_slurm_refuses_is_said_in_its_words(client: Client) -> None:
    client("squeue", f"echo '{WAITING}'")
    client("scancel", "echo 'scancel: error: Kill job error on job id 8: Access/permission denied' >&2")
    with pytest.raises(Refused, match="job 8: scancel: error: Kill job error on job id 8: Access/permission denied"):
        cancel_job("8")


def test_there_is_nothing_to_stop_of_a_job_that_is_over(client: Client, tmp_path: Path) -> None:
    client("squeue", "echo '8|COMPLETED|1796030645|1796030700|1:00|n1|None'")
    assert not cancel_job("8")
    assert calls(tmp_path, "scancel") == []
    client("squeue", f"echo '{WAITING}'")
    client("scancel", "echo 'scancel: error: Kill job error on job id 8: Job/step already completing or completed' >&2")
    assert not cancel_job("8"), "it ended meanwhile"
