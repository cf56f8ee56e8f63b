"""The contract of executors. SkyPilot's command is a stand-in here, for want of a cloud; what it runs is real.

It takes a task as SkyPilot does, runs its script on this machine with SkyPilot's variables, and answers as 0.14.1 does.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
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

from launcher.executors import sky, sky_home
from launcher.executors.sky import SkyExecutor
from launcher.planning.code import CodeSource
from launcher.planning.codefacts import gather_code
from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.recipe.loader import script_recipe
from launcher.runs.create import create, resolved_recipe
from launcher.runs.events import read_events
from launcher.runs.load import read_result
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

STAND_IN = '''
"""`sky launch|queue|status|cancel|down`, of one machine: this one."""
import json, os, pathlib, shutil, signal, subprocess, sys
import yaml

HERE = pathlib.Path(__file__).parent
job, home = HERE / "job.json", HERE / "home"
command, words = sys.argv[1], sys.argv[2:]


def children(pid):
    found = [pid]
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found += children(int(status.parent.name))
    return found


def state():
    known = json.loads(job.read_text())
    end = HERE / "exit"
    if end.exists():
        return "SUCCEEDED" if end.read_text().strip() == "0" else "FAILED"
    return "RUNNING"


if command == "launch":
    task = yaml.safe_load(pathlib.Path(words[-1]).read_text())
    for target, source in task["file_mounts"].items():
        place = home / target.removeprefix("~/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, place) if pathlib.Path(source).is_dir() else shutil.copy(source, place)
    script = HERE / "run.sh"
    script.write_text(task["run"])
    env = {**os.environ, **task["envs"], "HOME": str(home)}
    env |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1"}
    with (HERE / "said").open("wb") as said:
        run = subprocess.Popen(
            ["bash", "-c", 'bash "$0"; echo $? > "$1.tmp"; mv "$1.tmp" "$1"', str(script), str(HERE / "exit")],
            env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
    job.write_text(json.dumps({"name": task["name"], "pid": run.pid}))
elif command == "queue":
    print("Fetching and parsing job queue...")
    print(json.dumps({words[0]: [{"job_id": 1, "status": state()}]} if job.exists() else {}))
elif command == "status":
    print(json.dumps([{"name": words[0], "status": "UP"}] if job.exists() else []))
elif command == "cancel":
    for pid in children(json.loads(job.read_text())["pid"])[1:]:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A script on one machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sky, "load_problems", lambda _: [])  # test_sky_loader.py has the real one
    monkeypatch.setattr(sky_home, "_SSH", ("true",))  # the machine is this one: what it writes is here
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "stays.py").write_text(STAYS)
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    command = tmp_path / "cloud" / "sky"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{STAND_IN}")
    command.chmod(0o755)
    overrides = (f"sky.command={command}", f"sky.python={sys.executable}", "faults.grace=2s", "sky.port=29471")

    def make() -> tuple[Plan, RunDir]:
        loaded = script_recipe(project / "stays.py", (), overrides)
        source = CodeSource(
            root=str(project),
            script=str(project / "stays.py"),
            module=None,
            runs_dir=str(tmp_path / "runs"),
            holds_secret=lambda _: False,
        )
        facts = gather_facts()
        facts = dataclasses.replace(facts, code=gather_code(source))
        plan = make_plan(loaded, facts, run_id="r0", runs_dir=str(tmp_path / "runs"), executor="sky")
        run = create(plan, recipe_text="", resolved=resolved_recipe(plan), command=["launch"], facts=facts)
        return plan, run

    return Place(SkyExecutor(), make, lambda run: (run.path / "go").touch())


def test_a_request_to_stop_ends_a_job_that_runs(place: Place) -> None:
    """One whose agent has not begun has no result; SkyPilot's word and the events say that it was cancelled."""
    plan, run = place.make()
    ref = place.executor.submit(plan, run, attached=False)
    deadline_s = time.monotonic() + LIMIT_S
    while "worker_started" not in [event["event"] for event in read_events(run.path)]:
        assert time.monotonic() < deadline_s, "no worker was started"
        time.sleep(0.05)
    assert place.executor.cancel(ref, signum=signal.SIGTERM) is True
    wait_until_gone(place, ref)
    result = read_result(run)
    assert result is not None
    assert result["state"] == "CANCELLED"
