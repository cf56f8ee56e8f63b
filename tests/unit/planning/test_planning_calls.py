"""Whoever does not answer is not waited for, nor what it has started."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from launcher.planning.calls import run


def test_what_a_program_is_told_and_says() -> None:
    done = run(["sh", "-c", "cat; echo no >&2; exit 3"], limit_s=20, told="yes\n")
    assert (done.stdout, done.stderr, done.returncode) == ("yes\n", "no\n", 3)


def test_a_script_around_a_program_that_hangs(tmp_path: Path) -> None:
    """The program has the script's streams open: who waits for their end waits for ever."""
    begun_s = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/pid; wait"], limit_s=0.5)
    assert time.monotonic() - begun_s < 20
    inner = int((tmp_path / "pid").read_text())
    for _ in range(400):
        if not os.path.exists(f"/proc/{inner}") or b"\nState:\tZ" in Path(f"/proc/{inner}/status").read_bytes():  # noqa: PTH110
            return
        time.sleep(0.05)
    pytest.fail("it is still there")
