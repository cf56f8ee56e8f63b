"""SLURM: the batch script of a plan, submitted by sbatch. What follows, its batch side decides."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from launcher.errors import Problem, Refused
from launcher.executors.base import JobRef
from launcher.executors.slurm_jobs import cancel_job, observe_jobs
from launcher.planning.plan import Plan, SbatchFlag
from launcher.planning.slurm import FIRST_ONLY
from launcher.runs.observed import UNKNOWN, Observation
from launcher.runs.rundir import RunDir

if TYPE_CHECKING:
    from launcher.executors.submission import Accepted


class SlurmExecutor:
    """Submits a plan as a job, or as a chain of jobs."""

    name: ClassVar[str] = "slurm"

    def check(self, plan: Plan) -> Sequence[Problem]:
        """All that would only be seen after hours in the queue."""
        if shutil.which("sbatch") is None:
            hint = "launch on a login node of the cluster; --dry-run shows the plan anywhere, --on local runs here"
            return [Problem(where="--on slurm", message="there is no sbatch on this machine", hint=hint)]
        from launcher.executors.slurm_check import preflight

        return preflight(plan)

    def warm(self, run_dir: Path) -> None:
        """Nobody waits for a job to be submitted."""

    def drop(self) -> None:
        """Nothing was begun."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Queue the job, or all jobs of a chain, and return the first one. Raises Refused with SLURM's own sentence.

        `attached` is no matter here: a job belongs to SLURM, not to the process that submits it.
        """
        assert plan.slurm is not None
        run.slurm.mkdir(exist_ok=True)  # SLURM opens its log there before anything of ours runs, and makes no folder
        run.agents_log.parent.mkdir(exist_ok=True)
        first_only = [_word(flag) for flag in plan.slurm.flags if flag.flag in FIRST_ONLY]
        jobs: list[str] = []
        said: dict[str, None] = {}
        try:
            for _ in range(max(1, plan.slurm.chain)):
                flags = first_only if not jobs else [f"--dependency=afterany:{jobs[-1]}"]
                accepted = _sbatch(plan.slurm.script, run.slurm, flags, plan.slurm.flags)
                jobs.append(accepted.job)
                said |= dict.fromkeys(accepted.said)
        except Refused as error:
            raise Refused([*error.problems, *_taken_back(jobs)]) from error
        return JobRef(self.name, jobs[0], following=tuple(jobs[1:]), said=tuple(said))

    def submit_script(
        self, script: str, folder: Path, *, flags: Sequence[str] = (), known: Sequence[SbatchFlag] = ()
    ) -> str:
        """Queue a script and return the id of its job. Raises Refused with SLURM's own sentence.

        folder: where the script is kept, as `batch.sh`, and as `batch-JOB.sh`. flags: of this submission alone, for the
        command line of sbatch. known: the flags in the script with the keys that set them, for the message.
        """
        return _sbatch(script, folder, flags, known).job

    def observe(self, ref: JobRef) -> Observation:
        """What squeue says, else sacct."""
        return observe_jobs([ref.ident]).get(ref.ident, UNKNOWN)

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        """The same of many jobs, in one question."""
        found = observe_jobs([ref.ident for ref in refs])
        return {ref: found.get(ref.ident, UNKNOWN) for ref in refs}

    def cancel(self, ref: JobRef, *, signum: int, again: bool = False) -> bool:
        """Ask the agents of a job to save and leave, or take it out of the queue."""
        return cancel_job(ref.ident, again=again)


_PASSED_ON = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_TIMELIMIT": "--time",
}
"""Variables of sbatch that count where the plan does not say it. They would beat what stands in the script."""


def submit_environment(environment: Mapping[str, str], flags: Sequence[SbatchFlag]) -> dict[str, str]:
    """What a job inherits: the user's environment, without the job that this process may be in, and without ranks."""
    from launcher.agent.scheduler import outside

    said = {flag.flag for flag in flags}
    return {
        name: value
        for name, value in outside(environment).items()
        if not name.startswith("SBATCH_") or _PASSED_ON.get(name, "") not in ("", *said)
    }


def _sbatch(script: str, folder: Path, flags: Sequence[str], known: Sequence[SbatchFlag]) -> Accepted:
    from launcher.executors.submission import Refusal, sbatch  # submitit takes its time to import

    try:
        return sbatch(script, folder, flags=flags, environment=submit_environment(os.environ, known))
    except Refusal as error:
        raise Refused([_refused(error.sentence, flags, known)]) from error


def _taken_back(jobs: Sequence[str]) -> Iterator[Problem]:
    """Cancel the jobs of a chain that SLURM did not take to its end; what cannot be cancelled is said."""
    for job in reversed(jobs):
        try:
            cancel_job(job, again=True)
        except Refused as error:
            hint = f"it does nothing without its run directory, which is removed: scancel {job}"
            yield Problem(where=f"job {job}", message=f"it is still queued: {error.problems[0].message}", hint=hint)


def _word(flag: SbatchFlag) -> str:
    return f"{flag.flag}={flag.value}" if flag.value else flag.flag


def _refused(sentence: str, flags: Sequence[str], known: Sequence[SbatchFlag]) -> Problem:
    """SLURM's own words, and who set each flag that was sent."""
    own = [_word(flag) for flag in known if flag.key == "plan"]
    keys = [f"{_word(flag)} ({flag.key})" for flag in known if flag.key != "plan"]
    sent = ", ".join([*keys, *(shlex.quote(flag) for flag in flags if flag.split("=")[0] not in FIRST_ONLY)])
    hint = f"sent: {sent}; and by the launcher: {', '.join(own)}" if known else f"sent: {sent}"
    return Problem(where="sbatch", message=sentence, hint=hint)
