"""`launch resume`, `rerun` and `diff` where code, recipe or place have changed, on an executor where nothing runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import STARTS, Ends, FakeExecutor

from launcher.runs.events import read_events
from launcher.runs.find import all_runs
from launcher.runs.rundir import RunDir

Launch = Callable[..., Any]
Place = type[FakeExecutor]


@pytest.fixture
def stopped(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDir:
    """A run of a script in a repository that was stopped; we are elsewhere."""
    subprocess.run(["git", "init", "-q"], check=True)
    monkeypatch.setattr(place, "script", (*STARTS, Ends("CANCELLED", "cancelled", 75)))
    assert launch("train.py", "--nodes", "2", "resume=self").code == 75
    (pointer,) = all_runs()
    monkeypatch.chdir(tmp_path)
    return pointer.run


def script_of(run: RunDir) -> Path:
    """The live file."""
    plan = json.loads(run.plan.read_text())
    return Path(plan["code"]["root"]) / "train.py"


def resumed(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_events(run.path) if event["event"] == "resumed"]


def test_a_script_runs_from_the_copy_and_in_the_live_folder(stopped: RunDir, place: Place) -> None:
    (plan,) = place.plans
    assert plan.worker.script == str(stopped.code / "train.py")
    assert plan.worker.cwd == str(script_of(stopped).parent)
    assert (stopped.code / "train.py").read_text() == "print('hello')\n"


def test_changed_code_stops_a_resume_before_anything_starts(launch: Launch, place: Place, stopped: RunDir) -> None:
    script_of(stopped).write_text("print('new')\n")
    said = launch("resume", "last")
    assert said.code == 3
    assert "modified train.py" in said.err
    assert "--code same" in said.err
    assert len(place.plans) == 1
    assert resumed(stopped) == []


def test_resume_with_the_code_of_the_run_or_with_that_of_now(launch: Launch, place: Place, stopped: RunDir) -> None:
    script_of(stopped).write_text("print('new')\n")
    same = launch("resume", "last", "--code", "same")
    assert (same.code, same.err) == (75, f"code: that of the run, {stopped.code}\n")
    assert (stopped.code / "train.py").read_text() == "print('hello')\n"
    current = launch("resume", "last", "--code", "current", "--nodes", "1", "env.A=x")
    assert current.code == 75
    assert current.err.endswith("as it is now; that of before is kept in code-2\n")
    assert (stopped.code / "train.py").read_text() == "print('new')\n"
    assert (stopped.path / "code-2/train.py").read_text() == "print('hello')\n"
    first, second = resumed(stopped)
    assert (first["code"], first["nodes"], first["code_kept"]) == ("same", [2, 2], None)
    assert (second["code"], second["nodes"], second["code_kept"]) == ("current", [2, 1], "code-2")
    assert second["overrides"] == ["env.A=x"]
    assert [plan.worker.script for plan in place.plans] == [str(stopped.code / "train.py")] * 3
    assert launch("resume", "last").code == 75, "and is then as it was"


def test_a_script_that_is_gone_is_still_in_the_copy(launch: Launch, place: Place, stopped: RunDir) -> None:
    script_of(stopped).unlink()
    refused = launch("resume", "last")
    assert refused.code == 3
    assert "there is no" in refused.err
    assert launch("resume", "last", "--code", "same").code == 75
    assert place.plans[-1].worker.script == str(stopped.code / "train.py")
    assert launch("rerun", "last").code == 75
    assert place.plans[-1].run_id != stopped.run_id


def test_a_run_without_its_token_is_refused_with_a_sentence(launch: Launch, stopped: RunDir) -> None:
    stopped.token.unlink()
    said = launch("resume", "last")
    assert said.code == 3
    assert "its file `token` cannot be read" in said.err
    assert "fault" not in said.err


def test_resume_in_a_place_that_there_is_not(launch: Launch, place: Place, stopped: RunDir) -> None:
    said = launch("resume", "last", "--on", "moon")
    assert said.code == 2
    assert "'moon' is not a place" in said.err
    assert len(place.plans) == 1


def test_rerun_is_the_same_plan_under_a_new_id(launch: Launch, place: Place, stopped: RunDir) -> None:
    script_of(stopped).write_text("print('new')\n")
    said = launch("rerun", stopped.run_id, "--name", "again")
    assert said.code == 75
    assert f"code: the copy of {stopped.run_id}" in said.err
    first, second = place.plans
    again = RunDir(Path(second.run_dir))
    assert again.run_id.startswith("again-")
    assert again.path.parent == stopped.path.parent
    assert (again.code / "train.py").read_text() == "print('hello')\n"
    assert second.worker.cwd == first.worker.cwd
    assert (len(second.nodes), second.resumable) == (2, True)
    assert json.loads(again.launch.read_text())["rerun_of"] == stopped.run_id
    assert json.loads(stopped.launch.read_text())["rerun_of"] is None
    assert again.recipe.read_text() == stopped.recipe.read_text()


def test_a_rerun_knows_who_set_each_value(launch: Launch, place: Place, stopped: RunDir) -> None:
    """`resolved.yaml` has every value, defaults too: that each was read there says nothing."""
    said = launch("rerun", "last", "faults.grace=5s", "--dry-run", "-v").out
    values = said[said.index("Values") : said.index("Limits")]
    assert "resolved.yaml" not in values
    origins = {words[0]: " ".join(words[2:]) for words in map(str.split, values.splitlines()) if words[2:]}
    assert origins["resources.nodes"] == "earlier flag --nodes"
    assert origins["resume"] == "earlier override resume=self"
    assert origins["faults.grace"] == "override faults.grace=5s"
    assert origins["network.timeout"] == "default"
    assert origins["GLOO_SOCKET_IFNAME"] == "auto: all ranks are on this machine"


def test_a_dry_rerun_starts_nothing(launch: Launch, place: Place, stopped: RunDir) -> None:
    said = launch("rerun", "last", "--nodes", "3", "--dry-run")
    assert said.code == 0
    assert "3 nodes on this machine" in said.out
    assert len(place.plans) == 1
    assert len(all_runs()) == 1


def test_diff_shows_what_is_not_the_same(launch: Launch, place: Place, stopped: RunDir) -> None:
    script_of(stopped).write_text("print('new')\n")
    assert launch("rerun", "last", "--nodes", "1", "--name", "other").code == 75
    ids = (stopped.run_id, RunDir(Path(place.plans[-1].run_dir)).run_id)
    said = launch("diff", *ids)
    assert said.code == 0
    assert said.out.splitlines()[:2] == [f"A  {ids[0]}", f"B  {ids[1]}"]
    assert "resources.nodes" in said.out
    assert "code: the same" in said.out
    fields = launch("diff", *ids, "--json").json
    assert fields["recipe"]["resources.nodes"] == [2, 1]
    assert fields["code"]["files"] == {"added": [], "removed": [], "modified": []}
    assert launch("resume", ids[1], "--code", "current").code == 75
    lines = launch("diff", *ids, "-v").out
    assert "modified train.py" in lines
    assert "| -print('hello')" in lines
    assert "| +print('new')" in lines


def test_a_complete_run_is_complete_whatever_its_code_is_now(
    launch: Launch, place: Place, stopped: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "script", (*STARTS, Ends("SUCCEEDED", "done", 0)))
    assert launch("resume", "last").code == 0
    script_of(stopped).write_text("print('new')\n")
    said = launch("resume", "last")
    assert said.code == 0
    assert "is already complete" in said.out


def test_without_git_a_changed_file_stops_a_resume_until_it_is_wanted(
    launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "script", (*STARTS, Ends("CANCELLED", "cancelled", 75)))
    assert launch("train.py").code == 75
    assert place.plans[0].worker.script == str(Path.cwd() / "train.py")
    Path("helper.py").write_text("")
    said = launch("resume", "last")
    assert said.code == 3
    assert "added helper.py" in said.err
    assert launch("resume", "last", "--code", "same").code == 3
    assert launch("resume", "last", "--code", "current").code == 75
