"""Which interpreter, and who supervises the workers in it."""

from __future__ import annotations

import re
import sys
import time
import tomllib
from pathlib import Path

import pytest
from planning_values import facts, job, plan, script

from launcher.errors import ExitCode, RecipeError, Refused
from launcher.planning.engine import OLDEST_PYTHON, TORCH_BELOW, TORCH_FROM, supported_torch
from launcher.planning.facts import facts_from_json, facts_to_json, gather_facts
from launcher.planning.interpreters import Interpreter, probe
from launcher.planning.plan import Plan

PROJECT = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
THEIRS = "/envs/ft/bin/python"


def on(torch: str | None, version: str = "3.12.4", **changes: str) -> Plan:
    there = Interpreter(path=THEIRS, version=version, torch_version=torch, **changes)
    return plan(script(python=THEIRS, preload=True), facts(interpreter=there, torch_version=None))


def test_the_range_of_torch_is_that_of_the_package() -> None:
    (torch,) = [need for need in PROJECT["optional-dependencies"]["train"] if need.startswith("torch")]
    assert re.findall(r"(\d+)\.(\d+)", torch) == [tuple(map(str, end)) for end in (TORCH_FROM, TORCH_BELOW)]
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, OLDEST_PYTHON))
    assert supported_torch("or") == "2.13 or 2.14"


@pytest.mark.parametrize(
    ("torch", "engine"),
    [
        ("2.13.0", "agent"),
        ("2.13.0+cu130", "agent"),
        ("2.14.1", "agent"),
        ("2.14.0a0+gitabc", "agent"),
        ("2.15.0.dev20261101", "torchrun"),
        ("2.12.1+cpu", "torchrun"),
        ("2.4.0", "torchrun"),
        ("3.0.0", "torchrun"),
    ],
)
def test_another_torch_is_supervised_through_its_own_torchrun(torch: str, engine: str) -> None:
    made = on(torch)
    assert made.engine == engine
    assert made.worker.python == THEIRS
    assert made.agent_argv[:3] == (THEIRS, "-P", "/home/ada/project/runs/r0/agent/start.py")
    assert f"{THEIRS} -m torch.distributed.run --nnodes 1" in made.torchrun[0]
    if engine == "agent":
        assert (made.engine_reason, made.worker.preload) == ("", ())
    else:
        assert f"torch {torch} in {THEIRS}: the agent knows 2.13 and 2.14" in made.engine_reason
        assert made.engine_reason in made.notes
        assert made.worker.preload is None, "nobody could preload anything"
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("torch", "version", "said"),
    [
        (None, "3.12.4", rf"{THEIRS} \(Python 3.12.4\) has no torch; workers need torch 2.4 or newer"),
        ("2.3.1", "3.12.4", "has torch 2.3.1; workers need torch 2.4 or newer, 2.13 or 2.14 for fast restarts"),
        ("2.13.0", "3.10.14", "is Python 3.10.14; 3.11 or newer is needed"),
    ],
)
def test_what_cannot_run_at_all_is_refused_with_both_versions(torch: str | None, version: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        on(torch, version)
    assert caught.value.exit_code == ExitCode.REFUSED == 3


def test_an_interpreter_that_does_not_run_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="cannot be run: no answer within 20 s"):
        on(None, "", fault="no answer within 20 s")


def test_a_mistake_in_the_recipe_comes_before_a_refusal() -> None:
    there = Interpreter(path=THEIRS, version="3.10.1")
    with pytest.raises(RecipeError):
        plan(script(python=THEIRS, env={"RANK": "1"}), facts(interpreter=there))


def test_the_other_engine_can_be_asked_for() -> None:
    made = plan(script(), facts(environment={"LAUNCH_ENGINE": "torchrun"}))
    assert made.engine == "torchrun"
    assert made.engine_reason.startswith("LAUNCH_ENGINE=torchrun: ")
    assert plan(script(), facts(environment={"LAUNCH_ENGINE": "agent"})).engine == "agent"
    with pytest.raises(RecipeError, match="LAUNCH_ENGINE=ray is no engine"):
        plan(script(), facts(environment={"LAUNCH_ENGINE": "ray"}))
    with pytest.raises(Refused, match=r"LAUNCH_ENGINE=agent, and torch 2\.12\.0 in .* the agent knows 2\.13 and 2\.14"):
        plan(script(), facts(torch_version="2.12.0", environment={"LAUNCH_ENGINE": "agent"}))


def test_our_own_interpreter_plans_without_torch_and_refuses_one_that_the_job_does_not_know() -> None:
    assert plan(job(), facts(torch_version=None)).engine == "agent"
    with pytest.raises(Refused, match=r"has torch 2\.12\.0; the built-in training program needs 2\.13 or 2\.14"):
        plan(job(), facts(torch_version="2.12.0"))
    assert plan(script(), facts(torch_version="2.12.0")).engine == "torchrun"


def test_a_build_without_cuda_counts_where_the_workers_are() -> None:
    there = Interpreter(path=THEIRS, version="3.12.4", torch_version="2.13.0+cpu")
    made = plan(script(python=THEIRS), facts(gpus=1, interpreter=there))
    assert made.device == "cpu"
    assert "torch 2.13.0+cpu is built without CUDA" in made.device_reason


def test_an_interpreter_is_asked_for_its_versions(tmp_path: Path) -> None:
    mine = probe(sys.executable)
    assert mine.version == ".".join(map(str, sys.version_info[:3]))
    assert mine.torch_version is not None
    assert (mine.fault, mine.path) == ("", sys.executable)
    assert gather_facts(cwd=tmp_path).interpreter is None
    assert gather_facts(cwd=tmp_path, python=sys.executable).interpreter is None
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    there = gather_facts(cwd=tmp_path, python=str(link)).interpreter
    assert there is not None
    assert there.version == mine.version
    assert facts_from_json(facts_to_json(facts(interpreter=there))).interpreter == there


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "No such file or directory"),
        ("#!/bin/sh\nexit 7\n", "it is no Python: exit code 7"),
        ("#!/bin/sh\necho no libpython >&2; exit 127\n", "no libpython"),
        ("#!/bin/sh\necho launch-\n", "it is no Python: exit code 0"),
        ("#!/nowhere/python\n", "No such file or directory"),
    ],
)
def test_what_is_no_interpreter_is_told_as_such(tmp_path: Path, text: str | None, fault: str) -> None:
    path = tmp_path / "python"
    if text is not None:
        path.write_text(text)
        path.chmod(0o755)
    assert probe(str(path)) == Interpreter(path=str(path), fault=fault)


def test_an_interpreter_that_hangs_is_given_up_with_its_children(tmp_path: Path) -> None:
    path, note = tmp_path / "python", tmp_path / "child"
    path.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {note}\nwait\n")
    path.chmod(0o755)
    assert probe(str(path), limit_s=1.0).fault == "no answer within 1 s"
    pid = int(note.read_text())
    deadline_s = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_secrets_are_only_known_to_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_TOKEN", "geheim-geheim")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("B_TOKEN", raising=False)
    here = gather_facts(cwd=tmp_path, secrets=["A_TOKEN", "B_TOKEN", "EMPTY", "B_TOKEN"])
    assert here.secrets_missing == ("B_TOKEN", "EMPTY")
    assert "geheim" not in facts_to_json(here)
