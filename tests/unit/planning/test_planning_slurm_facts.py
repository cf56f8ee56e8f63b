"""What SLURM says of itself, read from recorded outputs of several versions."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from planning_values import facts

from launcher.executors.here import not_inside
from launcher.planning.facts import facts_from_json, facts_to_json
from launcher.planning.slurm_facts import (
    Allocation,
    SlurmProbe,
    allocation_of,
    gpus_in,
    parse_config,
    parse_partitions,
    slurm_time,
    time_s,
    with_nodes,
)

CONFIG_22 = """Configuration data as of 2026-11-30T09:22:33
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = dev
JobRequeue              = 1
KillWait                = 10 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at ctl is UP
"""
CONFIG_24 = """AccountingStorageType   = (null)
ClusterName             = big
JobRequeue              = 0
KillWait                = 120 sec
MaxArraySize            = 4000001
PreemptMode             = OFF
PreemptType             = (null)
SLURM_VERSION           = 24.11.1
"""
PARTITIONS_22 = (
    "PartitionName=low AllowGroups=ALL Default=YES QoS=N/A DefaultTime=NONE ExclusiveUser=NO GraceTime=10 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-10] OverSubscribe=NO PreemptMode=REQUEUE State=UP "
    "TotalCPUs=20 TotalNodes=10 TRES=cpu=20,mem=160000M,node=10,billing=20\n"
    "PartitionName=big Default=NO DefaultTime=01:00:00 GraceTime=0 MaxNodes=8 MaxTime=2-00:00:00 MinNodes=2 "
    "Nodes=g[1-16] PreemptMode=CANCEL State=DRAIN TotalCPUs=1024 TotalNodes=16 JobDefaults=DefCpuPerGPU=12\n"
)
SINFO = (
    "low|2|16000|gpu:4\n"
    "big|64+|512000+|gpu:a100:4(S:0-1),nvme:1\n"
    "big|128|1024000|gpu:h100:8(S:0-3)\n"
    "other|4|4|(null)\n"
    "a line that nobody knows\n"
)


def test_settings_are_read() -> None:
    """F052"""
    found = parse_config(CONFIG_22)
    assert (found.version, found.cluster, found.job_requeue, found.kill_wait_s) == ("22.05.8", "dev", True, 10.0)
    assert (found.max_array_size, found.accounting, found.preempts) == (1001, True, True)
    newer = parse_config(CONFIG_24)
    assert (newer.job_requeue, newer.kill_wait_s, newer.accounting, newer.preempts) == (False, 120.0, False, False)


def test_what_is_not_said_is_not_known() -> None:
    """F052"""
    found = parse_config("slurm_load_ctl_conf error: Unable to contact slurm controller\n")
    assert (found.version, found.job_requeue, found.kill_wait_s, found.max_array_size) == ("", None, None, None)
    assert (found.accounting, found.preempts, found.default_partition) == (None, None, None)


def test_partitions_and_their_nodes_are_read() -> None:
    low, big = with_nodes(parse_partitions(PARTITIONS_22), SINFO)
    assert (low.name, low.default, low.state, low.max_time_s, low.nodes) == ("low", True, "UP", None, 10)
    assert (low.grace_s, low.preempt_mode, low.max_nodes, low.gpus_per_node) == (10.0, "REQUEUE", None, 4)
    assert (big.default, big.state, big.max_time_s, big.default_time_s) == (False, "DRAIN", 172800.0, 3600.0)
    assert (big.max_nodes, big.min_nodes, big.cpus_per_node, big.memory_mib_per_node) == (8, 2, 128, 1024000)
    assert (big.gpus_per_node, big.gres) == (8, ("gpu:a100:4", "gpu:h100:8"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:00", 1800), ("1:30:00", 5400), ("2-12", 216000), ("2-12:30", 217800), ("0-0:0:5", 5),
        ("UNLIMITED", None), ("infinite", None), ("NONE", None), ("Partition_Limit", None), ("", None),
    ],
)  # fmt: skip
def test_times_of_slurm(text: str, seconds: float | None) -> None:
    assert time_s(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "00:01:00"), (95400, "1-02:30:00"), (0.2, "00:00:01"), (90.5, "00:01:31")]
)
def test_times_for_slurm_are_never_shorter(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text
    assert (time_s(text) or 0) >= seconds


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:4", 4), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu", 1), ("gpu:a100", 1), ("gpu:a:2,gpu:b:1", 3), ("nvme:2", 0)],
)  # fmt: skip
def test_gpus_in_gres(gres: str, count: int) -> None:
    assert gpus_in(gres) == count


def test_an_allocation_is_known_by_its_variables() -> None:
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
        "SLURM_JOB_NODELIST": "n[1-3]",
    }
    assert allocation_of(inside) == Allocation(job="7", nodes=3, cpus_per_node=4, nodelist="n[1-3]")
    assert allocation_of({**inside, "SLURM_GPUS_PER_NODE": "a100:2"}) == Allocation(
        job="7", nodes=3, cpus_per_node=4, gpus_per_node=2, nodelist="n[1-3]"
    )
    assert allocation_of({}) is None


def test_inside_a_heterogeneous_job_is_inside_one_and_it_is_not_used() -> None:
    """F054: without the second, a bare `launch` there would run on this node alone, by accident."""
    parts = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1"}
    found = allocation_of(parts)
    assert found is not None
    assert found.job == "7"
    (problem,) = not_inside(parts)
    assert problem.message == "job 7 is heterogeneous, and all nodes of a run are alike"


def test_facts_of_slurm_survive_json() -> None:
    site = parse_config(CONFIG_22)
    whole = facts(
        slurm=site.__class__(**{**site.__dict__, "partitions": with_nodes(parse_partitions(PARTITIONS_22), SINFO)}),
        allocation=Allocation(job="7", nodes=2),
        after_job="8",
    )
    assert facts_from_json(facts_to_json(whole)) == whole
    assert json.loads(facts_to_json(whole))["slurm"]["partitions"][1]["gres"] == ["gpu:a100:4", "gpu:h100:8"]


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put programs of these names, and nothing of SLURM's, on the PATH."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/nowhere")


def test_no_slurm_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    assert SlurmProbe().answer() is None


def test_a_controller_that_is_down_is_a_fault_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, scontrol="echo 'Unable to contact slurm controller' >&2; exit 1", sinfo="exit 1")
    found = SlurmProbe().answer()
    assert found is not None
    assert found.fault == "`scontrol show config`: Unable to contact slurm controller"


def test_a_controller_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what it has started: a site's command may be a script around the real one."""
    programs(tmp_path, monkeypatch, scontrol=f"{os.path.realpath('/bin/sleep')} 60\ntrue")
    begun_s = time.monotonic()
    found = SlurmProbe().answer(limit_s=0.1)
    assert time.monotonic() - begun_s < 5
    assert found is not None
    assert "does not answer within 0.1 s" in found.fault
