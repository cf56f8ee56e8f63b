"""What a site refuses, as far as its partitions say so before a job is submitted. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.planning.slurm_facts import slurm_time
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.planning.slurm_facts import Partition, SlurmFacts


def site_problems(plan: Plan, site: SlurmFacts) -> list[Problem]:
    """Why the partition of a job would never start it. Account, qos and what else there is, SLURM knows itself."""
    if site.fault:
        hint = "`scontrol ping` says whether the controller is up; --dry-run shows the plan without it"
        return [Problem(where="SLURM", message=f"it does not answer: {site.fault}", hint=hint)]
    if not site.partitions:
        return []
    names = _asked(plan)
    if not names:
        if site.default_partition is None:
            message = "slurm.partition: none is given, and this cluster has no default partition"
            return [_problem(plan, "slurm.partition", message, f"one of: {_listed(site)}")]
        return list(_limits(plan, site.default_partition))
    unknown = [name for name in names if site.partition(name) is None]
    if unknown:
        close = difflib.get_close_matches(unknown[0], [each.name for each in site.partitions], n=1)
        hint = f"did you mean {close[0]}? There are {_listed(site)}" if close else f"one of: {_listed(site)}"
        message = f"slurm.partition: there is no partition {unknown[0]!r} in {site.cluster or 'this cluster'}"
        return [_problem(plan, "slurm.partition", message, hint)]
    # Of several partitions SLURM takes the first that can start it; one that can is enough.
    found = [list(_limits(plan, partition)) for name in names if (partition := site.partition(name)) is not None]
    return [] if any(not problems for problems in found) else found[0]


def _limits(plan: Plan, partition: Partition) -> Iterator[Problem]:
    assert plan.slurm is not None
    name, slurm, nodes = f"the partition {partition.name}", plan.slurm, len(plan.nodes)
    least = nodes if plan.min_nodes is None else plan.min_nodes
    if partition.state not in ("UP", ""):
        hint = "another partition, or later: `sinfo` says when"
        yield _problem(plan, "slurm.partition", f"slurm.partition: {partition.name} is {partition.state}", hint)
    most = min((most for most in (partition.nodes, partition.max_nodes) if most is not None), default=None)
    if most is not None and least > most:
        message = f"resources.nodes: {count(least, 'node')} asked for, but {name} gives a job at most {most:,}"
        yield _problem(plan, "resources.nodes", message, f"--nodes {most}, or another partition")
    if nodes < partition.min_nodes:
        message = (
            f"resources.nodes: {count(nodes, 'node')} asked for, but {name} gives a job at least {partition.min_nodes}"
        )
        yield _problem(plan, "resources.nodes", message, f"--nodes {partition.min_nodes}, or another partition")
    if slurm.time_s is not None and partition.max_time_s is not None and slurm.time_s > partition.max_time_s:
        longest = slurm_time(partition.max_time_s)
        message = f"slurm.time: {slurm_time(slurm.time_s)} asked for, but {name} gives at most {longest}"
        hint = f"slurm.time: {int(partition.max_time_s // 60)}m: the run goes on in the next allocation by itself"
        yield _problem(plan, "slurm.time", message, hint)
    if partition.cpus_per_node is not None and slurm.cpus_per_node > partition.cpus_per_node:
        message = (
            f"{count(slurm.cpus_per_node, 'CPU')} per node asked for ({_cpus_key(plan)}), but a node of {name} "
            f"has at most {partition.cpus_per_node}"
        )
        yield _problem(plan, _cpus_key(plan), message, "fewer workers per node, threads or CPUs per GPU")
    if partition.cpus_per_node is not None and slurm.gpus_per_node > partition.gpus_per_node:
        message = (
            f"slurm.gpus_per_node: {slurm.gpus_per_node} asked for, but a node of {name} has at most "
            f"{partition.gpus_per_node} ({', '.join(partition.gres) or 'no GPU'})"
        )
        yield _problem(plan, "slurm.gpus_per_node", message, "another partition, or fewer GPUs per node and more nodes")


def _asked(plan: Plan) -> list[str]:
    assert plan.slurm is not None
    value = next((flag.value for flag in plan.slurm.flags if flag.flag == "--partition"), "")
    return [name for name in value.split(",") if name]


def _cpus_key(plan: Plan) -> str:
    assert plan.slurm is not None
    key = next((flag.key for flag in plan.slurm.flags if flag.flag == "--cpus-per-task"), "plan")
    return "resources.nproc_per_node" if key == "plan" else key


def _problem(plan: Plan, key: str, message: str, hint: str) -> Problem:
    """At the line that says it, where one does."""
    origin = next((value.origin for value in plan.values if value.key == key), "default")
    placed = origin != "default" and not origin.startswith("auto")
    where = origin.removeprefix("override ").removeprefix("flag ") if placed else key
    return Problem(where=where, message=message, hint=hint)


def _listed(site: SlurmFacts) -> str:
    return ", ".join(f"{each.name}{' (default)' if each.default else ''}" for each in site.partitions)
