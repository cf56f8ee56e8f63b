"""The folder of temporary files: short, its owner's alone, removed by whoever is left, and never under a living run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import proc, scratch


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR with a short path."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
    monkeypatch.setattr(tempfile, "tempdir", None)


def of_a_dead_owner(base: Path, run: str = "m3xd") -> Path:
    """The folder of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = proc.start_time(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert start is not None
    folder = base / f"launch-{run}-{process.pid}-{start:x}-{scratch._place()}"
    (folder / "inside").mkdir(parents=True)
    return folder


def test_temporary_files_of_a_run_are_in_a_folder_of_its_own(base: Path) -> None:
    scratch.make("lora-1130-1412-m3xd")
    (folder,) = base.iterdir()
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(folder)
    assert folder.name.startswith("launch-m3xd-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{base}/torchinductor_"), "it would be compiled anew"
    (folder / "pymp-x").mkdir()
    (folder / "pymp-x" / "left").touch()
    scratch.clear()
    assert list(base.iterdir()) == []


def test_what_torch_has_compiled_stays_and_an_empty_folder_of_it_does_not(base: Path) -> None:
    for content in ([], ["fx-graph"]):
        os.environ["TMPDIR"] = str(base)
        scratch.forget_default()
        scratch.make("a-m3xd")
        compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        compiled.mkdir()
        for name in content:
            (compiled / name).touch()
        scratch.clear()
        assert compiled.exists() == bool(content)


def test_a_path_that_is_too_long_for_sockets_is_not_used(base: Path) -> None:
    long = base / ("x" * 60)
    long.mkdir()
    os.environ["TMPDIR"] = str(long)
    scratch.make("a-m3xd")
    folder = Path(os.environ["TMPDIR"])
    scratch.clear()
    assert folder.parent == Path("/tmp")
    assert not folder.exists()


def test_where_no_folder_can_be_made_the_run_goes_on_and_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scratch.Path, "mkdir", lambda self, mode: (_ for _ in ()).throw(OSError(28, "No space left")))
    scratch.make("a-m3xd")
    assert os.environ["TMPDIR"] == str(base)
    assert "cannot be made: No space left" in capsys.readouterr().err


def test_only_the_owner_or_the_survivor_of_a_dead_one_removes_a_folder(base: Path) -> None:
    mine = Path(base, f"launch-m3xd-{os.getppid()}-{proc.start_time(os.getppid()) or 0:x}-{scratch._place()}")
    for folder, stays in ((mine, True), (of_a_dead_owner(base), False), (base / "other", True)):
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder)
        scratch.clear()
        assert folder.exists() == stays


def test_a_launch_removes_what_dead_runs_have_left_and_nothing_else(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_SHORT", str(base))
    dead = of_a_dead_owner(base)
    kept = [
        base / f"launch-m3xd-{os.getpid()}-{proc.start_time(os.getpid()) or 0:x}-{scratch._place()}",
        base / "launch-m3xd-1-0-00000000",  # another host, or another space of pids
        base / "launch-pad",
        base / "somebody-else",
    ]
    for folder in kept:
        folder.mkdir()
    (base / dead.name.replace("m3xd", "link")).symlink_to(base / "somebody-else")
    scratch.sweep()
    assert not dead.exists()
    assert all(folder.exists() for folder in kept)


def test_a_pid_that_was_given_out_again_is_not_taken_for_the_owner(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SHORT", str(base))
    folder = base / f"launch-m3xd-{os.getpid()}-{1:x}-{scratch._place()}"
    folder.mkdir()
    scratch.sweep()
    assert not folder.exists()


def test_while_a_process_of_the_run_lives_its_folder_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SHORT", str(base))
    run = uuid.uuid4().hex[:4]
    folder = of_a_dead_owner(base, run=run)
    environment = {**os.environ, "LAUNCH_RUN_ID": f"lora-1130-1412-{run}"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as survivor:
        scratch.sweep()
        assert folder.exists()
        assert survivor.stdin is not None
        survivor.stdin.close()
    scratch.sweep()
    assert not folder.exists()
