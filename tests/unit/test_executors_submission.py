"""What sbatch answers, put into a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.executors.submission import Refusal, sbatch


def submit(folder: Path, program: str) -> tuple[str, tuple[str, ...]]:
    path = folder / "sbatch"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    answered = sbatch("#!/bin/bash\n", folder, flags=(), environment={"PATH": os.environ["PATH"]})
    return answered.job, answered.said


def sentence(folder: Path, program: str) -> str:
    with pytest.raises(Refusal) as refused:
        submit(folder, program)
    return refused.value.sentence


@pytest.fixture(autouse=True)
def only_its_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_banner_is_passed_over(tmp_path: Path) -> None:
    """On standard output it is nobody's; what SLURM's plugins say comes on the other stream, and is passed on."""
    banner = "echo '*** 5 of 10 GB are used ***'; echo 'sbatch: lua: hello' >&2; echo Submitted batch job 77"
    assert submit(tmp_path, banner) == ("77", ("lua: hello",))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1", "Batch job submission failed: no"),
        ("exit 4", "sbatch ended with exit code 4, and said nothing"),
        ("kill -KILL $$", "sbatch ended by SIGKILL, and said nothing"),
        ("true", "sbatch names no job, but says: nothing; `squeue --me` shows whether it took one"),
        (
            "echo welcome; echo Submitted batch job oops",
            "sbatch names no job, but says: welcome; Submitted batch job oops; `squeue --me` shows whether it took one",
        ),
    ],
    ids=["refused", "silent", "killed", "nothing", "no number"],
)
def test_no_job_is_one_line(tmp_path: Path, program: str, said: str) -> None:
    assert sentence(tmp_path, program) == said
