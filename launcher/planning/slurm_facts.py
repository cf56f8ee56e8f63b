"""What SLURM says of itself: version, settings, partitions, and the allocation that this process is in.

Asked with explicit formats, each question in bounded time. The parsers are pure; what a version of SLURM does not say
is None or empty, and a plan goes on without it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.planning.calls import answer

ASK_LIMIT_S = 5.0
KILL_WAIT_S = 30.0
"""SLURM's own default."""
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "NOT_SET", "")
SINFO_FORMAT = "%R|%c|%m|%G"
_QUESTIONS: Mapping[str, Sequence[str]] = {
    "config": ("scontrol", "show", "config"),
    "partitions": ("scontrol", "show", "partition", "-o"),
    "nodes": ("sinfo", "--noheader", "--format", SINFO_FORMAT),
}


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition, as far as a job can meet its limits."""

    name: str
    default: bool = False
    state: str = "UP"
    max_time_s: float | None = None
    """None = no limit."""
    default_time_s: float | None = None
    """The limit of a job that names none. None = the longest."""
    nodes: int | None = None
    max_nodes: int | None = None
    """Of one job. None = no limit."""
    min_nodes: int = 0
    preempt_mode: str = ""
    """What happens to a job of this partition that is preempted: OFF, REQUEUE, CANCEL, SUSPEND ... Empty: not said."""
    grace_s: float | None = None
    """From TERM to the end of a preempted job."""
    cpus_per_node: int | None = None
    """Of its largest node; so are the next two."""
    memory_mib_per_node: int | None = None
    gpus_per_node: int = 0
    gres: tuple[str, ...] = ()
    """The names of its GPUs as `gres` has them: `gpu:a100:4`."""


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """A SLURM that answers, or why it does not."""

    fault: str = ""
    """Why it could not be asked. Empty: it could."""
    version: str = ""
    cluster: str = ""
    job_requeue: bool | None = None
    kill_wait_s: float | None = None
    preempt_type: str = ""
    preempt_mode: str = ""
    max_array_size: int | None = None
    accounting: bool | None = None
    partitions: tuple[Partition, ...] = ()

    @property
    def default_partition(self) -> Partition | None:
        """The one of a job that names none, if there is one."""
        return next((partition for partition in self.partitions if partition.default), None)

    def partition(self, name: str) -> Partition | None:
        """The partition of a name."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    @property
    def preempts(self) -> bool | None:
        """Whether jobs are preempted here at all. None = not known."""
        return None if not self.preempt_type else not self.preempt_type.endswith("/none")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job that this process is in."""

    job: str
    nodes: int
    cpus_per_node: int | None = None
    gpus_per_node: int = 0
    nodelist: str = ""


class SlurmProbe:
    """The questions, asked at once and waited for later, so that other probes run meanwhile.

    recent: what was said a moment ago will do. A launch asks twice, for the plan and before the submission.
    """

    def __init__(self, *, recent: bool = False) -> None:
        self._asked: dict[str, subprocess.Popen[str]] = {}
        self._asked_s = time.monotonic()
        self._place = (os.environ.get("PATH", ""), os.environ.get("SLURM_CONF", ""))
        said_s, said = _answers.get(self._place, (-math.inf, None))
        self._known: SlurmFacts | None = said if recent and self._asked_s - said_s < _FRESH_S else None
        if self._known is not None or shutil.which("scontrol") is None:
            return
        self._asked = {name: _ask(argv) for name, argv in _QUESTIONS.items() if shutil.which(argv[0]) is not None}

    def answer(self, *, limit_s: float = ASK_LIMIT_S) -> SlurmFacts | None:
        """What SLURM says, at most so long after the question; None where there is none on this machine."""
        if not self._asked:
            return self._known
        said: dict[str, str] = {}
        faults: list[str] = []
        for name, process in self._asked.items():
            try:
                left_s = self._asked_s + limit_s - time.monotonic()
                output, errors = answer(process, limit_s=max(0.0, left_s))
            except subprocess.TimeoutExpired:
                faults.append(f"`{' '.join(_QUESTIONS[name])}` does not answer within {limit_s:g} s")
                continue
            said[name] = output
            if process.returncode:
                why = next(iter(errors.strip().splitlines()), f"exit code {process.returncode}")
                faults.append(f"`{' '.join(_QUESTIONS[name])}`: {why}")
        facts = parse_config(said.get("config", ""))
        partitions = with_nodes(parse_partitions(said.get("partitions", "")), said.get("nodes", ""))
        found = replace(facts, partitions=partitions, fault=faults[0] if faults else "")
        _answers[self._place] = time.monotonic(), found
        return found


_FRESH_S = 10.0
_answers: dict[tuple[str, str], tuple[float, SlurmFacts]] = {}
"""What was said, and when, where PATH and SLURM_CONF were these."""


def parse_config(text: str) -> SlurmFacts:
    """`scontrol show config`."""
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line]
    said = {name.strip(): value.strip() for name, _, value in pairs}
    requeue, size = said.get("JobRequeue", ""), said.get("MaxArraySize", "")
    storage = said.get("AccountingStorageType", "")
    return SlurmFacts(
        version=said.get("SLURM_VERSION", ""),
        cluster=said.get("ClusterName", ""),
        job_requeue=requeue == "1" if requeue else None,
        kill_wait_s=_seconds(said.get("KillWait", "")),
        preempt_type=said.get("PreemptType", "").replace("(null)", "preempt/none"),
        preempt_mode=said.get("PreemptMode", ""),
        max_array_size=int(size) if size.isdecimal() else None,
        accounting=not storage.endswith(("none", "(null)")) if storage else None,
    )


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """`scontrol show partition -o`: one line each."""
    return tuple(_partition(line) for line in text.splitlines() if line.startswith("PartitionName="))


def with_nodes(partitions: Sequence[Partition], text: str) -> tuple[Partition, ...]:
    """The partitions with what `sinfo` says of their nodes; of several kinds of nodes, the most of each."""
    kinds: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        name, *rest = line.strip().split("|")
        if len(rest) == SINFO_FORMAT.count("|"):
            kinds.setdefault(name, []).append(rest)
    return tuple(_with_kinds(partition, kinds.get(partition.name, [])) for partition in partitions)


def gpus_in(gres: str) -> int:
    """How many GPUs a list of generic resources has: `gpu:a100:4(S:0-1),nvme:1` has 4, `gpu` has 1."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.strip().replace("=", ":").split(":")
        if kind in ("gpu", "gres/gpu"):
            total += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return total


