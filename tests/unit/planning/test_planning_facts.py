"""What is probed, and how it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planning_values import facts

from launcher.planning.facts import (
    Gpu,
    cpu_quota,
    facts_from_json,
    facts_to_json,
    forwarded,
    gather_facts,
    package_version,
    parse_git_status,
    visible_gpus,
)


def test_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    here = gather_facts(cwd=tmp_path)
    assert here.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= here.num_cpus <= len(here.cpus)
    assert here.cwd == str(tmp_path)
    assert any(interface.loopback and "127.0.0.1" in interface.addresses for interface in here.interfaces)
    assert here.environment["NCCL_DEBUG"] == "WARN"
    assert "WANDB_API_KEY" not in here.environment
    assert here.git == {"sha": None, "dirty": False}


def test_facts_read_back_to_equal_ones() -> None:
    for value in (facts(gpus=2, cpu_quota=1.5), gather_facts()):
        assert facts_from_json(facts_to_json(value)) == value


def test_the_torch_version_is_found_without_importing_torch() -> None:
    code = (
        "import sys; from launcher.planning.facts import gather_facts; version = gather_facts().torch_version;"
        "import importlib.metadata as m; assert version == m.version('torch'), version;"
        "assert 'torch' not in sys.modules"
    )
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_git_state_is_one_call(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        author = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
        return subprocess.run(["git", *author, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    assert gather_facts(cwd=tmp_path).git == {"sha": None, "dirty": False}
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    sha = git("rev-parse", "HEAD").strip()
    assert gather_facts(cwd=tmp_path).git == {"sha": sha, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert gather_facts(cwd=tmp_path).git == {"sha": sha, "dirty": True}


def test_git_answers_that_are_none() -> None:
    assert parse_git_status("") == {"sha": None, "dirty": False}
    assert parse_git_status("# branch.oid (initial)\n# branch.head main\n") == {"sha": None, "dirty": False}


def test_a_missing_git_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather_facts(cwd=tmp_path).git["sha"] is None


def test_slurm_counts_as_configured_with_a_command_and_a_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing of a SLURM that this machine may have
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    assert not gather_facts(cwd=tmp_path).slurm_configured
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert gather_facts(cwd=tmp_path).slurm_configured


def test_only_names_that_a_plan_may_depend_on_are_kept() -> None:
    environment = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "HF_TOKEN": "x",
        "GLOO_LOG_LEVEL": "INFO",
    }
    assert forwarded(environment) == {"GLOO_LOG_LEVEL": "INFO", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,0", (2, 0)),
        ("1,9,0", (1,)),
        ("1,1", (1,)),
        (" 1 , 2 ", (1, 2)),
        ("GPU-bbb", (1,)),
        ("GPU-", ()),
        ("MIG-1", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, indices: tuple[int, ...]) -> None:
    devices = [(Gpu(index=i, name="H100", memory_bytes=1), f"GPU-{letter * 3}") for i, letter in enumerate("abc")]
    assert tuple(gpu.index for gpu in visible_gpus(devices, visible)) == indices


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_quota_of_cgroups_v2_holds_for_all_below_it(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    write(tmp_path / "sys/fs/cgroup/jobs/one/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path) is None
    write(tmp_path / "sys/fs/cgroup/jobs/cpu.max", "250000 100000\n")
    assert cpu_quota(tmp_path) == 2.5


def test_a_quota_of_cgroups_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n2:memory:/x\n")
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    write(folder / "cpu.cfs_quota_us", "150000\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) == 1.5
    write(folder / "cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(tmp_path) is None


def test_no_cgroups_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_a_package_is_found_by_the_name_of_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    (tmp_path / "torchvision-9.9.dist-info").mkdir()
    assert package_version("torch", ["/nowhere", str(tmp_path)]) == "2.13.0+cpu"
    assert package_version("numpy", [str(tmp_path)]) is None
