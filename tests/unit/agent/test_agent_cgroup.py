"""The memory cgroup of a process, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent.cgroup import MemoryGroup, memory_group

V1 = "36 31 0:32 {root} {top} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "36 31 0:38 {root} {top} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "35 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def group_of(tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> MemoryGroup | None:
    """What is found for process 7, whose files and groups are below tmp_path."""
    for name, text in {"proc/7/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_group(7, proc=tmp_path / "proc")


def test_version_1_counts_in_memory_oom_control(tmp_path: Path) -> None:
    group = group_of(
        tmp_path,
        "9:cpu,cpuacct:/\n4:memory:/slurm/job_7\n0::/\n",
        OTHER + V1.format(root="/", top=tmp_path / "mem"),
        {
            "mem/slurm/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "mem/slurm/job_7/memory.limit_in_bytes": "9223372036854771712\n",
            "mem/slurm/memory.limit_in_bytes": "2147483648\n",
            "mem/slurm/job_7/memory.max_usage_in_bytes": "2147479552\n",
        },
    )
    assert group is not None
    assert group.oom_kills() == 2
    assert group.describe() == "limit of its cgroup 2.0 GiB, at most 2.0 GiB in use"


def test_version_2_counts_in_memory_events(tmp_path: Path) -> None:
    group = group_of(
        tmp_path,
        "0::/user.slice/a.scope\n",
        V2.format(root="/", top=tmp_path / "cg"),
        {
            "cg/user.slice/a.scope/memory.events": "low 0\nhigh 0\nmax 31\noom 1\noom_kill 1\noom_group_kill 0\n",
            "cg/user.slice/a.scope/memory.max": "536870912\n",
        },
    )
    assert group is not None
    assert group.oom_kills() == 1
    assert group.describe() == "limit of its cgroup 512.0 MiB"


def test_in_a_container_the_mount_begins_at_the_containers_group(tmp_path: Path) -> None:
    group = group_of(
        tmp_path,
        "4:memory:/docker/abc/job\n",
        V1.format(root="/docker/abc", top=tmp_path / "mem"),
        {"mem/job/memory.oom_control": "oom_kill 0\n"},
    )
    assert group is not None
    assert group.folder == tmp_path / "mem" / "job"
    assert group.describe() == "no limit but the machine's memory"


@pytest.mark.parametrize("cgroup", ["", "9:cpu:/\n", "4:memory:/gone\n", "0::/gone\n", "no colons\n"])
def test_where_nothing_is_to_be_seen_there_is_none(tmp_path: Path, cgroup: str) -> None:
    mounts = V1.format(root="/", top=tmp_path / "mem") + V2.format(root="/", top=tmp_path / "cg")
    assert group_of(tmp_path, cgroup, mounts, {}) is None


def test_of_a_process_that_has_ended_there_is_none(tmp_path: Path) -> None:
    assert memory_group(8, proc=tmp_path) is None


def test_a_group_that_is_removed_counts_nothing(tmp_path: Path) -> None:
    assert MemoryGroup(folder=tmp_path / "gone", top=tmp_path, version=1).oom_kills() == 0
