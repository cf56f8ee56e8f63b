"""The code of a run over its attempts, resumes and reruns; and runs that are started from Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launched import LIMIT_S, Launch, Recipe
from tiny import tiny

from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

Command = Callable[..., CompletedProcess[str]]

SHOWS_ITS_CODE = """
import os, sys
from toy import *
import helper
print("value", helper.VALUE, "in", os.getcwd(), "from", os.path.dirname(os.path.abspath(__file__)), flush=True)
if ATTEMPT == 1 and "AGAIN" not in os.environ:
    mark("up")
    wait_for("go")
    sys.exit(9)
sys.exit(75)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The folder of the test as a repository, with a helper of the script."""
    (tmp_path / ".gitignore").write_text("runs/\nelsewhere/\nstate/\n")
    (tmp_path / "helper.py").write_text("VALUE = 'old'\n")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    return tmp_path


def test_the_code_of_a_run_is_the_same_for_every_attempt_until_a_person_says_otherwise(
    tree: Path, launch: Launch, recipe: Recipe, command: Command
) -> None:
    run = launch(recipe(SHOWS_ITS_CODE, nproc=1, preload=False, resume="self"))
    run.wait_for_marks("up", 1)
    (tree / "helper.py").write_text("VALUE = 'new'\n")
    run.let("go")
    assert run.wait() == 75, run.text
    code = run.run.code
    for attempt in (1, 2):
        assert f"value old in {tree} from {code}\n" in run.log(0, attempt=attempt)

    refused = command("resume", run.run_id)
    assert refused.returncode == 3
    assert "modified helper.py" in refused.stderr
    assert command("resume", run.run_id, "--code", "same").returncode == 75
    assert "value old" in run.log(0, attempt=3)
    current = command("resume", run.run_id, "--code", "current")
    assert current.returncode == 75, current.stderr
    assert f"value new in {tree} from {code}\n" in run.log(0, attempt=4)
    (event,) = run.happened("resumed", code="current")
    assert (run.run.path / event["code_kept"] / "helper.py").read_text() == "VALUE = 'old'\n"

    (tree / "helper.py").write_text("VALUE = 'newest'\n")
    again = command("rerun", run.run_id, "env.AGAIN=1", "--json", "--name", "again")
    assert again.returncode == 75, again.stderr
    second = RunDir(Path(json.loads(again.stdout.splitlines()[-1])["run_dir"]))
    assert "value new" in second.log(attempt=1, node=0, rank=0).read_text()
    assert json.loads(second.launch.read_text())["rerun_of"] == run.run_id
    found = json.loads(command("diff", run.run_id, second.run_id, "--json").stdout)
    assert found["code"]["files"] == {"added": [], "removed": [], "modified": []}
    assert found["recipe"] == {"name": [run.name, "again"], "env.AGAIN": [None, "1"]}


STOPPED_EARLY = """
import os, signal, sys
import launcher.planning.facts as facts
def gather_facts(**_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it goes on")
facts.gather_facts = gather_facts
from launcher.cli.main import entry
sys.argv = ["launch", "script.yaml"]
entry()
"""


def test_a_stop_before_there_is_a_run_is_said_and_leaves_nothing(tmp_path: Path, recipe: Recipe) -> None:
    """The process that imports torch meanwhile is gone as well."""
    recipe("")
    argv = [sys.executable, "-c", STOPPED_EARLY]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "launch: ended by TERM\n")
    assert not (tmp_path / "runs").exists()


NOTEBOOK = """
import os, signal, sys, threading
import psutil, torch
torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)  # an OpenMP pool
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
before = [signal.getsignal(signum) for signum in SIGNALS]
def forked():
    raise SystemExit("this process was forked")
os.register_at_fork(before=forked)

import launcher
found = {}
def work():
    try:
        launcher.run("recipe.yaml", overrides=["nokey=1"])
    except launcher.RecipeError as error:
        found["problems"] = [str(problem) for problem in error.problems]
    run = launcher.run("recipe.yaml", nodes=2, overrides=["train.until=6 steps"])
    found.update(first=run.exit_code, code=run.wait(), metrics=run.metrics(), logs=run.logs(rank=1), run=run)
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert [signal.getsignal(signum) for signum in SIGNALS] == before
assert len(found["problems"]) == 1, found
assert found["first"] is None
assert found["code"] == 0, found["run"].logs()
assert [record["step"] for record in found["metrics"] if "train/loss" in record] == list(range(1, 7))
assert found["run"].result["world_size"] == 2
assert not psutil.Process().children()
print("done", torch.ones(600, 600).sum().item(), found["run"].run_id)
"""
RECIPE = tiny(train={"until": "6 steps"})


def test_a_run_from_a_thread_of_a_process_that_has_torch_and_an_openmp_pool(tmp_path: Path) -> None:
    """Nothing of that process is forked, and none of its signal handlers is touched."""
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("done 360000.0 tiny-")


DIES = """
import os, sys, time
import launcher
run = launcher.run("script.yaml", detached=sys.argv[1] == "detached")
if (loader := os.fork()) == 0:  # outlives us, and does not hold the run
    time.sleep(600)
print(loader, run.run_dir, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["attached", "detached"])
def test_a_run_from_python_ends_with_its_process_unless_it_is_detached(
    tmp_path: Path, recipe: Recipe, how: str, command: Command
) -> None:
    recipe("from toy import *\nmark('up')\nwait_for('go')\n", nproc=1, preload=False)
    notebook = subprocess.Popen(
        [sys.executable, "-c", DIES, how], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with notebook:
        assert notebook.stdout is not None
        loader, _, run_dir = notebook.stdout.readline().strip().partition(" ")
        try:
            run = RunDir(Path(run_dir))
            while not (run.path / "up.0.1").exists():
                assert notebook.poll() is None
                time.sleep(0.01)
            notebook.kill()
            notebook.wait()
            if how == "detached":
                (run.path / "go").touch()
            assert command("logs", run_dir, "-f").returncode == 0, "it has ended"
            fields = json.loads(command("status", run_dir, "--json").stdout)
            assert fields["cause"] == ("done" if how == "detached" else "launcher_lost")
        finally:
            os.kill(int(loader), signal.SIGKILL)
