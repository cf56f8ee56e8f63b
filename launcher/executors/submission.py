"""One call of sbatch, by submitit: its command and the reading of its answer. Our script, and no pickle."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import submitit
from submitit.core.utils import FailedSubmissionError

from launcher.planning import calls
from launcher.wording import signal_name

LIMIT_S = 120.0
"""A busy controller answers late; one that is away makes sbatch try for about that long."""


class Refusal(Exception):  # noqa: N818 - what SLURM gives
    """SLURM does not take the job."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class Accepted(NamedTuple):
    """SLURM has taken a job."""

    job: str
    said: tuple[str, ...]
    """What it said besides, line by line."""


class _OwnScript(submitit.SlurmExecutor):
    """submitit's way to submit, with a script of ours and flags of this submission."""

    def __init__(self, folder: Path, script: str, flags: Sequence[str]) -> None:
        super().__init__(folder)
        self._script, self._flags = script, flags

    @classmethod
    def affinity(cls) -> int:
        """Whether this is a place to submit from is for sbatch to say, in words that a user can do something with."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        program, *rest = super()._make_submission_command(submission_file_path)
        return [program, *self._flags, *rest]

    def send(self, path: Path, environment: Mapping[str, str]) -> Accepted:
        """Submit the script that lies there."""
        # In a session of its own: a Ctrl-C must not end it half-way, then nobody knows whether there is a job.
        done = calls.run(self._make_submission_command(path), limit_s=LIMIT_S, env=environment)
        if done.returncode:
            said = "; ".join(_lines(done.stderr))
            how = f"with exit code {done.returncode}" if done.returncode > 0 else f"by {signal_name(-done.returncode)}"
            raise Refusal(said or f"sbatch ended {how}, and said nothing")
        try:
            job: str = self._get_job_id_from_submission_command(done.stdout)
        except FailedSubmissionError:
            said = "; ".join(_lines(done.stdout)) or "nothing"
            raise Refusal(f"sbatch names no job, but says: {said}; `squeue --me` shows whether it took one") from None
        return Accepted(job, tuple(_lines(done.stderr)))


def sbatch(script: str, folder: Path, *, flags: Sequence[str], environment: Mapping[str, str]) -> Accepted:
    """Submit a script. Raises Refusal.

    It is kept in the folder as `batch.sh`, the newest, and as `batch-JOB.sh`.
    """
    path = folder / "batch.sh"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    sender = _OwnScript(folder, script, flags)
    try:
        accepted = sender.send(path, environment)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"sbatch has not answered within {LIMIT_S:.0f} s; `squeue --me` says whether it was taken"
        ) from None
    except OSError as error:
        raise Refusal(str(error)) from error
    shutil.copy(path, folder / f"batch-{accepted.job}.sh")
    return accepted


def _lines(errors: str) -> list[str]:
    """What sbatch says, without its name in front of each line."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in errors.splitlines()]
    return [line for line in lines if line]
