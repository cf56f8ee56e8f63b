"""Why a job waits: SLURM's reasons in words, and what a user can do about each. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A reason of SLURM's, put into words."""

    meaning: str
    todo: str = ""
    """What to do about it; empty where waiting helps."""


_FEWER = "ask for less (fewer nodes, a shorter `slurm.time`), or wait until other jobs of yours end"
_BY_LIMIT: tuple[tuple[str, Waiting], ...] = (
    # The first that matches counts. Names as in slurm's job_reason_codes; most end in a limit's name.
    (r"Resources", Waiting("it is next, as soon as enough nodes are free")),
    (r"Priority", Waiting("jobs of higher priority wait for the same nodes")),
    (r"Dependency", Waiting("it waits for another job to end (`--after`, or the one before it in the chain)")),
    (
        r"DependencyNeverSatisfied",
        Waiting(
            "the job that it waits for did not end well, so it will never start",
            "cancel it, and launch it without `--after`",
        ),
    ),
    (r"BeginTime", Waiting("it may not start before its begin time, or was requeued just now")),
    (r"(JobHeldUser|JobHoldUser)", Waiting("it is held by its owner", "scontrol release JOB")),
    (r"(JobHeldAdmin|JobHoldAdmin)", Waiting("it is held by an administrator", "ask who runs the cluster")),
    (r"JobHoldMaxRequeue|JobLaunchFailure", Waiting("SLURM could not start it too often", "ask who runs the cluster")),
    (r"JobArrayTaskLimit", Waiting("as many points of the sweep run as `max_parallel` allows")),
    (r"ReqNodeNotAvail.*", Waiting("nodes that it needs are down, drained or reserved for a maintenance",
                                   "a `slurm.time` that ends before it begins, or other nodes (see sinfo -R)")),
    (r"Reserved for maintenance", Waiting("the nodes are reserved for a maintenance",
                                          "a `slurm.time` that ends before it begins")),
    (r"NodeDown|Nodes required.*|PartitionInactive|PartitionDown",
     Waiting("nodes or the partition that it needs are down", "another `slurm.partition` (sinfo shows what is up)")),
    (r"PartitionTimeLimit", Waiting("its time is longer than the partition allows, so it will never start",
                                    "cancel it, and ask for less: slurm.time")),
    (r"PartitionNodeLimit", Waiting("it asks for more nodes than the partition allows, so it will never start",
                                    "cancel it, and ask for fewer: resources.nodes, or another slurm.partition")),
    (r"BadConstraints", Waiting("no node can ever give what it asks for", "mend slurm.constraint, gres, mem or cpus")),
    (r"Licenses", Waiting("it waits for a licence")),
    (r"AccountNotAllowed|InvalidAccount", Waiting("its account may not use this partition, so it will never start",
                                                  "another slurm.account or slurm.partition")),
    (r"QOSNotAllowed|InvalidQOS", Waiting("its QOS may not be used here, so it will never start", "another slurm.qos")),
    (r"QOSMaxWall.*|AssocMaxWall.*", Waiting("its time is longer than allowed, so it will never start",
                                             "cancel it, and ask for less: slurm.time")),
    (r"QOSMinGRES|QOSMin.*", Waiting("it asks for less than its QOS is meant for, so it will never start",
                                     "another slurm.qos")),
    (r"(QOS|Assoc)Grp(GRES|Gres).*", Waiting("your group has used up its share of GPUs for now",
                                             "fewer GPUs, or wait until jobs of the group end")),
    (r"(QOS|Assoc)Grp.*Minutes.*", Waiting("your group has used up its budget of hours",
                                                      "another slurm.account, or ask for more hours")),
    (r"(QOS|Assoc)Grp.*", Waiting("your group is at a limit", "ask for less, or wait until jobs of the group end")),
    (r"QOSMaxJobs.*|AssocMaxJobs.*|QOSMaxSubmit.*|AssocMaxSubmit.*",
     Waiting("as many jobs of yours run as is allowed", "wait until one of them ends")),
    (r"(QOSMax|AssocMax|MaxGRES|MaxCpu|MaxNode|MaxMem).*PerJob.*",
     Waiting("it asks for more than one job may have, so it will never start", "cancel it, and ask for less")),
    (r"(QOSMax|AssocMax|Max).*", Waiting("you are at a limit of what one user may have", _FEWER)),
    (r"QOSUsageThreshold", Waiting("your usage is above what this QOS is for", "another slurm.qos")),
    (r"Reservation.*", Waiting("it waits for its reservation")),
    (r"Cleaning", Waiting("it was requeued, and its last allocation is still being cleaned up")),
)  # fmt: skip


def waiting_for(reason: str) -> Waiting | None:
    """What a reason means; None for one that is not known here, or no reason."""
    bare = reason.strip("()")
    for pattern, waiting in _BY_LIMIT:
        if re.fullmatch(pattern, bare):
            return waiting
    return None


def reason_text(reason: str) -> str:
    """`Resources: it is next, as soon as enough nodes are free`, or the reason alone."""
    waiting = waiting_for(reason)
    return f"{reason}: {waiting.meaning}" if waiting else reason
