from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_executor import FakeExecutor

from launcher.cli.app import run_app
from launcher.executors import base


@dataclass
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of standard output."""
        fields: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return fields


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeExecutor]]:
    """An empty folder with a script in it, where `--on local` is the fake executor."""
    folder = tmp_path / 'it\'s a "place"'
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("LAUNCH_RUNS", raising=False)
    monkeypatch.setitem(base.EXECUTORS, "local", "fake_executor:FakeExecutor")
    monkeypatch.setattr("launcher.planning.facts._slurm_configured", lambda: False)
    for module in ("follow", "logs", "runs"):
        monkeypatch.setattr(f"launcher.cli.{module}._POLL_S", 0.0005)
    for name in ("jobs", "runs"):
        monkeypatch.setattr(FakeExecutor, name, {})
    for name in ("plans", "attached", "signals"):
        monkeypatch.setattr(FakeExecutor, name, [])
    return FakeExecutor


@pytest.fixture
def launch(place: type[FakeExecutor], capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run `launch` in this process."""

    def call(*arguments: str) -> Said:
        code = run_app(list(arguments))
        captured = capfd.readouterr()
        return Said(code, captured.out, captured.err)

    return call
