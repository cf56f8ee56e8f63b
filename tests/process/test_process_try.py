"""`launch try`, with real runs: what passes, what is found, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S, Recipe
from tiny import tiny

from launcher.runs.events import read_events

pytestmark = pytest.mark.process

Try = Callable[..., tuple[int, dict[str, Any]]]

SCRIPT = """
import os, pathlib, time
import toy
import launch_client as client
saved = pathlib.Path(os.environ["LAUNCH_CHECKPOINT_DIR"], "last.txt")
start = {start}
for step in range(start + 1, 2000):
    time.sleep(0.005)
    client.progress(step)
    if toy.RANK == 0 and step % 20 == 0:
        saved.parent.mkdir(exist_ok=True)
        saved.with_suffix(".tmp").write_text(str(step))
        saved.with_suffix(".tmp").replace(saved)
"""
SAVES_OFTEN = """
import os, pathlib, time
import launch_client as client
folder = pathlib.Path(os.environ["LAUNCH_CHECKPOINT_DIR"])
folder.mkdir(exist_ok=True)
start = max((int(each.name) for each in folder.iterdir()), default=0)
for step in range(start + 1, start + 40):
    time.sleep(0.1)
    client.progress(step)
    (folder / str(step)).mkdir()
    (folder / str(step) / "x").touch()
"""
"""Folders, each of which is not the newest one for long."""
SAVES_ONCE = """
import os, pathlib
folder = pathlib.Path(os.environ["LAUNCH_CHECKPOINT_DIR"], "step-1")
folder.mkdir(parents=True)
(folder / "x").touch()
"""
GOES_ON = SCRIPT.format(start="int(saved.read_text()) if saved.exists() else 0")
BEGINS_AGAIN = SCRIPT.format(start=0)


@pytest.fixture
def attempt(tmp_path: Path) -> Try:
    """attempt(TARGET, ARGUMENTS...) -> (exit code, what `launch try --json` says). Its temporary files are in tmp/."""
    (tmp_path / "tmp").mkdir()

    def call(target: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        ended = subprocess.run(
            [LAUNCH, "try", str(target), "--json", "--timeout", f"{LIMIT_S:.0f}s", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
        return ended.returncode, json.loads(ended.stdout)

    return call


def results(said: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["result"] for check in said["checks"]}


@pytest.mark.parametrize(("fault", "nodes"), [pytest.param("kill", 1, marks=pytest.mark.long), ("node-loss", 2)])
def test_a_training_that_loses_nothing_passes(attempt: Try, tmp_path: Path, fault: str, nodes: int) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tiny(resources={"nproc_per_node": 2 // nodes, "threads": 1})))
    code, said = attempt(recipe, "--fault", fault, "--nodes", str(nodes))
    assert (code, said["verdict"], said["kept"]) == (0, "PASS", None), said
    assert set(results(said).values()) == {"pass"}
    assert results(said).keys() >= {"trains", "saves", "goes on", "losses", "weights", "samples", "exit code"}
    assert os.listdir(tmp_path / "tmp") == []  # noqa: PTH208
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state").exists()


def test_a_stop_is_followed_by_a_resume(attempt: Try, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tiny(resources={"nproc_per_node": 2, "threads": 1})))
    code, said = attempt(recipe, "--fault", "preempt")
    assert (code, said["verdict"]) == (0, "PASS"), said
    codes = [check["evidence"] for check in said["checks"] if check["name"] == "exit code"]
    assert codes == ["after TERM: exit 75 (stopped on request, saved)", "launch resume: exit 0 (done)"]


def test_a_script_that_goes_on_passes_and_what_is_not_known_is_said(attempt: Try, recipe: Recipe) -> None:
    code, said = attempt(recipe(GOES_ON, resume="self"))
    assert (code, said["verdict"]) == (0, "PASS"), said
    assert results(said) == {
        "saves": "pass",
        "restarts": "pass",
        "works on": "pass",
        "goes on": "pass",
        "losses": "unknown",
        "nothing left": "pass",
    }


def test_a_script_may_save_folders_all_the_time(attempt: Try, recipe: Recipe) -> None:
    code, said = attempt(recipe(SAVES_OFTEN, nproc=1, resume="self"))
    assert (code, said["verdict"]) == (0, "PASS"), said


def test_a_script_that_begins_again_is_found_and_its_run_is_kept(attempt: Try, recipe: Recipe, tmp_path: Path) -> None:
    code, said = attempt(recipe(BEGINS_AGAIN, resume="self"))
    assert (code, said["verdict"]) == (1, "FAIL"), said
    (found,) = [check for check in said["checks"] if check["result"] == "fail"]
    assert found["name"] == "goes on"
    assert "what checkpoints/last.txt holds was done again" in found["evidence"]
    (run,) = Path(said["kept"], "runs").iterdir()
    assert [event["attempt"] for event in read_events(run) if event["event"] == "attempt_started"] == [1, 2]
    assert Path(said["kept"]).parent == tmp_path / "tmp"


def test_a_script_that_never_saves_and_one_that_declares_no_resume_are_found(
    attempt: Try, recipe: Recipe, tmp_path: Path
) -> None:
    code, said = attempt(recipe("import toy\n", resume="self"))
    (found,) = [check for check in said["checks"] if check["result"] == "fail"]
    assert (code, found["name"]) == (1, "saves")
    assert found["evidence"].startswith("it ended before there was a checkpoint; looked for ")
    code, said = attempt(recipe(SAVES_ONCE, nproc=1, resume="self"))
    (found,) = [check for check in said["checks"] if check["result"] == "fail"]
    assert (code, found["name"]) == (1, "saves")
    assert found["evidence"] == "it ended within 1 s of step-1, and could not be struck: let it train longer"
    code, said = attempt(recipe(GOES_ON))
    assert (code, results(said), said["kept"]) == (1, {"resumes": "fail"}, None)
    assert len(list(tmp_path.glob("tmp/*"))) == 2, "where nothing ran nothing is kept"


def test_a_wrong_recipe_is_refused_as_ever(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tiny(train={"untill": "3 steps"})))
    ended = subprocess.run([LAUNCH, "try", str(recipe)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "unknown key 'untill' in train" in ended.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_rehearsal_that_is_broken_off_leaves_nothing(tmp_path: Path, recipe: Recipe, signum: int) -> None:
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [LAUNCH, "try", str(recipe(GOES_ON, resume="self"))],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + LIMIT_S
    while not list(tmp_path.glob("tmp/*/runs/*/events/node-0.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signum)
    assert process.wait(LIMIT_S) == 128 + signum
    assert os.listdir(tmp_path / "tmp") == []  # noqa: PTH208
    mark = str(tmp_path / "tmp" / "launch-try-").encode()
    assert not [path for path in Path("/proc").glob("[0-9]*") if mark in environment(path)]


def environment(path: Path) -> bytes:
    try:
        return (path / "environ").read_bytes()
    except OSError:
        return b""
