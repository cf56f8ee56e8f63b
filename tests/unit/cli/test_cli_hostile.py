"""Places where a command is called that are not as they should be: streams, folders, names, spoiled files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.failures import guarded

LAUNCH = str(Path(sys.executable).with_name("launch"))


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one line; `$LAUNCH` is the command."""
    env = {**os.environ, "LAUNCH": LAUNCH, "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, cwd=folder, env=env)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(closed: str, tmp_path: Path) -> None:
    """As a process manager may start a command; a run went down with its `launch` once."""
    (tmp_path / "train.py").touch()
    for command in ("--help", "ls", "train.py --on local --dry-run"):
        done = shell(f"$LAUNCH {command} {closed}", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["ls", "ls --json", "schema", "nosuch.yaml --json"])
def test_standard_output_on_a_full_disk_is_a_sentence(command: str, unbuffered: str, tmp_path: Path) -> None:
    done = shell(f"PYTHONUNBUFFERED={unbuffered} $LAUNCH {command} >/dev/full", tmp_path)
    assert done.returncode == (2 if command.startswith("nosuch") else 3)
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert "fault" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_current_folder_that_was_deleted_is_said(tmp_path: Path) -> None:
    done = shell("mkdir gone && cd gone && rmdir ../gone && $LAUNCH ../train.py --on local", tmp_path)
    assert done.returncode == 3
    assert "launch: the current folder was deleted" in done.stderr


def test_arguments_that_are_no_text_are_refused(launch: Callable[..., Any]) -> None:
    said = launch("train.py", "--", "\udcff")
    assert said.code == 2
    assert said.err == "'\\udcff': is not UTF-8\n"


def test_a_folder_that_is_no_text_leaves_nothing_behind(
    launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"q\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").touch()
    said = launch("train.py")
    assert said.code == 3
    assert "a path is not UTF-8" in said.err
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize("target", ["a" * 300, "a" * 300 + ".yaml", "loop.yaml", "~nobody-of-that-name/a.yaml"])
def test_names_that_no_file_has_are_a_mistake_of_the_user(launch: Callable[..., Any], target: str) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert launch(target).code == 2
    assert launch("check", target).code == 2
    assert launch("status", target).code == 2


def test_spoiled_files_of_one_run_hide_no_other(launch: Callable[..., Any]) -> None:
    launch("train.py", "--name", "good")
    spoiled = Path(launch("train.py", "--name", "bad", "--detach", "--json").json["run_dir"])
    (spoiled / "result.json").write_bytes(b"\0\0\0")
    (spoiled / "metrics.jsonl").write_bytes(b'\0\0\n{"step": 1\n[1]\n')
    pointers = Path(os.environ["XDG_STATE_HOME"]) / "launcher" / "runs"
    (pointers / "zz_stray.json").touch()
    (pointers / "20200101T000000.0_empty.json").write_text("{}")
    listed = launch("ls", "--json").json["runs"]
    assert [row["run_id"].partition("-")[0] for row in listed] == ["bad", "good", "empty"]
    assert launch("status", spoiled.name).code == 0


def test_a_plan_that_is_none_is_refused(launch: Callable[..., Any]) -> None:
    run = Path(launch("train.py", "--json").json["run_dir"])
    plan = json.loads((run / "plan.json").read_text())
    del plan["worker"]
    for text in ("[]", json.dumps(plan), "{"):
        (run / "plan.json").write_text(text)
        said = launch("resume", run.name)
        assert said.code == 3
        assert str(run / "plan.json") in said.err


def test_an_error_of_the_system_puts_nothing_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Which holds one JSON object, and nothing else."""

    def fails() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    assert guarded(fails, ["--json"]) == 70
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["error"]["exit_code"] == 70
