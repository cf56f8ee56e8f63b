"""What SLURM says about jobs, and how they are stopped.

squeue first, in one call for any number of jobs; then sacct, in one call for those that squeue has forgotten; whoever
asks has the events of the run besides. Only fields that are named are read, by the ids of our own jobs, so the names of
other people's jobs cannot spoil an answer. A word that is not known is passed on as it is.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from launcher.errors import Problem, Refused
from launcher.planning import calls
from launcher.runs.observed import Observation

_SQUEUE = ("squeue", "--noheader", "--array", "--all", "--states=all", "--format=%i|%T|%S|%e|%l|%N|%r")
_SACCT = (
    *("sacct", "--noheader", "--parsable2", "--allocations", "--allusers"),
    "--format=JobID,State,ExitCode,End,NodeList",
)
_SQUEUE_LIMIT_S = 20.0
"""A busy controller may take seconds; one that is down makes squeue try for longer than a person waits."""
_SACCT_LIMIT_S = 5.0
"""sacct only adds to what the events say, and a database that is down may hold it up for a minute."""
_SCANCEL_LIMIT_S = 30.0
_IDS_BYTES = 100_000
"""Linux takes no argument of more than 128 KiB. More ids than that: all jobs are asked for, and ours picked out."""

_ALIVE = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "RESIZING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
        "EXPEDITING",
        "POWER_UP_NODE",
    ]
)
_ENDED = frozenset(
    [
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "PREEMPTED",
        "NODE_FAIL",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "REVOKED",
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
    ]
)
_NOTHING = frozenset({"", "None", "N/A", "NONE", "Unknown", "(null)", "None assigned"})
_NO_LIMIT = re.compile(r"UNLIMITED|(36[5-9]|3[7-9]\d|[4-9]\d\d|\d{4,})-")
"""Without a limit SLURM lets a job run for a year."""
_UNKNOWN_ID = re.compile(r"invalid job id", re.IGNORECASE)
_OVER = re.compile(r"already completing or completed|invalid job id", re.IGNORECASE)
_TASKS = re.compile(r"(\d+)_\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(?:%\d+)?\]")
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|not enabled", re.IGNORECASE)


@dataclass(frozen=True)
class _Answer:
    """What a client of SLURM said."""

    output: str = ""
    error: str = ""
    """Why it has no answer, in its own words; empty where it has one."""


def observe_jobs(idents: Iterable[str]) -> dict[str, Observation]:
    """What SLURM says of each of these jobs (`1234`, or `1234_5` of an array). Never raises for what it says."""
    wanted = dict.fromkeys(idents)
    if not wanted:
        return {}
    queue = _ask([*_SQUEUE, *_chosen(wanted)], limit_s=_SQUEUE_LIMIT_S)
    if queue.error and not _UNKNOWN_ID.search(queue.error):
        return dict.fromkeys(wanted, Observation(alive=None, detail=queue.error))
    known = of_each(wanted, parse_squeue(queue.output))
    missing = [ident for ident in wanted if ident not in known]
    if missing:
        known |= _forgotten(missing)
    return {ident: known[ident] for ident in wanted}


def _forgotten(missing: Sequence[str]) -> dict[str, Observation]:
    """Jobs that squeue does not know: they are over for some minutes, or never were."""
    ids = ",".join(missing)
    if len(ids) > _IDS_BYTES:
        ids = ",".join(dict.fromkeys(ident.partition("_")[0] for ident in missing))[:_IDS_BYTES].rpartition(",")[0]
    accounting = _ask([*_SACCT, f"--jobs={ids}"], limit_s=_SACCT_LIMIT_S)
    ended = of_each(missing, parse_sacct(accounting.output))
    note = ""
    if accounting.error and not _NO_ACCOUNTING.search(accounting.error):
        note = f"; its accounting does not answer ({accounting.error})"
    gone = Observation(alive=False, detail=f"SLURM does not know it any more{note}")
    return {ident: ended.get(ident, gone) for ident in missing}


def of_each(wanted: Iterable[str], told: Mapping[str, Observation]) -> dict[str, Observation]:
    """What was said of these jobs. Pure.

    Tasks of an array that were cancelled before they began have one line for all: squeue gives it the id of the array
    (`1234`), sacct that and the tasks (`1234_[3-7,9%2]`).
    """
    together: dict[str, Observation] = {}
    for name, each in told.items():
        if rest := _TASKS.fullmatch(name):
            for part in rest[2].split(","):
                first, _, last = part.partition("-")
                together |= {f"{rest[1]}_{task}": each for task in range(int(first), int(last or first) + 1)}
    found: dict[str, Observation] = {}
    for ident in wanted:
        whole = told.get(ident.partition("_")[0])
        rest_of_array = whole if whole is not None and whole.alive is False else None
        if (seen := told.get(ident) or together.get(ident) or rest_of_array) is not None:
            found[ident] = seen
    return found


def _chosen(wanted: Iterable[str]) -> list[str]:
    """The argument that names the jobs, an array once."""
    ids = ",".join(dict.fromkeys(ident.partition("_")[0] for ident in wanted))
    return [f"--jobs={ids}"] if len(ids) <= _IDS_BYTES else []


def parse_squeue(text: str) -> dict[str, Observation]:
    """Job -> what squeue says. A line that is not as it was asked for is passed over. Pure."""
    found: dict[str, Observation] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 6)]
        if len(fields) != 7 or not fields[0][:1].isdigit():
            continue
        ident, word, starts, ends, limit, nodes, reason = fields
        observed = _observation(word)
        alive = observed.alive is not False
        found[ident] = Observation(
            alive=observed.alive,
            detail=observed.detail,
            state=observed.state,
            reason=_known(reason) if alive else "",
            starts_s=_moment(starts) if observed.waits else None,
            ends_s=None if observed.waits or (alive and _NO_LIMIT.match(limit)) else _moment(ends),
            nodes=_known(nodes),
        )
    return found


def parse_sacct(text: str) -> dict[str, Observation]:
    """Job -> what the accounting says; the last line of a job counts. Pure."""
    found: dict[str, Observation] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 5 or not fields[0][:1].isdigit():
            continue
        ident, word, code, ended, nodes = fields
        observed = _observation(word)
        # Nobody but squeue says who is alive: of a node that died with the database, accounting says RUNNING for ever.
        found[ident] = Observation(
            alive=False,
            exit_code=_exit_code(code),
            detail=f"squeue does not know it, and the accounting calls it {word}" if observed.alive else "",
            state="" if observed.alive else observed.state,
            ends_s=None if observed.alive else _moment(ended),
            nodes=_known(nodes),
        )
    return found


def _observation(said: str) -> Observation:
    """A state of SLURM. `CANCELLED by 1000`, `RUNNING+` and a list of several states begin with the word."""
    words = re.findall(r"[A-Z][A-Z_]+", said.upper().replace("CANCELLED BY", "CANCELLED"))
    state = words[0] if words else said
    if state in _ALIVE:
        return Observation(alive=True, state=state)
    if state in _ENDED:
        return Observation(alive=False, state=state)
    return Observation(alive=None, state=said, detail=f"SLURM calls its state {said!r}, which is not known here")


def _known(field: str) -> str:
    return "" if field in _NOTHING else field


def _moment(field: str) -> float | None:
    """A time as SLURM prints it: seconds since the epoch as we ask for it, ISO and local where it does not listen."""
    if re.fullmatch(r"\d{9,}", field):
        return float(field)
    try:
        return datetime.fromisoformat(field).timestamp()
    except ValueError:
        return None


def _exit_code(field: str) -> int | None:
    """`7:0` -> 7, `0:9` -> 137; `0:125` is SLURM's own word for out of memory, and no signal."""
    match = re.fullmatch(r"(\d+):(\d+)", field)
    if match is None:
        return None
    code, signum = int(match[1]), int(match[2])
    return code if not signum else 128 + signum if signum <= signal.SIGRTMAX else None


