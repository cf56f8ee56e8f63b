"""`launch init-site`: what it writes, and when it writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.planning.site import Accounts, parse_accounts, site_profile
from launcher.planning.slurm_facts import Partition, SlurmFacts
from launcher.recipe.loader import load_recipe
from launcher.recipe.profiles import read_profile

Launch = Callable[..., Any]
RECIPE = Path(__file__).parents[3] / "recipes/mnist_ddp.yaml"
CONFIG = """\
ClusterName             = lab
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 23.11.4
AccountingStorageType   = accounting_storage/slurmdbd
"""
PARTITIONS = """\
PartitionName=cpu Default=YES GraceTime=0 MaxNodes=UNLIMITED MaxTime=2-00:00:00 DefaultTime=01:00:00 MinNodes=0 PreemptMode=OFF State=UP TotalNodes=40
PartitionName=gpu Default=NO GraceTime=60 MaxNodes=8 MaxTime=12:00:00 DefaultTime=NONE MinNodes=1 PreemptMode=REQUEUE State=UP TotalNodes=10
PartitionName=old Default=NO GraceTime=0 MaxTime=UNLIMITED DefaultTime=NONE PreemptMode=OFF State=DOWN TotalNodes=2
"""  # noqa: E501 - as scontrol prints it
NODES = "cpu|64|256000|(null)\ngpu|64|512000|gpu:a100:4(S:0-1)\nold|16|64000|(null)\n"

GPU = Partition(
    name="gpu", default=True, nodes=10, max_time_s=12 * 3600.0, default_time_s=3600.0, preempt_mode="REQUEUE",
    grace_s=60.0, cpus_per_node=64, memory_mib_per_node=512000, gpus_per_node=4, gres=("gpu:a100:4",),
)  # fmt: skip
LAB = SlurmFacts(
    version="23.11.4", cluster="lab", job_requeue=True, kill_wait_s=30.0, preempt_type="preempt/partition_prio",
    preempt_mode="REQUEUE", max_array_size=1001, accounting=True, partitions=(GPU,),
)  # fmt: skip
MINE = Accounts(default="ada", names=("ada", "lab"), qos=("normal", "long"))


def written(slurm: SlurmFacts, accounts: Accounts = MINE) -> str:
    return site_profile(slurm, accounts, name="lab", schema="/s/schema.json")


@pytest.mark.parametrize(
    ("partition", "lines"),
    [
        (GPU, ["partition: gpu", "gpus_per_node: 4", "cpus_per_gpu: 16", "mem_per_gpu: 128000M", "time: 12h"]),
        (replace(GPU, gpus_per_node=0, gres=()), ["partition: gpu", "time: 12h"]),
        (replace(GPU, cpus_per_node=2), ["cpus_per_node: 2"]),
        (replace(GPU, max_time_s=None), ["time: 24h"]),
        (replace(GPU, max_time_s=5400.0), ["time: 90m"]),
        (replace(GPU, name="1e3"), ['partition: "1e3"']),
        (replace(GPU, name="no"), ["partition: no"]),
        (Partition(name="all"), ["partition: all"]),
    ],
)
def test_what_is_written_is_a_profile_that_plans(tmp_path: Path, partition: Partition, lines: list[str]) -> None:
    slurm = replace(LAB, partitions=(partition,))
    (tmp_path / "lab.yaml").write_text(written(slurm))
    profile = read_profile(tmp_path / "lab.yaml")
    assert not profile.findings
    loaded = load_recipe(RECIPE, flags={"resources.nodes": ("--nodes", 2)}, profile=profile)
    facts = replace(gather_facts(), slurm=slurm)
    plan = make_plan(loaded, facts, run_id="r", runs_dir="/runs", executor=profile.executor)
    assert plan.slurm is not None
    said = [line.partition("#")[0].strip() for line in written(slurm).splitlines()]
    assert [line for line in lines if line not in said] == []
    assert (
        f"--partition={partition.name}" in plan.slurm.script or f"--partition='{partition.name}'" in plan.slurm.script
    )


@pytest.mark.parametrize("slurm", [SlurmFacts(), replace(LAB, partitions=()), replace(LAB, cluster="", version="")])
def test_what_is_not_known_is_left_to_the_user(tmp_path: Path, slurm: SlurmFacts) -> None:
    (tmp_path / "lab.yaml").write_text(written(slurm, Accounts(fault="`sacctmgr`: connection refused")))
    assert not read_profile(tmp_path / "lab.yaml").findings
    assert "# account: ...              # not known: `sacctmgr`: connection refused" in written(
        slurm, Accounts(fault="`sacctmgr`: connection refused")
    )


def test_every_line_that_is_only_a_comment_can_be_switched_on(tmp_path: Path) -> None:
    """What is offered has to be right as well."""
    lines = written(LAB).splitlines()
    of_slurm = tuple(f"  # {key}:" for key in ("qos", "account", "exclusive", "sbatch", "container"))
    of_all = tuple(f"# {key}:" for key in ("faults", "scratch", "network", "setup", "runs_dir", "internet"))
    offered = [line.replace("# ", "", 1) if line.startswith(of_slurm + of_all) else line for line in lines]
    (tmp_path / "lab.yaml").write_text("\n".join(offered))
    profile = read_profile(tmp_path / "lab.yaml")
    assert not profile.findings
    assert profile.tree is not None
    assert {"network", "setup", "runs_dir", "scratch", "internet", "faults", "slurm"} == set(profile.tree.entries)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "requeue; a preempted job is too, 60 s after its TERM"),
        ({"preempt_type": "preempt/none"}, "requeue; jobs are not preempted here"),
        ({"partitions": (replace(GPU, preempt_mode="CANCEL"),)}, "resubmit, since a preempted job is cancelled here"),
        ({"job_requeue": False}, "(JobRequeue=0: by default jobs are not; ours ask for it)"),
        ({"kill_wait_s": 10.0}, "5 s to save and leave: KillWait is 10 s"),
        ({"partitions": (replace(GPU, default=False), replace(GPU, name="b", default=False, nodes=99))},
         "partition: b                # the largest: there is no default; or gpu"),
    ],
)  # fmt: skip
def test_notes_say_how_a_run_goes_on(change: dict[str, object], sentence: str) -> None:
    assert sentence in written(replace(LAB, **change))  # type: ignore[arg-type]


def test_accounts_of_sacctmgr() -> None:
    text = "lab|normal,long\nlab|normal\nada|normal\n"
    assert parse_accounts(text, "lab\n") == Accounts(default="lab", names=("lab", "ada"), qos=("normal", "long"))
    assert parse_accounts("", "") == Accounts()
    assert "# account: ...              # this cluster keeps no accounts" in written(LAB, Accounts())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clients of SLURM that say what those of a cluster have said."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"config": CONFIG, "partitions": PARTITIONS, "nodes": NODES}.items():
        (tmp_path / name).write_text(text)
    scripts = {
        "scontrol": f"case $2 in config) cat {tmp_path}/config;; *) cat {tmp_path}/partitions;; esac",
        "sinfo": f"cat {tmp_path}/nodes",
        "sacctmgr": "case $3 in assoc) echo 'lab|normal';; *) echo lab;; esac",
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))
    return tmp_path


def test_it_writes_one_and_never_over_another(cluster: Path, launch: Launch) -> None:
    path = cluster / "config-home/launcher/profiles/lab.yaml"
    shown = launch("init-site", "--stdout")
    assert not path.exists()
    said = launch("init-site")
    assert said.code == 0, said.err
    assert path.read_text() == shown.out
    assert "launch RECIPE --on lab --dry-run" in said.out
    assert "  partition: cpu              # the default; or gpu\n  # it has no GPUs; gpu has\n" in path.read_text()
    rows = [" ".join(line.split()) for line in path.read_text().splitlines()]
    assert "# gpu 10 gpu:a100:4 64 500 GiB 12h00m requeue" in rows
    assert "# account: lab              # yours: lab; without it SLURM takes lab" in path.read_text()
    assert "says so already" in launch("init-site").out

    mine = path.read_text().replace("partition: cpu", "partition: gpu")
    path.write_text(mine)
    said = launch("init-site")
    assert said.code == 3
    assert "-  partition: gpu" in said.out
    assert "+  partition: cpu" in said.out
    assert "--force replaces it" in said.err
    assert path.read_text() == mine
    assert launch("init-site", "--force").code == 0
    assert path.read_text() == shown.out
    assert launch("init-site", "other").code == 0
    assert sorted(path.parent.iterdir()) == [path, path.with_name("other.yaml")]


def test_where_it_is_refused(cluster: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    said = launch("init-site", "local")
    assert (said.code, "'local' is an executor" in said.err) == (2, True)
    assert launch("init-site", "a/b").code == 2
    (cluster / "bin/scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact' >&2\nexit 1\n"
    )
    said = launch("init-site")
    assert (said.code, said.out) == (3, "")
    assert "SLURM does not answer: `scontrol show config`: slurm_load_ctl_conf error" in said.err
    monkeypatch.setenv("PATH", "/nowhere")
    said = launch("init-site")
    assert said.code == 3
    assert "there is no SLURM on this machine" in said.err
    assert not (cluster / "config-home").exists()


def test_without_sacctmgr_it_says_so(cluster: Path, launch: Launch) -> None:
    (cluster / "bin/sacctmgr").write_text("#!/bin/sh\necho 'sacctmgr: error: connection refused' >&2\nexit 1\n")
    said = launch("init-site", "--stdout")
    assert "not known: `sacctmgr`: sacctmgr: error: connection refused" in said.out
