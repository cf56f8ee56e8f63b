"""The workers' interpreter has torch and nothing of ours; the command's has no torch.

Two environments made of links to what this one holds: as empty as freshly installed ones, without a copy of torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from launched import Launch, Recipe, zygote_of

import launcher

pytestmark = pytest.mark.process

ROOT = Path(launcher.__file__).parents[1]
SOURCE = (
    "import importlib.util, json, os, sys, toy\n"
    "import launch_client\n"
    "dist = toy.join()\n"
    "launch_client.log({'x': 1.0}, step=1)\n"
    "found = [name for name in ('numpy', 'launcher', 'jobs', 'click') if importlib.util.find_spec(name)]\n"
    "print(json.dumps([sys.prefix, found, sys.path[-1]]))\n"
    "toy.mark('up')\n"
    "toy.wait_for(f'go.{toy.ATTEMPT}')\n"
    "dist.destroy_process_group()\n"
)


def _needed_by(name: str, seen: set[str]) -> Iterator[str]:
    """A distribution and all that it requires; numpy and setuptools are no requirements of torch's at run time."""
    if name in seen or name == "setuptools":
        return
    seen.add(name)
    yield name
    for text in distribution(name).requires or []:
        if "extra ==" not in text and (found := re.match(r"[A-Za-z0-9._-]+", text)):
            try:
                distribution(found[0])
            except ImportError:  # for another platform, or another Python
                continue
            yield from _needed_by(found[0].lower(), seen)


def _environment(folder: Path, names: list[str], *, ours: bool) -> Path:
    """An environment that holds these distributions and what they require; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    seen: set[str] = set()
    for name in (needed for start in names for needed in _needed_by(start, seen)):
        found = distribution(name)
        if name == "launcher":
            continue
        for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    if ours:
        for name in ("launcher", "jobs", "launch_client.py", "launch_command.py"):
            (site / name).symlink_to(ROOT / name)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _environment(tmp_path_factory.mktemp("torch-only"), ["torch"], ours=False)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = _environment(tmp_path_factory.mktemp("control"), ["launcher"], ours=True)
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False, text=True)
    assert "No module named 'torch'" in done.stderr
    return python


@pytest.mark.parametrize("how", ["fresh", "preload", "torchrun"])
def test_a_command_without_torch_runs_workers_that_have_torch_alone(
    launch: Launch, recipe: Recipe, with_torch: Path, without_torch: Path, how: str
) -> None:
    path = recipe(SOURCE, nodes=2, nproc=1, python=str(with_torch), preload=how == "preload", resume="self")
    env = {"LAUNCH_ENGINE": "torchrun"} if how == "torchrun" else {}
    run = launch(path, prefix=(str(without_torch),), env=env)
    run.wait_for_marks("up", ranks=2)
    if how == "preload":  # the zygote's successor is found in the run directory too
        agent = run.happened("agent_started", node=1)[0]["pid"]
        os.kill(zygote_of(agent), signal.SIGKILL)
        run.wait_for_marks("up", ranks=2, attempt=2)
    attempt = 2 if how == "preload" else 1
    run.let(f"go.{attempt}")
    assert run.wait() == 0, run.text
    prefix, found, last = json.loads(run.log(1, node=1, attempt=attempt).splitlines()[-1])  # after torch's warning
    assert Path(prefix) == with_torch.parents[1]
    assert found == [], "something of ours, or more than torch needs, is in reach of the script"
    assert Path(last) == run.run.client_code
    assert [path.name for path in run.run.client_code.glob("*.py")] == ["launch_client.py"]
    assert "Traceback" not in run.run.agents_log.read_text()
    assert '"x": 1.0' in run.run.metrics.read_text()


def test_without_torch_anywhere_nothing_is_started_and_both_are_named(
    launch: Launch, recipe: Recipe, without_torch: Path, tmp_path: Path
) -> None:
    named = launch(recipe("pass", python=str(without_torch)), prefix=(str(without_torch),))
    unnamed = launch(recipe("pass"), prefix=(str(without_torch),))
    assert (named.wait(), unnamed.wait()) == (3, 3), named.text + unnamed.text
    for run in (named, unnamed):
        assert str(without_torch) in run.text
        assert "torch" in run.text
    assert not (tmp_path / "runs").exists()
