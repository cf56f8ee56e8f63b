"""The job of a run on SLURM: its flags, its batch script, the line that starts its agents. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.batch_script import TemplateError, batch_script
from launcher.planning.plan import SbatchFlag, SlurmPlan, slurm_agent_argv
from launcher.planning.sbatch_flags import sbatch_findings
from launcher.planning.slurm_facts import KILL_WAIT_S, Partition, SlurmFacts, slurm_time
from launcher.planning.topology import Finding, Remarks
from launcher.wording import duration

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.slurm_nodes import NodeShape
    from launcher.recipe.schema import ContainerSection, Recipe

_UNFIT = {"\\": "a backslash", "\n": "a line end"}
"""After a backslash SLURM fills in no placeholder of a file name."""
STOP_MARGIN_S = 5.0
"""Between the end of a stop by the agents and SLURM's KILL."""
LEAST_GRACE_S = 5.0
FIRST_ONLY = ("--begin", "--dependency", "--kill-on-invalid-dep")
"""Flags of the first submission alone, on the command line: a script that is submitted again does not have them."""
_TEXTS = ("partition", "account", "qos", "constraint", "reservation", "gres", "begin")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
_MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
_AMOUNT = re.compile(r"\d+(\.\d+)?[KMGT]?B?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the rest of the plan has decided, as far as the job depends on it."""

    run_id: str
    run_dir: str
    cwd: str
    folders: tuple[str, ...]
    """What the workers read: has to be seen inside a container."""
    shape: NodeShape
    own_python: str
    """Our interpreter, which runs the batch side."""
    python: str
    """That of the workers."""
    own: bool
    """Whether the two are one."""
    resumable: bool
    inside: bool = False
    """Whether the job is the one that this process is in: nothing is submitted."""


@dataclass(frozen=True, kw_only=True)
class Continuing:
    """Who starts the next allocation."""

    how: str
    reason: str
    chain: int = 0


def plan_slurm(recipe: Recipe, facts: Facts, job: Job, remarks: Remarks) -> SlurmPlan:
    """The job. What is wrong goes to `remarks`."""
    remarks.problems += sbatch_findings(recipe.slurm.sbatch)
    remarks.problems += _memory_findings(recipe, job)
    remarks.problems += _text_findings(recipe)
    continuing = continue_run(recipe, facts, job, remarks)
    flags = () if job.inside else (*_flags(recipe, facts, job, continuing), *_sbatch_extras(recipe))
    plan = SlurmPlan(
        flags=flags,
        script="" if job.inside else _script(recipe, facts, job, flags, remarks),
        srun=srun_argv(recipe, job),
        continue_how=continuing.how,
        continue_reason=continuing.reason,
        chain=continuing.chain,
        partition="" if job.inside else _partition_name(recipe, facts),
        time_s=None if job.inside else _time_s(recipe, partition_of(recipe, facts)),
        kill_wait_s=kill_wait_s(facts),
        cpus_per_node=job.shape.cpus,
        gpus_per_node=job.shape.gpus,
        interface=recipe.network.interface,
    )
    remarks.notes += _notes(recipe, facts, job, plan)
    return plan


def kill_wait_s(facts: Facts) -> float:
    """From TERM to KILL at the end of a job."""
    found = None if facts.slurm is None else facts.slurm.kill_wait_s
    return KILL_WAIT_S if found is None else found


def grace_of(recipe: Recipe, facts: Facts, remarks: Remarks) -> float:
    """How long a stop may take. One that takes longer than SLURM waits is cut off."""
    kill_wait, partition = kill_wait_s(facts), partition_of(recipe, facts)
    asked = recipe.faults.grace
    grace = max(LEAST_GRACE_S, kill_wait - STOP_MARGIN_S) if asked == "auto" else asked.time_s
    if grace > kill_wait:
        remarks.notes.append(
            f"faults.grace is {grace:g} s, but SLURM kills {kill_wait:g} s after its TERM (KillWait): "
            "a stop that it orders has no more"
        )
    preempted = partition is not None and partition.preempt_mode not in ("", "OFF") and _preempts(facts)
    if preempted and partition is not None and partition.grace_s is not None and grace > partition.grace_s + kill_wait:
        remarks.notes.append(
            f"faults.grace is {grace:g} s, but a job of the partition {partition.name} that is preempted has "
            f"{partition.grace_s:g} s (GraceTime)"
        )
    return grace


def partition_of(recipe: Recipe, facts: Facts) -> Partition | None:
    """The one partition that the job goes to, as far as that is known."""
    if facts.slurm is None:
        return None
    name = recipe.slurm.partition or facts.environment.get("SBATCH_PARTITION")
    return facts.slurm.default_partition if name is None else facts.slurm.partition(name)


def _partition_name(recipe: Recipe, facts: Facts) -> str:
    found = partition_of(recipe, facts)
    return found.name if found is not None else recipe.slurm.partition or facts.environment.get("SBATCH_PARTITION", "")


def continue_run(recipe: Recipe, facts: Facts, job: Job, remarks: Remarks) -> Continuing:
    """Who starts the next allocation: as asked, else what the site allows."""
    asked = recipe.slurm.continue_
    if job.inside:
        return Continuing(how="none", reason="the allocation is yours")
    if not job.resumable:
        if asked not in ("auto", "none"):
            remarks.problems.append(
                Finding(
                    "slurm.continue",
                    f"slurm.continue: {asked} needs something to go on from, and there is no `resume:`",
                    "add `resume:` (self, lightning, hf, or {newest, args}), or continue: none",
                )
            )
        return Continuing(how="none", reason="there is no `resume:` to go on from")
    partition = partition_of(recipe, facts)
    cancels = partition is not None and _cancels(partition, facts.slurm)
    name = "" if partition is None else partition.name
    if asked == "auto":
        if cancels:
            reason = f"the partition {name} cancels what it preempts (PreemptMode=CANCEL)"
            return Continuing(how="resubmit", reason=reason)
        known = "" if facts.slurm is not None and not facts.slurm.fault else ", as far as is known here"
        return Continuing(how="requeue", reason=f"the site allows it{known}")
    if asked == "requeue" and cancels:
        remarks.notes.append(
            f"slurm.continue is requeue, but the partition {name} cancels what it preempts (PreemptMode=CANCEL): "
            "a preempted run would end there; continue: resubmit goes on"
        )
    how, _, number = asked.partition(":")
    return Continuing(how=how, reason="as asked", chain=int(number) if number else 0)


def srun_argv(recipe: Recipe, job: Job) -> tuple[str, ...]:
    """What starts one agent on each node. Everything is said, so that no variable of the environment decides."""
    nodes, container, elastic = recipe.resources.max_nodes, recipe.slurm.container, recipe.resources.is_elastic
    argv = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.shape.cpus}",
        # Of MIN:MAX nodes one that is lost ends neither the step nor the others.
        *(("--no-kill", "--kill-on-bad-exit=0", "--wait=0") if elastic else ("--kill-on-bad-exit=1", "--wait=60")),
        "--mpi=none",
        "--input=none",
        f"--output={escaped(job.run_dir)}/logs/agents.log",
        "--open-mode=append",
        "--export=ALL",
    ]
    agent = slurm_agent_argv(job.python, job.run_dir, "task", own=job.own)
    if container is None:
        return (*argv, *agent)
    if container.runtime == "pyxis":
        return (*argv, *_pyxis(container, job), *agent)
    return (*argv, *_apptainer(container, job), *agent)