def cancel_job(ident: str, *, again: bool = False) -> bool:
    """Ask a job to end. One that waits leaves the queue; the agents of one that runs save and leave, with all the
    time that their plan gives them. `again`: SLURM ends it, whatever it does.

    False: there is nothing to stop. Raises Refused, with SLURM's own sentence, where it may not be stopped.
    """
    observed = observe_jobs([ident])[ident]
    if observed.alive is False:
        return False
    saves = not again and observed.state == "RUNNING" and _has_steps(ident)
    # To the steps alone: the batch side has to outlive its agents.
    answer = _ask(["scancel", *(["--signal=TERM"] if saves else []), ident], limit_s=_SCANCEL_LIMIT_S, quiet=False)
    if answer.error and _OVER.search(answer.error):
        return False
    if answer.error:
        raise Refused([Problem(where=f"job {ident}", message=answer.error)])
    return True


def cancel_waiting(jobs: Sequence[str]) -> None:
    """Take what has not begun of these jobs, arrays among them, out of the queue.

    Raises Refused, with SLURM's own sentence, where that may not be done.
    """
    answer = _ask(["scancel", "--state=PENDING", *jobs], limit_s=_SCANCEL_LIMIT_S, quiet=False)
    if answer.error and not _OVER.search(answer.error):
        raise Refused([Problem(where=f"jobs {', '.join(jobs)}", message=answer.error)])


def _has_steps(ident: str) -> bool:
    """Whether agents of a job run already. Before, it has nothing to save, and nobody would hear the signal."""
    asked = ["squeue", "--noheader", "--steps", f"--jobs={ident}", "--format=%i"]
    steps = _ask(asked, limit_s=_SQUEUE_LIMIT_S).output.split()
    return any(step.rpartition(".")[2].isdigit() for step in steps)


def _ask(argv: Sequence[str], *, limit_s: float, quiet: bool = True) -> _Answer:
    """Run a client of SLURM. `quiet`: what it writes on standard error counts only if it fails."""
    try:
        done = calls.run(argv, limit_s=limit_s, env=_environment(os.environ))
    except FileNotFoundError:
        where = socket.gethostname()
        return _Answer(error=f"there is no {argv[0]} on {where}; ask from a login node of the cluster")
    except subprocess.TimeoutExpired:
        return _Answer(error=f"{argv[0]} has not answered within {limit_s:g} s")
    except OSError as error:
        return _Answer(error=f"{argv[0]}: {error.strerror}")
    said = " ".join(done.stderr.split())
    failed = done.returncode != 0 or (not quiet and "error:" in said)
    return _Answer(done.stdout, (said or f"{argv[0]} ended with {done.returncode}") if failed else "")


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A user's own format or filter for squeue is not for us."""
    own = {name: value for name, value in environment.items() if not name.startswith(("SQUEUE_", "SACCT_", "SCANCEL_"))}
    return {**own, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
