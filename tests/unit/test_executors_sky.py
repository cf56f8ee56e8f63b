"""What SkyPilot answers, in our words; and a run of it from the outside."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import runs_values

from launcher.errors import Refused
from launcher.executors import sky_home
from launcher.executors.base import JobRef
from launcher.executors.sky import SkyExecutor
from launcher.executors.sky_states import job_state, read_answer
from launcher.planning.plan import Plan, SkyPlan
from launcher.runs.create import record_event
from launcher.runs.find import write_pointer
from launcher.runs.fold import RunRecord
from launcher.runs.load import read_record
from launcher.runs.observed import Observation
from launcher.runs.record_store import Copier, RecordStore
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause, RunState


def sky_plan(*, managed: bool, command: str = "sky", store: str = "") -> SkyPlan:
    words = (command,)
    cluster = ((*words, "queue", "r0", "--output", "json"), (*words, "status", "r0", "--output", "json"))
    return SkyPlan(
        name="r0",
        managed=managed,
        task="name: r0\n",
        submit=(*words, "launch", "task.yaml"),
        state=((*words, "jobs", "queue", "--output", "json"),) if managed else cluster,
        stop=(*words, "cancel", "r0"),
        remove=() if managed else (*words, "down", "r0"),
        logs=(*words, "logs", "r0"),
        head_port=29400,
        store=store,
    )


MANAGED, CLUSTER = sky_plan(managed=True), sky_plan(managed=False)
UP = [{"name": "r0", "status": "UP"}]


def managed(status: str, **more: Any) -> Observation:
    return job_state(MANAGED, [[{"job_id": 1, "job_name": "r0", "status": status, **more}]])


@pytest.mark.parametrize("status", ["PENDING", "STARTING", "RUNNING", "RECOVERING", "CANCELLING"])
def test_a_job_that_is_not_over_is_alive(status: str) -> None:
    seen = managed(status)
    assert seen.alive is True
    assert seen.state == status


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_NO_RESOURCE", "CANCELLED"])
def test_a_job_that_is_over_is_not(status: str) -> None:
    seen = managed(status, end_at=5.0, failure_reason="no capacity\nmore")
    assert seen.alive is False
    assert (seen.ends_s, seen.detail) == (5.0, "no capacity")


def test_the_newest_job_of_a_name_counts() -> None:
    records = [
        {"job_id": 1, "job_name": "r0", "status": "FAILED"},
        {"job_id": 2, "job_name": "r0", "status": "RUNNING"},
    ]
    assert job_state(MANAGED, [records]).alive is True
    assert job_state(MANAGED, [[{"job_id": 3, "job_name": "other", "status": "RUNNING"}]]).alive is False


def test_no_answer_is_no_end() -> None:
    assert job_state(MANAGED, [None]).alive is None
    assert job_state(CLUSTER, [None, None]).alive is None
    assert job_state(CLUSTER, [None, UP]).alive is True


def test_a_cluster_that_is_gone_is_the_end_of_its_job() -> None:
    assert job_state(CLUSTER, [None, []]).alive is False
    assert job_state(CLUSTER, [{"r0": [{"job_id": 1, "status": "RUNNING"}]}, []]).alive is False


def test_a_job_on_a_cluster_says_more_than_its_machines() -> None:
    seen = job_state(CLUSTER, [{"r0": [{"job_id": 1, "status": "SETTING_UP"}]}, UP])
    assert (seen.alive, seen.state, seen.nodes) == (True, "SETTING_UP", "r0")
    launching = [{"name": "r0", "status": "INIT", "init_status_reason": "trying us-east-1"}]
    assert job_state(CLUSTER, [{}, launching]).detail == "trying us-east-1"


def test_json_is_found_after_what_else_a_command_says() -> None:
    assert read_answer('Fetching ...\n[{"a": 1}]\n') == [{"a": 1}]
    assert read_answer("Failed to get it") is None
    assert read_answer("{ no json") is None


COMMAND = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
[ -z "$LAUNCH_TOKEN" ] || printf %s "$LAUNCH_TOKEN" > token-seen
case "$1 $2" in
  "launch task.yaml") [ ! -f refuse ] || { echo "ValueError: no such quota"; exit 1; } ;;
  "queue r0") cat queue.json ;;
  "status r0") cat status.json ;;
esac
"""


