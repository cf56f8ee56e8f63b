"""The local executor refuses what cannot run here, before anything is made."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs_values as values

from launcher.executors.local import LocalExecutor
from launcher.executors.local_data import missing_files
from launcher.planning.plan import Value
from launcher.runs.rundir import RunDir


@pytest.mark.parametrize(("kind", "absent", "named"), [("job", "xxhash", "xxhash"), ("script", "torch", "torch")])
def test_a_package_that_the_workers_need_is_missed_before_the_start(
    kind: str, absent: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = values.plan(tmp_path)
    plan = replace(plan, worker=replace(plan.worker, kind=kind, python=sys.executable, cwd=str(tmp_path)))
    assert LocalExecutor().check(plan) == []
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else found(name))
    (problem,) = LocalExecutor().check(plan)
    assert problem.message.startswith(f"{named}: not installed for {sys.executable}")
    assert ".[train]" in problem.hint


def test_a_package_jobs_of_the_users_own_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`export PYTHONPATH=.` in a repository that has a folder `jobs/`."""
    theirs = tmp_path / "jobs" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    plan = values.plan(tmp_path)
    plan = replace(plan, worker=replace(plan.worker, kind="job", python=sys.executable, cwd=str(tmp_path)))
    found = importlib.util.find_spec
    hidden = importlib.util.spec_from_file_location("jobs", theirs)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: hidden if name == "jobs" else found(name))
    (problem,) = LocalExecutor().check(plan)
    assert problem.where == "PYTHONPATH"
    assert str(theirs.parent) in problem.message
    script = replace(plan, worker=replace(plan.worker, kind="script"))
    assert LocalExecutor().check(script) == []


def test_a_limit_of_open_files_that_the_agents_would_reach_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = values.plan(tmp_path)
    plan = replace(plan, worker=replace(plan.worker, kind="script", python=sys.executable, cwd=str(tmp_path)))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert LocalExecutor().check(plan) == []
    (problem,) = LocalExecutor().check(replace(plan, nproc_per_node=64))
    assert problem.where == "ulimit -n"
    assert "256 open files" in problem.message
    assert problem.hint == "ulimit -n 1024"


@pytest.mark.process
def test_a_fork_of_the_process_that_started_a_run_sees_it_alive(tmp_path: Path) -> None:
    """A loader process of a notebook, say: the run is no child of it, and cannot be waited for there."""
    executor = LocalExecutor()
    plan = replace(values.plan(tmp_path), agent_argv=("sh", "-c", "cat"))
    ref = executor.submit(plan, RunDir(tmp_path), attached=True)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if executor.observe(ref).alive else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        executor.cancel(ref)
        while executor.observe(ref).alive:
            os.sched_yield()


@pytest.mark.process
@pytest.mark.parametrize("attached", [True, False])
def test_an_interpreter_that_ends_at_once_is_a_run_that_has_ended(tmp_path: Path, attached: bool) -> None:
    """`python:` is a wrapper script with a mistake in it, or a library is missing on this machine."""
    executor = LocalExecutor()
    plan = replace(values.plan(tmp_path), agent_argv=("sh", "-c", "exec <&-; echo no library >&2; exit 9"))
    for _ in range(5):  # it may end before or after it is told to go
        ref = executor.submit(plan, RunDir(tmp_path), attached=attached)
        while (seen := executor.observe(ref)).alive:
            os.sched_yield()
        assert seen.exit_code == 9
    assert "no library" in RunDir(tmp_path).agents_log.read_text()


def test_files_that_the_data_names_are_looked_for_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "book.txt").touch()
    assert list(missing_files("text", {"path": "book.txt"}, tmp_path)) == []
    assert list(missing_files("text", {"path": "stdlib"}, tmp_path)) == []
    assert list(missing_files("text", {"path": "*.md"}, tmp_path)) == []
    assert list(missing_files("image_folder", {"root": "b", "eval_root": None}, tmp_path)) == [("root", tmp_path / "b")]
    assert list(missing_files(None, {"path": "mine"}, tmp_path)) == []  # of a target
    plan = values.plan(tmp_path)
    plan = replace(
        plan,
        worker=replace(plan.worker, python=sys.executable, cwd=str(tmp_path)),
        recipe={"data": {"name": "text", "path": "bok.txt"}},
        values=(Value(key="data.path", value="bok.txt", origin="override data.path=bok.txt"),),
    )
    (problem,) = LocalExecutor().check(plan)
    assert problem.where == "data.path=bok.txt"
    assert problem.message == f"data.path: there is no {tmp_path}/bok.txt"
    assert problem.hint == f"it is relative to the workdir, {tmp_path}"
    assert LocalExecutor().check(replace(plan, prepare=("python fetch.py",))) == []
