"""What every executor must do, on a host that is reached by ssh: by a tunnel, as behind a jump host."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import LIMIT_S
from ssh_hosts import MakeSshBed, SshBed

from launcher.executors.base import JobRef
from launcher.executors.machines import Unreachable
from launcher.executors.ssh import SshExecutor
from launcher.executors.ssh_machine import SshMachine, close_connections
from launcher.planning.plan import Plan
from launcher.road import Prepared, Request, make_run, prepared
from launcher.runs.load import read_result
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("ssh"), pytest.mark.timeout(180)]

STAYS = (
    "import os, pathlib, time\nwhile not pathlib.Path(os.environ['LAUNCH_RUN_DIR'], 'go').exists(): time.sleep(0.01)\n"
)


@pytest.fixture
def bed(make_ssh_bed: MakeSshBed) -> SshBed:
    """One host, which this process reaches by a tunnel."""
    bed = make_ssh_bed(1)
    bed.config = bed.config_from_outside()
    bed.write_profile()
    return bed


@pytest.fixture
def ready(bed: SshBed, tmp_path: Path) -> Iterator[Prepared]:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "stays.yaml").write_text(
        "{name: stays, script: stays.py, faults: {grace: 2s}, tracking: {wandb: {mode: disabled}}}"
    )
    request = Request(target=str(tmp_path / "stays.yaml"), where=str(bed.profile), runs_dir=str(tmp_path / "runs"))
    with prepared(request, warm=False) as found:
        yield found


def start(ready: Prepared) -> tuple[Plan, RunDir, JobRef]:
    run = make_run(ready, command=["launch"])
    return ready.plan, run, SshExecutor().submit(ready.plan, run, attached=False)


def wait_until_gone(ref: JobRef, run: RunDir) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while SshExecutor().observe(ref).alive is not False or run.watcher.exists():
        assert time.monotonic() < deadline_s, "it is still there"
        time.sleep(0.05)


def test_a_job_is_seen_from_its_submission_to_its_end(bed: SshBed, ready: Prepared) -> None:
    assert list(ready.executor.check(ready.plan)) == []
    _, run, ref = start(ready)
    again = JobRef.parse(str(ref))
    assert SshExecutor().observe(again).alive is True
    (run.path / "go").touch()
    wait_until_gone(again, run)
    assert (read_result(run) or {})["state"] == "SUCCEEDED"
    assert bed.busy(bed.hosts[0]) == []


def test_a_request_to_stop_ends_the_job(bed: SshBed, ready: Prepared) -> None:
    _, run, ref = start(ready)
    assert SshExecutor().cancel(ref, signum=signal.SIGTERM) is True
    wait_until_gone(ref, run)
    assert (read_result(run) or {})["state"] == "CANCELLED"
    assert SshExecutor().cancel(ref, signum=signal.SIGTERM) is False


def test_a_job_that_never_was_is_no_error(tmp_path: Path) -> None:
    assert SshExecutor().observe(JobRef("ssh", f"here:{tmp_path}/none")).alive in (None, False)
    assert SshExecutor().observe(JobRef("ssh", "1:1")).alive is None


def test_words_and_input_arrive_unchanged(bed: SshBed) -> None:
    words = ["a b", "$HOME", "it's", '"', "*", "", "ä\n;"]
    machine = SshMachine("h0", config=str(bed.config))
    done = machine.run(["printf", "%s|", *words], timeout_s=LIMIT_S)
    assert done.out.decode() == "|".join([*words, ""])
    assert machine.run(["cat"], input=b"\0\xff\n", timeout_s=LIMIT_S).out == b"\0\xff\n"
    assert machine.run(["sh", "-c", "echo so >&2; exit 7"], timeout_s=LIMIT_S).code == 7


def test_a_kept_connection_serves_many_commands_and_is_closed(bed: SshBed) -> None:
    machine = SshMachine("h0", config=str(bed.config), keeps=True)
    seen = {machine.run(["sh", "-c", "echo $PPID"], timeout_s=LIMIT_S).code for _ in range(3)}
    assert seen == {0}
    logins = (bed.folder / "sshd_h0.log").read_text().count("Accepted publickey")
    assert logins == 1
    close_connections()


def test_a_machine_that_is_away_is_unreachable(bed: SshBed) -> None:
    bed.stop_sshd(bed.hosts[0])
    with pytest.raises(Unreachable, match="h0: "):
        SshMachine("h0", config=str(bed.config)).run(["true"], timeout_s=LIMIT_S)


def test_a_recycled_pid_is_not_taken_for_the_agent(bed: SshBed, ready: Prepared) -> None:
    from launcher.executors.ssh_places import SshPlaces

    plan, run, ref = start(ready)
    places = SshPlaces(plan, run)
    assert places.states([0])[0].alive is True
    pid, started, boot = run.node_pid(0).read_text().split()
    run.node_pid(0).write_text(f"{pid} {int(started) + 1} {boot}\n")
    assert places.states([0])[0].alive is False
    assert places.signal(0, signal.SIGKILL) is False
    run.node_pid(0).write_text(f"{pid} {started} {boot}\n")
    assert places.states([0])[0].alive is True
    (run.path / "go").touch()
    wait_until_gone(ref, run)
    assert dataclasses.asdict(places.states([0])[0])["there"] is False