def time_s(text: str) -> float | None:
    """A time limit as SLURM writes it: `30`, `30:00`, `1:30:00`, `2-12`, `2-12:30:00`. None = unlimited, or no time."""
    if text.strip().upper() in _UNLIMITED:
        return None
    days, dash, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:  # M, M:S, H:M:S
        hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def slurm_time(seconds: float) -> str:
    """A time limit in SLURM's spelling, rounded up to what it can hold: `1-02:03:04`, `00:10:00`."""
    whole = max(1, -int(-seconds // 1))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def allocation_of(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that an environment is in; of a heterogeneous job its first part."""
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NUM_NODES", "")
    nodes = nodes or environment.get("SLURM_JOB_NUM_NODES_HET_GROUP_0", "")
    if not job.isdecimal() or not nodes.isdecimal():
        return None
    on_node, per_node = environment.get("SLURM_GPUS_ON_NODE", ""), environment.get("SLURM_GPUS_PER_NODE", "")
    asked = per_node.rpartition(":")[2]
    # `2(x3),1`: what each node gives; the smallest is what every node has.
    cpus = [int(found) for found in re.findall(r"(?:^|,)(\d+)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    return Allocation(
        job=job,
        nodes=int(nodes),
        cpus_per_node=min(cpus, default=None),
        gpus_per_node=int(on_node) if on_node.isdecimal() else int(asked) if asked.isdecimal() else 0,
        nodelist=environment.get("SLURM_JOB_NODELIST", ""),
    )


def slurm_from_json(raw: Mapping[str, Any] | None) -> SlurmFacts | None:
    """Read it back from `dataclasses.asdict`."""
    if raw is None:
        return None
    partitions = tuple(Partition(**{**each, "gres": tuple(each.get("gres", ()))}) for each in raw.get("partitions", ()))
    return SlurmFacts(**{**raw, "partitions": partitions})


def _ask(argv: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )


def _partition(line: str) -> Partition:
    said = dict(_pairs(line))
    return Partition(
        name=said["PartitionName"],
        default=said.get("Default") == "YES",
        state=said.get("State", "UP"),
        max_time_s=time_s(said.get("MaxTime", "")),
        default_time_s=time_s(said.get("DefaultTime", "")),
        nodes=_number(said.get("TotalNodes")),
        max_nodes=_number(said.get("MaxNodes")),
        min_nodes=_number(said.get("MinNodes")) or 0,
        preempt_mode=said.get("PreemptMode", ""),
        grace_s=_seconds(said.get("GraceTime", "")),
    )


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _with_kinds(partition: Partition, kinds: Sequence[Sequence[str]]) -> Partition:
    if not kinds:
        return partition
    gres = [item for *_, each in kinds for item in re.sub(r"\([^)]*\)", "", each).split(",") if item.startswith("gpu")]
    return replace(
        partition,
        cpus_per_node=max((number for cpus, *_ in kinds if (number := _number(cpus)) is not None), default=None),
        memory_mib_per_node=max(
            (number for _, memory, *_ in kinds if (number := _number(memory)) is not None), default=None
        ),
        gpus_per_node=max(gpus_in(each) for *_, each in kinds),
        gres=tuple(sorted(set(gres))),
    )


def _number(text: str | None) -> int | None:
    """`64`, or `64+` where nodes differ; None for UNLIMITED and what is no number."""
    digits = (text or "").rstrip("+")
    return int(digits) if digits.isdecimal() else None


def _seconds(text: str) -> float | None:
    """`30 sec`, `30`."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    return float(first) if first.isdecimal() else None
