"""The client in a script of the user's: in a run, on another rank, and outside of any run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir
from launcher.runs.steps import newest_step

FILE = Path(__file__).parents[2] / "launch_client.py"
Load = Callable[..., ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A fresh copy of the client, as a process with these variables gets it."""

    def fresh(**environment: Any) -> ModuleType:
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        spec = importlib.util.spec_from_file_location("launch_client", FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module.atexit, "register", lambda function: None)
        return module

    before = signal.getsignal(signal.SIGTERM)
    yield fresh
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "events").mkdir()
    return RunDir(tmp_path)


def of(run: RunDir, *, rank: int = 0, attempt: int = 1, **more: Any) -> dict[str, Any]:
    """The variables of a worker."""
    known = {"LAUNCH_RUN_DIR": run.path, "LAUNCH_STOP_FILE": run.stop_file, "LAUNCH_ATTEMPT": attempt, "RANK": rank}
    return {**known, **more}


def test_outside_a_run_nothing_happens(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = load()
    assert (client.run_dir, client.resume_from, client.should_stop()) == (None, None, False)
    client.progress(1)
    client.log({"loss": 0.5})
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_logged_is_read_back_under_its_step(load: Load, run: RunDir) -> None:
    client = load(**of(run))
    client.progress(1)
    client.log({"train/loss": 0.5})
    client.log({"train/loss": 0.25, "broken": float("nan")}, step=2)
    first, second = read_metrics(run.metrics)
    assert (first["step"], first["train/loss"]) == (1, 0.5)
    assert (second["step"], second["train/loss"], second["attempt"]) == (2, 0.25, 1)
    assert "broken" not in second
    assert all(json.loads(line) for line in run.metrics.read_text().splitlines())


def test_a_restart_replaces_the_steps_that_it_does_again(load: Load, run: RunDir) -> None:
    first = load(**of(run))
    for step in range(1, 6):
        first.log({"loss": 1.0}, step=step)
    second = load(**of(run, attempt=2))
    second.log({"loss": 2.0}, step=4)
    assert [(line["step"], line["loss"]) for line in read_metrics(run.metrics)] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_other_ranks_write_nothing(load: Load, run: RunDir) -> None:
    client = load(**of(run, rank=1))
    client.progress(1)
    client.log({"loss": 1.0})
    assert not run.metrics.exists()
    assert not list(run.events.iterdir())


def test_progress_is_told_once_a_second_and_at_the_end(
    load: Load, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = load(**of(run))
    monkeypatch.setattr(client.time, "monotonic", lambda: 100.0)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(client.atexit, "register", at_exit.append)
    for step in range(1, 50):
        client.progress(step)
    assert newest_step(run, 1) == 1
    at_exit[0]()
    assert newest_step(run, 1) == 49
    assert len((run.events / "script.jsonl").read_text().splitlines()) == 2


def test_what_has_no_step_is_an_error_in_every_place(load: Load, run: RunDir) -> None:
    with pytest.raises(ValueError, match="which step"):
        load().log({"loss": 1.0})
    with pytest.raises(ValueError, match="which step"):
        load(**of(run)).log({"loss": 1.0})


def test_the_stop_file_stops(load: Load, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    client, now_s = load(**of(run)), [0.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now_s[0])
    assert not client.should_stop()
    run.stop_file.touch()
    assert not client.should_stop(), "it looks at the file a few times per second only"
    now_s[0] = 1.0
    assert client.should_stop()
    assert client.should_stop()


def test_term_stops_and_does_not_kill(load: Load, run: RunDir) -> None:
    client = load(**of(run))
    assert not client.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert client.should_stop()


def test_a_handler_of_the_script_stays(load: Load, run: RunDir) -> None:
    handler = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, handler)
    client = load(**of(run))
    client.should_stop()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_folder_that_cannot_be_written_ends_no_training(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = load(**of(RunDir(tmp_path / "gone")))
    for step in range(3):
        client.log({"loss": 1.0}, step=step)
    assert capsys.readouterr().err.count("launch_client: metrics.jsonl was not written") == 1


def test_it_needs_nothing_but_the_standard_library_of_python_3_8() -> None:
    tree = ast.parse(FILE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