def escaped(path: str) -> str:
    """A path in a file name pattern of SLURM, where % begins a placeholder."""
    return path.replace("%", "%%")


def _pyxis(container: ContainerSection, job: Job) -> Iterator[str]:
    yield f"--container-image={container.image}"
    yield f"--container-mounts={','.join(_mounts(container, job, always_both=True))}"
    yield f"--container-workdir={job.cwd}"
    yield "--no-container-remap-root"
    yield from container.args


def _apptainer(container: ContainerSection, job: Job) -> Iterator[str]:
    yield from ("apptainer", "exec")
    for mount in _mounts(container, job, always_both=False):
        yield from ("--bind", mount)
    yield from ("--pwd", job.cwd)
    if job.shape.device.name == "cuda" and not {"--nv", "--rocm"} & set(container.args):
        yield "--nv"
    yield from container.args
    yield container.image


def _mounts(container: ContainerSection, job: Job, *, always_both: bool) -> list[str]:
    """The user's mounts, and what the workers need that none of these has. pyxis takes `/a:/a`, apptainer `/a` too."""
    given = [mount.partition(":")[0].rstrip("/") for mount in container.mounts]
    missing: list[str] = []
    for folder in sorted({job.run_dir, job.cwd, *job.folders}, key=len):
        if not any(_inside(folder, other) for other in (*given, *missing)):
            missing.append(folder)
    mounts = [*container.mounts, *missing]
    return [mount if ":" in mount or not always_both else f"{mount}:{mount}" for mount in mounts]


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _flags(recipe: Recipe, facts: Facts, job: Job, continuing: Continuing) -> Iterator[SbatchFlag]:
    """What the user has set, and what makes the job one agent per node: nothing else."""
    slurm, cpus_key = recipe.slurm, job.shape.cpus_key
    yield SbatchFlag(flag="--job-name", value=job.run_id, key="plan")
    for flag, value, key in (
        ("--partition", slurm.partition, "slurm.partition"),
        ("--account", slurm.account, "slurm.account"),
        ("--qos", slurm.qos, "slurm.qos"),
        ("--constraint", slurm.constraint, "slurm.constraint"),
        ("--reservation", slurm.reservation, "slurm.reservation"),
        ("--time", None if slurm.time is None else slurm_time(slurm.time.time_s), "slurm.time"),
    ):
        if value is not None:
            yield SbatchFlag(flag=flag, value=value, key=key)
    resources = recipe.resources
    nodes = f"{resources.min_nodes}-{resources.max_nodes}" if resources.is_elastic else str(resources.max_nodes)
    yield SbatchFlag(flag="--nodes", value=nodes, key="resources.nodes")
    if resources.is_elastic:
        # With a number of tasks SLURM would give the least nodes that have room for them; without, all that are free.
        yield SbatchFlag(flag="--no-kill", value="", key="plan")
    else:
        yield SbatchFlag(flag="--ntasks-per-node", value="1", key="plan")
    yield SbatchFlag(flag="--cpus-per-task", value=str(job.shape.cpus), key=cpus_key)
    in_gres = slurm.gres is not None and "gpu" in slurm.gres
    if job.shape.gpus and not in_gres:
        yield SbatchFlag(flag="--gpus-per-node", value=str(job.shape.gpus), key="slurm.gpus_per_node")
    if slurm.gres is not None:
        yield SbatchFlag(flag="--gres", value=slurm.gres, key="slurm.gres")
    for name in _MEMORY:
        if (amount := getattr(slurm, name)) is not None:
            yield SbatchFlag(flag=f"--{name.replace('_', '-')}", value=amount, key=f"slurm.{name}")
    if slurm.exclusive:
        yield SbatchFlag(flag="--exclusive", value="", key="slurm.exclusive")
    yield SbatchFlag(flag="--output", value=f"{escaped(job.run_dir)}/slurm/%j.log", key="plan")
    yield SbatchFlag(flag="--open-mode", value="append", key="plan")
    requeue = "--requeue" if continuing.how == "requeue" else "--no-requeue"
    yield SbatchFlag(flag=requeue, value="", key="plan" if slurm.continue_ == "auto" else "slurm.continue")
    if slurm.begin is not None:
        yield SbatchFlag(flag="--begin", value=slurm.begin, key="slurm.begin")
    if facts.after_job is not None:
        yield SbatchFlag(flag="--dependency", value=f"afterok:{facts.after_job}", key="slurm.after")
        yield SbatchFlag(flag="--kill-on-invalid-dep", value="yes", key="slurm.after")


