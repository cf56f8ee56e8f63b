"""A script of the user's own: his modules are his, his checkpoint is found, he is asked to stop, his node is set up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launched import Launch, Recipe

from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

Command = Callable[..., CompletedProcess[str]]

OWN_MODULES = ("launcher", "torch_utils", "wrapper", "json_utils", "start", "proc")
SAYS_WHOSE = (
    "import json, os, sys\n"
    "import jobs.tools, launch_client\n"
    f"import {', '.join(OWN_MODULES)}\n"
    f"assert all(module.MINE for module in (jobs.tools, {', '.join(OWN_MODULES)}))\n"
    "assert launch_client.run_dir == os.environ['LAUNCH_RUN_DIR']\n"
    "assert [name for name in sys.modules if name.startswith('launcher.')] == []\n"
    "print(json.dumps([__name__, sys.path[0], os.path.basename(sys.argv[0]), *sys.argv[1:]]))\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with modules that have the names of ours; `jobs` is a folder without an `__init__.py`."""
    for name in OWN_MODULES:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "tools.py").write_text("MINE = True\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(SAYS_WHOSE)
    return tmp_path


def test_modules_of_the_users_are_never_taken_for_ours(project: Path, launch: Launch, recipe: Recipe) -> None:
    """His folder has a launcher.py and a jobs/ of its own: in fresh and in forked workers, and on PYTHONPATH too."""
    (project / "pkg" / "more.yaml").write_text("name: module\nmodule: pkg.train\nworkdir: ..\nargs: {lr: 2e-4}\n")
    on_path = {"PYTHONPATH": "."}
    runs = {
        "fresh": launch(recipe(SAYS_WHOSE, name="fresh", preload=False)),
        "forked": launch(recipe(SAYS_WHOSE, name="forked"), env=on_path),
        "module": launch(project / "pkg" / "more.yaml", env=on_path),
        "forked module": launch(project / "pkg" / "more.yaml", "preload=true"),
    }
    for name, run in runs.items():
        assert run.wait() == 0, f"{name}: {run.text}"
        main, first, file, *argv = json.loads(run.log(0))
        assert main == "__main__"
        assert Path(first) in (project, run.run.code)
        expected = ("train.py", ["--lr", "2e-4"]) if "module" in name else (f"{name}.py", [])
        assert (file, argv) == expected
        assert run.run.agents_log.read_text() == ""


def test_a_module_that_raises_is_shown_from_its_own_file_on(project: Path, launch: Launch) -> None:
    (project / "pkg" / "train.py").write_text("def inner():\n    raise ValueError('boom')\n\ninner()\n")
    (project / "r.yaml").write_text("name: module\nmodule: pkg.train\n")
    run = launch(project / "r.yaml")
    assert run.wait() == 1, run.text
    assert run.result["first_failure"]["place"].endswith("pkg/train.py:2 in inner")
    assert "runpy" not in run.log(0)


RESUMES = (
    "import os, pathlib, sys, toy, launch_client\n"
    "out = pathlib.Path(sys.argv[1])\n"
    "print('argv', sys.argv[2:], 'client', launch_client.resume_from)\n"
    "for name in (f'checkpoint-{toy.ATTEMPT}000', f'checkpoint-{toy.ATTEMPT}500.tmp'):\n"
    "    (out / name).mkdir(parents=True, exist_ok=True)\n"
    "    (out / name / 'state').write_text('x')\n"
    "toy.mark('up')\n"
    "toy.wait_for(f'go.{toy.ATTEMPT}')\n"
)


def test_the_newest_checkpoint_is_found_once_per_attempt_for_all_ranks(launch: Launch, recipe: Recipe) -> None:
    resume = {"newest": "{run_dir}/out/checkpoint-*", "args": {"resume_from": "{newest}"}}
    run = launch(recipe(RESUMES, nodes=2, nproc=1, args=["{run_dir}/out"], resume=resume))
    os.kill(run.wait_for_marks("up", ranks=2)[1], signal.SIGKILL)
    run.wait_for_marks("up", ranks=2, attempt=2)
    run.let("go.2")
    assert run.wait() == 0, run.text
    found = str(run.run.path / "out" / "checkpoint-1000")
    assert run.log(0) == "argv [] client None\n"
    for rank in (0, 1):
        assert run.log(rank, node=rank, attempt=2) == f"argv ['--resume_from', '{found}'] client {found}\n"
    assert "launch | resumes from out/checkpoint-1000" in run.text
    assert [event.get("resumes_from") for event in run.happened("attempt_started")] == [None, found]


TALKS = (
    "import sys, time, toy, launch_client\n"
    "start = int(open(toy.RUN / 'saved').read()) if (toy.RUN / 'saved').exists() else 0\n"
    "for step in range(start + 1, 10**9):\n"
    "    launch_client.progress(step)\n"
    "    launch_client.log({'loss': 1 / step})\n"
    "    toy.mark('up')\n"
    "    if launch_client.should_stop():\n"
    "        (toy.RUN / 'saved').write_text(str(step))\n"
    "        sys.exit(75)\n"
    "    if (toy.RUN / 'enough').exists(): break\n"
    "    time.sleep(0.01)\n"
)


def test_a_script_with_the_client_stops_saves_and_goes_on(launch: Launch, recipe: Recipe, command: Command) -> None:
    run = launch(recipe(TALKS, nproc=1, resume="self"))
    run.wait_for_marks("up", ranks=1)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    saved = int((run.run.path / "saved").read_text())
    assert run.happened("progress")[-1]["step"] == saved
    run.let("enough")
    again = command("resume", run.run_id)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [record["step"] for record in read_metrics(run.run.metrics)] == list(range(1, saved + 2))


def test_what_rank_0_prints_is_the_step_clock(launch: Launch, recipe: Recipe) -> None:
    source = "import sys\nfor step in (1, 2, 1300): sys.stderr.write(f'{step:,}/9,999 it\\r')\nraise SystemExit(3)\n"
    run = launch(recipe(source, nproc=1, progress={"log": r"([\d,]+)/"}))
    assert run.wait() == 3, run.text
    assert run.happened("progress")[-1]["step"] == 1300
    assert "1,300" in run.text


class TestSetup:
    def test_what_its_lines_export_the_workers_see_from_their_start(self, launch: Launch, recipe: Recipe) -> None:
        """A library path counts only from the start of a process, so the supervisor starts itself again."""
        source = "import os, toy\nprint(os.environ['WORD'], os.environ['LD_LIBRARY_PATH'])\nassert toy.WORLD == 2\n"
        setup = ["export WORD='two words'", "if true; then", "  export LD_LIBRARY_PATH=/opt/somewhere", "fi"]
        run = launch(recipe(source, nodes=2, nproc=1, setup=[*setup, "echo from the setup"]))
        assert run.wait() == 0, run.text
        assert run.log(1, node=1) == "two words /opt/somewhere\n"
        assert "setup from the setup" in run.text
        (started,) = run.happened("supervisor_started")
        (submitted,) = run.happened("submitted")
        assert f":{started['pid']}:" in submitted["ref"], "the process that `launch` watches is still the one"

    def test_a_line_that_fails_is_named_and_no_worker_starts(self, launch: Launch, recipe: Recipe) -> None:
        setup = ["true", "echo 'no such module: cuda/99' >&2; exit 4", "echo never"]
        run = launch(recipe("import toy; toy.mark('up')", setup=setup, resume="self"))
        assert run.wait() == 4, run.text
        assert (run.result["state"], run.result["cause"], run.result["exit_code"]) == ("FAILED", "setup", 4)
        assert "line 2 of `setup`" in run.text
        assert "no such module: cuda/99" in run.text
        assert not run.happened("worker_started")

    def test_a_stop_ends_it_and_what_it_started(self, launch: Launch, recipe: Recipe) -> None:
        run = launch(recipe("pass", setup=["echo up", "sleep 600 & wait"]))
        run.until(run.run.setup_log.exists)
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.text
        assert run.result["state"] == "CANCELLED"