class Cloud:
    """A command in the place of SkyPilot's, which says what a test wants; and a run that is with it."""

    def __init__(self, folder: Path, *, store: str = "") -> None:
        self.folder = folder
        command = folder / "sky"
        command.write_text(COMMAND)
        command.chmod(0o755)
        self.sky = sky_plan(managed=False, command=str(command), store=store)
        self.plan: Plan = dataclasses.replace(runs_values.plan(folder / "runs"), executor="sky", sky=self.sky)
        self.run = RunDir(Path(self.plan.run_dir))
        self.run.path.mkdir(parents=True)
        self.run.plan.write_text(self.plan.to_json())
        self.run.write_token()
        write_pointer(self.run)
        record_event(self.run, "created", command=["launch"], user="ada", host="here")
        self.ref = JobRef("sky", self.run.run_id)
        record_event(self.run, "submitted", ref=str(self.ref))
        self.says("RUNNING")

    def says(self, state: str, machines: str = "UP") -> None:
        (self.folder / "queue.json").write_text(json.dumps({"r0": [{"job_id": 1, "status": state}]}))
        (self.folder / "status.json").write_text(json.dumps([{"name": "r0", "status": machines}] if machines else []))

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def record(self) -> RunRecord:
        return read_record(self.run, lambda ref: SkyExecutor().observe(JobRef.parse(ref)))


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


@pytest.fixture
def with_store(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path, store=f"file://{tmp_path}/bucket/r0/record")


def test_the_task_is_handed_over_with_the_token_in_the_environment_alone(cloud: Cloud) -> None:
    ref = SkyExecutor().submit(cloud.plan, cloud.run, attached=False)
    assert JobRef.parse(str(ref)) == ref
    assert (cloud.run.path / "sky" / "task.yaml").read_text() == cloud.sky.task
    assert (cloud.folder / "token-seen").read_text() == cloud.run.token.read_text()
    assert cloud.run.token.read_text() not in (cloud.folder / "calls").read_text()
    assert stat.S_IMODE(cloud.run.token.stat().st_mode) == 0o600


def test_what_skypilot_refuses_is_refused_in_its_words_and_taken_down(cloud: Cloud) -> None:
    (cloud.folder / "refuse").touch()
    with pytest.raises(Refused) as caught:
        SkyExecutor().submit(cloud.plan, cloud.run, attached=False)
    assert caught.value.problems[0].message == "ValueError: no such quota"
    assert cloud.calls[-1] == "down r0"


def test_without_a_store_there_is_nothing_to_resume_from(cloud: Cloud) -> None:
    SkyExecutor().submit(cloud.plan, cloud.run, attached=False)
    with pytest.raises(Refused, match="nothing to go on from"):
        SkyExecutor().submit(cloud.plan, cloud.run, attached=False)


def node_of(cloud: Cloud) -> tuple[RunDir, Copier]:
    """A machine of the run, which keeps its record at the store."""
    node = RunDir(cloud.folder / "node" / cloud.run.run_id)
    node.path.mkdir(parents=True)
    return node, Copier(RecordStore(cloud.sky.store), node.path, found={})


def test_the_record_comes_home_when_somebody_looks(with_store: Cloud) -> None:
    cloud = with_store
    node, copier = node_of(cloud)
    assert cloud.record.state is RunState.STARTING
    (node.path / "metrics.jsonl").write_text('{"step": 3, "attempt": 1}\n')
    copier.copy()
    os.utime(cloud.run.path / "sky" / "home", (0, 0))
    assert cloud.record.step == 3
    node.result.write_text(json.dumps({"state": "SUCCEEDED", "cause": "done", "exit_code": 0, "attempts": 1}))
    copier.copy()
    cloud.says("SUCCEEDED")
    record = cloud.record
    assert (record.state, record.exit_code) == (RunState.SUCCEEDED, 0)
    assert cloud.calls[-1] == "down r0", "the machines are taken down once the record is home"


def test_it_is_not_fetched_each_time(with_store: Cloud) -> None:
    assert with_store.record.state is RunState.STARTING
    node, copier = node_of(with_store)
    (node.path / "metrics.jsonl").write_text('{"step": 3, "attempt": 1}\n')
    copier.copy()
    assert with_store.record.step is None


