"""`launch doctor` where tools hang, say nonsense, or are not there: its time is limited, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TOOLS = ("nvidia-smi", "docker", "podman", "quota", "sinfo")
LIMIT_S = 15.0


def doctor(folder: Path, program: str, *, only: bool = False) -> tuple[dict[str, Any], float]:
    bin_ = folder / "bin"
    bin_.mkdir()
    for name in TOOLS:
        (bin_ / name).write_text(program)
        (bin_ / name).chmod(0o755)
    path = str(bin_) if only else f"{bin_}:{os.environ['PATH']}"
    begin_s = time.monotonic()
    done = subprocess.run(
        [LAUNCH, "doctor", "--json", "--no-all-reduce"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    took_s = time.monotonic() - begin_s
    assert done.stderr == ""
    return json.loads(done.stdout), took_s


def messages(said: dict[str, Any]) -> dict[str, str]:
    return {each["what"]: each["message"] for each in said["findings"]}


def test_tools_that_hang(tmp_path: Path) -> None:
    marker = f"{tmp_path}/bin"
    said, took_s = doctor(tmp_path, "#!/bin/sh\nsleep 300\n")
    found = messages(said)
    assert found["GPU health"] == "nvidia-smi does not answer"
    assert found["Docker"] == "the engine does not answer"
    assert found["SLURM"] == "it does not answer"
    assert took_s < LIMIT_S
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if marker.encode() in command]


def test_tools_that_say_nonsense(tmp_path: Path) -> None:
    said, _ = doctor(tmp_path, "#!/bin/sh\necho 'launch-host gpu 1, \\x00 %s $(x) é'; echo ,,,,; exit 0\n")
    assert "torch" in messages(said)


def test_no_tool_at_all_not_even_a_shell(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    said, _ = doctor(tmp_path / "none", "#!/nowhere/interpreter\n", only=True)
    assert "sh: not found" in messages(said)["probe"]
