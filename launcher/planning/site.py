"""From what SLURM says of itself to a profile of the site, with comments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.planning.slurm import LEAST_GRACE_S, STOP_MARGIN_S
from launcher.planning.slurm_facts import Partition, SlurmFacts
from launcher.recipe.scalars import is_null, plain_value
from launcher.wording import aligned, count, short_duration

_LONGEST_S = 24 * 3600.0
"""Asked for where the partition allows more, or any time: a shorter limit starts earlier, and the run goes on."""
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """What a user may charge jobs to."""

    default: str = ""
    names: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    fault: str = ""
    """Why it is not known."""


def parse_accounts(associations: str, default: str) -> Accounts:
    """`sacctmgr -nP show assoc format=Account,QOS` and `sacctmgr -nP show user format=DefaultAccount`."""
    rows = [line.split("|") for line in associations.splitlines() if "|" in line]
    names = dict.fromkeys(account for account, *_ in rows if account)
    qos = dict.fromkeys(name for _, listed, *_ in rows for name in listed.split(",") if name)
    return Accounts(default=default.strip(), names=tuple(names), qos=tuple(qos))


def site_profile(slurm: SlurmFacts, accounts: Accounts, *, name: str, schema: str) -> str:
    """The text of a profile: what a job needs here, and what there is to choose from as comments.

    schema: path of the profiles' JSON Schema, for editors. Whatever `slurm` does not know is left to the user.
    """
    return "\n".join(line.rstrip() for line in _lines(slurm, accounts, name=name, schema=schema)) + "\n"


def chosen_partition(slurm: SlurmFacts) -> Partition | None:
    """The one that a job goes to which names none; where there is no such thing, the largest that is up."""
    up = [partition for partition in slurm.partitions if partition.state == "UP"]
    return slurm.default_partition or max(up, key=lambda partition: partition.nodes or 0, default=None)


def _lines(slurm: SlurmFacts, accounts: Accounts, *, name: str, schema: str) -> Iterator[str]:
    partition = chosen_partition(slurm)
    yield f"# yaml-language-server: $schema={schema}"
    yield "#"
    yield f"# The cluster {slurm.cluster or name} as `launch init-site` found it. Change what is wrong."
    yield "# A recipe says it better, and KEY=VALUE better still."
    yield "#"
    yield f"#   launch RECIPE --on {name} --dry-run"
    yield "#"
    yield from _table(slurm.partitions)
    yield ""
    yield "executor: slurm"
    yield f"description: {_text(slurm.cluster or name)}, SLURM {slurm.version}".rstrip(", ")
    yield ""
    yield "slurm:"
    yield from _partition(slurm, partition)
    yield from _accounts(accounts)
    yield from _node(partition)
    yield from _time(partition)
    yield f"  # continue: auto            # {_continuing(slurm, partition)}"
    yield "  # constraint: ...           # features of nodes: sinfo -o '%N %f'"
    yield "  # exclusive: true           # whole nodes"
    yield "  # sbatch: {mail-type: FAIL} # any other flag of sbatch, by its long name"
    yield "  # container: {runtime: apptainer, image: /images/pytorch.sif, args: [--nv]}    # or pyxis; for scripts"
    yield ""
    yield from _rest(slurm)


def _table(partitions: Sequence[Partition]) -> Iterator[str]:
    """The partitions as comments, one line each."""
    if not partitions:
        yield "# Its partitions could not be read: sinfo -s"
        return
    rows = [("partition", "nodes", "GPUs", "CPUs", "memory", "longest", "preempted jobs")]
    for each in partitions:
        rows.append(
            (
                f"{each.name}{'*' if each.default else ''}{'' if each.state == 'UP' else f' ({each.state})'}",
                _known(each.nodes),
                ", ".join(each.gres) or "-",
                _known(each.cpus_per_node),
                "?" if each.memory_mib_per_node is None else f"{each.memory_mib_per_node // 1024} GiB",
                "no limit" if each.max_time_s is None else short_duration(each.max_time_s),
                {"": "?", "OFF": "never"}.get(each.preempt_mode, each.preempt_mode.lower()),
            )
        )
    yield from (f"#   {line}" for line in aligned(rows))
    if any(each.default for each in partitions):
        yield "# (* = the default; GPUs, CPUs and memory of a node, where nodes differ of the largest)"


def _partition(slurm: SlurmFacts, partition: Partition | None) -> Iterator[str]:
    if partition is None:
        yield "  # partition: ...            # sinfo -s"
        return
    reason = "the default" if partition.default else "the largest: there is no default"
    others = [each.name for each in slurm.partitions if each.name != partition.name and each.state == "UP"]
    yield _line(f"partition: {_text(partition.name)}", reason + (f"; or {', '.join(others)}" if others else ""))
    if not partition.gpus_per_node:
        with_gpus = [each.name for each in slurm.partitions if each.gpus_per_node]
        if with_gpus:
            yield f"  # it has no GPUs; {', '.join(with_gpus)} {'has' if len(with_gpus) == 1 else 'have'}"


def _accounts(accounts: Accounts) -> Iterator[str]:
    if accounts.fault:
        yield f"  # account: ...              # not known: {accounts.fault}"
    elif accounts.names:
        default = f"; without it SLURM takes {accounts.default}" if accounts.default else ""
        example = accounts.default or accounts.names[0]
        yield _line(f"# account: {_text(example)}", f"yours: {', '.join(accounts.names)}{default}")
    else:
        yield "  # account: ...              # this cluster keeps no accounts, or none of yours"
    if accounts.qos:
        yield _line(f"# qos: {_text(accounts.qos[0])}", f"yours: {', '.join(accounts.qos)}")


def _node(partition: Partition | None) -> Iterator[str]:
    """GPUs, and their shares of the CPUs and of the memory. Without GPUs the CPUs follow from the workers."""
    if partition is None or not partition.gpus_per_node:
        yield "  # gpus_per_node: 4          # none: the workers use CPUs"
        yield "  # mem: 16G                  # or mem_per_cpu, mem_per_gpu; without it the default of the site"
        return
    gpus, cpus, memory = partition.gpus_per_node, partition.cpus_per_node, partition.memory_mib_per_node
    yield _line(f"gpus_per_node: {gpus}", f"of {', '.join(partition.gres)}; in its place, gres: NAME:{gpus}")
    if cpus is not None and cpus >= gpus:
        yield _line(f"cpus_per_gpu: {cpus // gpus}", f"{cpus} CPUs / {gpus}")
    elif cpus is not None:
        yield _line(f"cpus_per_node: {cpus}", f"all; fewer than its {count(gpus, 'GPU')}")
    if memory is not None:
        yield _line(f"mem_per_gpu: {memory // gpus}M", f"{memory} MiB / {gpus}; leave it out where the site wants that")


def _time(partition: Partition | None) -> Iterator[str]:
    note = "of one allocation; the run goes on in the next one until it is done"
    longest = None if partition is None else partition.max_time_s
    usual = None if partition is None else partition.default_time_s
    yield _line(f"time: {_span(min(longest or _LONGEST_S, _LONGEST_S))}", note)
    if usual is not None:
        yield f"  # a job that names none has {_span(usual)}"


def _continuing(slurm: SlurmFacts, partition: Partition | None) -> str:
    """What `auto` will be, and why."""
    mode = "" if partition is None else partition.preempt_mode
    if slurm.preempts is False:
        return "requeue; jobs are not preempted here" + _no_requeue(slurm)
    if mode.startswith("CANCEL"):
        return "resubmit, since a preempted job is cancelled here (PreemptMode=CANCEL)"
    grace = "" if partition is None or partition.grace_s is None else f", {partition.grace_s:g} s after its TERM"
    known = {"": "", "OFF": "; jobs of this partition are not preempted", "REQUEUE": f"; a preempted job is too{grace}"}
    return "requeue" + known.get(mode, f" (PreemptMode={mode})") + _no_requeue(slurm)


def _no_requeue(slurm: SlurmFacts) -> str:
    return " (JobRequeue=0: by default jobs are not; ours ask for it)" if slurm.job_requeue is False else ""


def _rest(slurm: SlurmFacts) -> Iterator[str]:
    if slurm.kill_wait_s is not None:
        grace = max(LEAST_GRACE_S, slurm.kill_wait_s - STOP_MARGIN_S)
        yield f"# faults: {{grace: auto}}       # {grace:g} s to save and leave: KillWait is {slurm.kill_wait_s:g} s"
    if slurm.max_array_size is not None:
        yield f"# sweeps are arrays of at most {slurm.max_array_size} (MaxArraySize); larger ones are several"
    yield "# network: {preset: infiniband, interface: ib0}    # ip -br address, on a node"
    yield "# setup: [module load CUDA/12.4, source ~/envs/train/bin/activate]    # on each node, before anything else"
    yield "# python: ~/envs/train/bin/python    # of scripts; it needs torch"
    yield "# runs_dir: ~/runs            # on a file system that every node sees; by default ./runs"
    yield "# scratch: /tmp/$SLURM_JOB_ID # fast, of a node alone: temporary files"
    yield "# internet: false             # where nodes reach nothing outside: W&B and Hugging Face work offline"


def _line(setting: str, comment: str) -> str:
    return f"  {setting:<26}  # {comment}"


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _span(seconds: float) -> str:
    """A limit as a recipe has it, down to the minute: `48h`, `90m`."""
    minutes = max(1, int(seconds // 60))
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"


def _text(name: str) -> str:
    """A name as YAML reads it back as text."""
    bare = _BARE.fullmatch(name) and not is_null(name) and isinstance(plain_value(name), str)
    return name if bare else json.dumps(name)