@pytest.mark.parametrize(
    ("said", "state", "cause"),
    [
        ("SUCCEEDED", RunState.SUCCEEDED, None),
        ("FAILED", RunState.FAILED, Cause.LAUNCHER_LOST),
        ("FAILED_SETUP", RunState.FAILED, Cause.SETUP),
        ("CANCELLED", RunState.CANCELLED, Cause.CANCELLED),
    ],
)
def test_without_a_result_skypilots_word_counts(
    cloud: Cloud, said: str, state: RunState, cause: Cause | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky_home, "_SSH", ("false",))
    cloud.says(said)
    record = cloud.record
    assert (record.state, record.cause) == (state, cause)
    assert said in record.sentence
    assert "down r0" not in cloud.calls, "what is on the machines has not come home yet"


def test_machines_that_are_gone_end_the_run(cloud: Cloud) -> None:
    cloud.says("RUNNING", machines="")
    record = cloud.record
    assert record.state is RunState.FAILED
    assert "no cluster r0 any more" in record.sentence


def test_a_job_that_gets_other_machines_waits(with_store: Cloud) -> None:
    record_event(with_store.run, "attempt_started", attempt=1)
    with_store.says("RECOVERING")
    assert with_store.record.state is RunState.REQUEUED


def test_a_skypilot_that_does_not_answer_says_nothing_about_the_run(cloud: Cloud) -> None:
    (cloud.folder / "queue.json").write_text("no")
    (cloud.folder / "status.json").unlink()
    record = cloud.record
    assert record.state is RunState.UNKNOWN
    assert "does not answer" in record.sentence


def test_a_stop_goes_by_the_store_and_the_second_by_skypilot(with_store: Cloud) -> None:
    executor = SkyExecutor()
    assert executor.cancel(with_store.ref, signum=signal.SIGTERM)
    assert RecordStore(with_store.sky.store).stop_asked() == signal.SIGTERM
    assert not (with_store.folder / "calls").exists()
    assert executor.cancel(with_store.ref, signum=signal.SIGTERM, again=True)
    assert with_store.calls == ["cancel r0"]


def test_without_a_store_a_stop_is_skypilots(cloud: Cloud) -> None:
    assert SkyExecutor().cancel(cloud.ref, signum=signal.SIGTERM)
    assert cloud.calls == ["cancel r0"]


def test_a_run_that_is_not_known_here_is_nobodys() -> None:
    assert SkyExecutor().observe(JobRef("sky", "nobody-0101-0000-aaaa")).alive is None
    assert not SkyExecutor().cancel(JobRef("sky", "nobody-0101-0000-aaaa"), signum=signal.SIGTERM)


SSH = """#!/bin/sh
# `ssh HOST SCRIPT`: the machines are folders.
[ "$1" = r0 ] || exit 255
exec sh -c "$(echo "$2" | sed "s#^cd .*/runs/#cd {machines}/#")"
"""


def test_without_a_store_the_record_comes_from_the_machines(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = cloud.folder / "machines"
    node = machines / cloud.run.run_id
    (node / "events").mkdir(parents=True)
    (node / "plan.json").write_text("{}")
    os.utime(node / "plan.json", (0, 0))
    (node / "token").write_text("secret")
    (node / "events" / "head.jsonl").write_text(
        '{"event": "attempt_started", "attempt": 1, "time": 1, "writer": "head"}\n'
    )
    (node / "metrics.jsonl").write_text('{"step": 7, "attempt": 1}\n')
    ssh = cloud.folder / "ssh"
    ssh.write_text(SSH.replace("{machines}", str(machines)))
    ssh.chmod(0o755)
    monkeypatch.setattr(sky_home, "_SSH", (str(ssh),))
    token = cloud.run.token.read_text()
    assert sky_home.bring_home(cloud.plan, cloud.run, machines=True, last=True) is (len(cloud.plan.nodes) == 1)
    assert cloud.run.metrics.read_text() == '{"step": 7, "attempt": 1}\n'
    assert (cloud.run.events / "head.jsonl").exists()
    assert cloud.run.token.read_text() == token