def _sbatch_extras(recipe: Recipe) -> Iterator[SbatchFlag]:
    for name, value in recipe.slurm.sbatch.items():
        if value is None or value is False:
            continue
        text = "" if value is True else str(value)
        yield SbatchFlag(flag=f"--{name}", value=text, key=f"slurm.sbatch.{name}")


def _script(recipe: Recipe, facts: Facts, job: Job, flags: Sequence[SbatchFlag], remarks: Remarks) -> str:
    if remarks.problems:
        return ""  # it would only say the same in other words
    if bad := next((name for mark, name in _UNFIT.items() if mark in job.run_dir), ""):
        message = f"SLURM cannot write the log of a job below a folder with {bad} in its name: {job.run_dir!r}"
        remarks.problems.append(Finding("runs_dir", message, "another place for runs: --runs-dir DIR, or LAUNCH_RUNS"))
        return ""
    try:
        return batch_script(
            facts.template,
            run_id=job.run_id,
            run_dir=job.run_dir,
            python=job.own_python,
            flags=(flag for flag in flags if flag.flag not in FIRST_ONLY),
        )
    except TemplateError as error:
        line = "" if error.line is None else f": line {error.line}"
        where = recipe.slurm.template or "the shipped template"
        remarks.problems.append(
            Finding("slurm.template", f"slurm.template: {where}{line}: {error.message}", error.hint)
        )
        return ""


def _memory_findings(recipe: Recipe, job: Job) -> Iterator[Finding]:
    given = [(name, amount) for name in _MEMORY if (amount := getattr(recipe.slurm, name)) is not None]
    for name, amount in given[1:]:
        first, other = given[0]
        message = f"slurm.{name}: {amount} here, and slurm.{first} is {other}: SLURM takes one of {', '.join(_MEMORY)}"
        yield Finding(f"slurm.{name}", message, "keep one; `null` takes away what a profile has set")
    for name, amount in given:
        if not _AMOUNT.fullmatch(amount):
            hint = "a number of megabytes, or a number and one of K, M, G, T: 64G"
            yield Finding(f"slurm.{name}", f"slurm.{name}: {amount!r} is not an amount of memory", hint)
        if name == "mem_per_gpu" and not job.shape.gpus:
            message = f"slurm.mem_per_gpu: {amount} for each GPU, but the job asks for no GPU"
            yield Finding("slurm.mem_per_gpu", message, "use slurm.mem, or slurm.gpus_per_node")


