"""The folder in memory: of this run and this machine, removed by whoever is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_agent_scratch import of_a_dead_owner

from launcher.agent import memory


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, "")
    monkeypatch.delenv(memory.VARIABLE)


def test_each_node_of_a_machine_has_its_own_and_all_goes_with_the_run(tmp_path: Path) -> None:
    memory.make("tiny-1130-1412-m3xd", base=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("launch-m3xd-")
    assert folder.stat().st_mode & 0o777 == 0o700
    first, second = memory.of_node(0), memory.of_node(1)
    assert (first, second) == (f"{folder}/node-0", f"{folder}/node-1")
    assert memory.of_node(0) == first
    Path(str(first), "step-7").mkdir()
    memory.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_has_removed_is_made_again_and_one_that_cannot_be_used_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.make("tiny-m3xd", base=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    folder.rmdir()  # as systemd does at the end of a session
    assert memory.of_node(0) == f"{folder}/node-0"
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "node-1").write_text("")
    assert memory.of_node(1) is None
    assert "node 1 keeps no states in memory" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        assert memory.of_node(0) is None
    assert "another user" in capsys.readouterr().err


def test_where_there_is_none_nobody_is_told_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.make("tiny-m3xd", base=str(tmp_path / "missing"))
    assert memory.of_node(0) is None
    assert "no states are kept in memory" in capsys.readouterr().err
    memory.sweep(base=str(tmp_path / "missing"))


def test_the_folder_of_another_run_is_forgotten_and_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / f"launch-m3xd-{os.getppid()}-{1:x}-0123abcd"
    theirs.mkdir()
    os.environ[memory.VARIABLE] = str(tmp_path)
    memory.clear()
    assert theirs.exists()
    memory.forget()
    assert memory.of_node(0) is None


def test_the_folder_of_a_dead_owner_is_removed_by_who_is_left_and_by_the_next_run(tmp_path: Path) -> None:
    left = of_a_dead_owner(tmp_path)
    os.environ[memory.VARIABLE] = str(left)
    memory.clear()
    assert not left.exists()
    swept = of_a_dead_owner(tmp_path)
    memory.sweep(base=str(tmp_path))
    assert not swept.exists()
