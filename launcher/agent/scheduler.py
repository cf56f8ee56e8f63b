"""The words with SLURM on a node: every call of a SLURM command that the agent side makes is here, bounded in time.

Fields are always named; nothing relies on a default format. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from launcher.agent.allocation import VARIABLES
from launcher.planning import calls
from launcher.planning.worker_env import LAUNCH_NAMES, TORCHRUN_NAMES
from launcher.wording import first_line

_T = TypeVar("_T")
_LIMIT_S = 15.0
_REQUEUE_LIMIT_S = 60.0
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "PMI", "OMPI_COMM_WORLD_", "MPI_LOCAL", "TORCHELASTIC_")
"""Beginnings of what a job, or a starter of ranks in it, adds. OMPI_MCA_* and MPI_HOME are a user's settings."""
_KEPT = frozenset({"SLURM_CONF", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
_UNLIMITED_DAYS = 350
"""SLURM counts down from a year where a job has no limit."""
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out|reset)|socket timed out|zero bytes|unexpected message|standby",
    re.IGNORECASE,
)
_NOT_HEARD = re.compile(r"unable to contact|connection refused", re.IGNORECASE)


class SchedulerError(Exception):
    """What SLURM said, or that it did not."""

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable
        """Nobody has decided anything: it may be otherwise in a minute."""
        self.heard = not _NOT_HEARD.search(text)
        """Whether the controller may have heard the question, and done what was asked, although nothing came back."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What SLURM says of the job that this process is in."""

    state: str
    """RUNNING, COMPLETING, PENDING ..."""
    reason: str = "None"
    restarts: int = 0
    preempted: bool = False
    """Another job takes its place: it is in its grace time."""
    seconds_left: float | None = None
    """To its time limit as it is now (somebody may have changed it), below 0 after it; None where it has none."""


def job_view(job: str) -> JobView:
    """Ask about a job. Raises SchedulerError."""
    return read_job(_call("scontrol", "show", "job", "--oneliner", job))


def read_job(text: str) -> JobView:
    """Read `scontrol show job --oneliner`. A field that this version does not have counts as not set."""
    fields = {name: value for name, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", text)}  # noqa: C416 - the last one counts
    restarts = fields.get("Restarts", "0")
    return JobView(
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", "None"),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        preempted=fields.get("PreemptTime", "None") not in ("None", "Unknown", "N/A", ""),
        seconds_left=_until_limit(fields.get("TimeLimit", ""), fields.get("RunTime", "")),
    )


def _until_limit(limit: str, used: str) -> float | None:
    limit_s, used_s = read_time_left(limit), read_time_left(used)
    return None if limit_s is None or used_s is None else limit_s - used_s


def seconds_left(job: str) -> float | None:
    """Until the time limit ends the job; None where it has none. Raises SchedulerError."""
    return read_time_left(_call("squeue", "--noheader", "--jobs", job, "--format", "%L"))


def read_time_left(text: str) -> float | None:
    """Read `1-02:03:04`, `2:03:04`, `3:04`, or a word: UNLIMITED, NOT_SET, INVALID (it should have ended)."""
    words = text.split()
    if not words:
        return None
    if words[0] == "INVALID":
        return 0.0
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", words[0])
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if days >= _UNLIMITED_DAYS:
        return None
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def host_names(nodelist: str) -> tuple[str, ...]:
    """The names in a list of nodes. Raises SchedulerError."""
    return tuple(_call("scontrol", "show", "hostnames", nodelist).split())


def node_address(host: str) -> str | None:
    """NodeAddr: what SLURM itself reaches a node by. Raises SchedulerError."""
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", _call("scontrol", "show", "node", "--oneliner", host))
    return match[1] if match else None


def hosts_down(hosts: Sequence[str]) -> tuple[str, ...]:
    """Those of these nodes that SLURM has given up, or somebody has taken out of service. Raises SchedulerError."""
    return read_down(_call("sinfo", "--noheader", "--Node", "--nodes", ",".join(hosts), "--format", "%N %T"))


def read_down(text: str) -> tuple[str, ...]:
    """Read `n1 idle`, `n2 down*`: a node, or a node of a partition, a line."""
    words = (line.split() for line in text.splitlines())
    return tuple(dict.fromkeys(each[0] for each in words if len(each) == 2 and each[1].startswith(("down", "fail"))))


def job_hosts(job: str) -> tuple[str, ...]:
    """The nodes that a job has now: those that it has lost are taken out of it. Raises SchedulerError."""
    return host_names(_call("squeue", "--noheader", "--jobs", job, "--format", "%N").strip())


def requeue(job: str) -> None:
    """Put the job back into the queue, which also ends this allocation of it. Raises SchedulerError."""
    _call("scontrol", "requeue", job, limit_s=_REQUEUE_LIMIT_S)


def cancel(job: str) -> None:
    """End the job. Raises SchedulerError."""
    _call("scancel", job)


def persist(
    ask: Callable[[], _T], *, is_in_vain: Callable[[SchedulerError], bool], limit_s: float, pause_s: float
) -> _T:
    """Ask for so long, where the controller is away: a restart of it takes seconds, a fail-over minutes.

    is_in_vain: whether there is no use in asking again after this answer. Raises SchedulerError, the last one.
    """
    by_s = time.monotonic() + limit_s
    while True:
        try:
            return ask()
        except SchedulerError as error:
            if not error.unreachable or is_in_vain(error) or time.monotonic() >= by_s:
                raise
        time.sleep(pause_s)


def submit(script: str, flags: Sequence[str], *, cwd: str) -> str:
    """Submit a batch script again, as from a login node; return the number of the job. Raises SchedulerError."""
    said = _call(
        "sbatch", "--parsable", *flags, stdin=script, env=outside(os.environ), cwd=cwd, limit_s=_REQUEUE_LIMIT_S
    )
    return said.strip().partition(";")[0]


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a job and its ranks have added to it: for a submission, from wherever that comes."""
    added = {*TORCHRUN_NAMES, *LAUNCH_NAMES, *VARIABLES} - _KEPT
    return {
        name: value for name, value in env.items() if name in _KEPT or not (name in added or name.startswith(_OF_A_JOB))
    }


def _call(
    *argv: str,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    limit_s: float = _LIMIT_S,
) -> str:
    try:
        done = calls.run(argv, limit_s=limit_s, told=stdin, env=env, cwd=cwd)
    except FileNotFoundError:
        raise SchedulerError(f"there is no `{argv[0]}` on this node") from None
    except PermissionError as error:
        raise SchedulerError(f"`{argv[0]}` cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"`{' '.join(argv[:3])}` gave no answer in {limit_s:g} s", unreachable=True) from None
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        text = f"`{' '.join(argv[:3])}`: {first_line(said)}"
        raise SchedulerError(text, unreachable=bool(_UNREACHABLE.search(said)))
    return done.stdout