def _text_findings(recipe: Recipe) -> Iterator[Finding]:
    """What SLURM would take for something else: no shell reads a line `#SBATCH`, nor the arguments of srun."""
    slurm = recipe.slurm
    given = {f"slurm.{name}": getattr(slurm, name) for name in _TEXTS}
    given |= {f"slurm.sbatch.{name}": value for name, value in slurm.sbatch.items()}
    if slurm.container is not None:
        given["slurm.container.image"] = slurm.container.image
        for name in ("mounts", "args"):
            texts = getattr(slurm.container, name)
            given |= {f"slurm.container.{name}.{index}": text for index, text in enumerate(texts)}
    for key, value in given.items():
        if not isinstance(value, str):
            continue
        if not value.isprintable() or not value.strip():
            yield Finding(key, f"{key}: {value!r} cannot be given to SLURM", "one line of printable characters")
        elif (variable := _VARIABLE.search(value)) is not None:
            name = variable[1]
            hint = f"${{oc.env:{name}}} is filled in when the recipe is read"
            yield Finding(key, f"{key}: no shell will fill in {variable[0]} in {value!r}", hint)


def _time_s(recipe: Recipe, partition: Partition | None) -> float | None:
    if recipe.slurm.time is not None:
        return recipe.slurm.time.time_s
    if partition is None:
        return None
    return partition.max_time_s if partition.default_time_s is None else partition.default_time_s


def _preempts(facts: Facts) -> bool:
    return facts.slurm is not None and facts.slurm.preempts is not False


def _cancels(partition: Partition, facts: SlurmFacts | None) -> bool:
    """Whether SLURM cancels a job of this partition for another one's sake."""
    return partition.preempt_mode.upper().startswith("CANCEL") and facts is not None and facts.preempts is not False


def _notes(recipe: Recipe, facts: Facts, job: Job, plan: SlurmPlan) -> Iterator[str]:
    """What a user should know of the job."""
    if job.inside:
        has = 0 if facts.allocation is None else facts.allocation.nodes
        if has > recipe.resources.max_nodes:
            used = recipe.resources.max_nodes
            yield f"{used} of the {has} nodes of the allocation are used: --nodes {has} takes all"
        return
    if facts.slurm is None:
        yield "there is no SLURM on this machine: partition, limits and time were not checked"
    elif facts.slurm.fault:
        yield f"SLURM does not answer, so partition, limits and time were not checked: {facts.slurm.fault}"
    if plan.continue_how == "none" and recipe.slurm.continue_ != "none":
        yield f"nothing follows an allocation that ends early: {plan.continue_reason}"
    if recipe.slurm.after is not None and facts.after_job is not None and not recipe.slurm.after.isdecimal():
        yield f"after {recipe.slurm.after}: its newest job, {facts.after_job}; a later one of it is not waited for"
    if recipe.slurm.after is not None and facts.after_job is None:
        yield f"after {recipe.slurm.after}: it has ended well already, so nothing is waited for"
    if recipe.slurm.container is not None:
        yield f"{job.python} of the image was not looked at: it needs Python 3.11 or newer, and torch 2.13 or 2.14"
    if (place := _own_place(job.run_dir)) is not None:
        yield f"the run directory is below {place}, which each machine usually has for itself: all nodes have to see it"


def _own_place(path: str) -> str | None:
    return next((place for place in ("/tmp", "/var/tmp", "/dev/shm", "/run") if _inside(path, place)), None)


def ends_text(plan: SlurmPlan) -> str:
    """What ends an allocation, and what then, as a sentence without a full stop."""
    if not plan.script:
        return f"with the allocation; then the run ends ({plan.continue_reason})"
    if plan.time_s is None:
        limit = "no time limit is known here; if it is ended early,"
    else:  # SLURM counts in minutes, and makes 90 s two of them
        limit = f"after {duration(60.0 * math.ceil(plan.time_s / 60.0))}; then"
    then = {
        "requeue": "the same job is queued again and goes on from the last checkpoint",
        "resubmit": "a new job is submitted and goes on from the last checkpoint",
        "chain": f"the next of {plan.chain} jobs goes on from the last checkpoint",
        "none": "the run ends",
    }[plan.continue_how]
    return f"{limit} {then} ({plan.continue_reason})"
