"""What a machine is told about itself, and what to do about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planning_values import ETHERNET, LOOPBACK, facts

from launcher.planning.doctor import Diagnosis, Level, diagnose
from launcher.planning.facts import Gpu
from launcher.planning.machine import Driver, GpuState, Machine, Space
from launcher.planning.probes import Torch

GIB = 1 << 30
SPACE = Space(
    path="/home/ada/runs", kind="ext4", total_bytes=500 * GIB, free_bytes=200 * GIB, free_inodes=0.9, writable=True
)
LIMITS = {"nofile": (65536, 65536), "memlock": (-1, -1), "nproc": (96000, 96000), "core": (0, -1)}
H100 = GpuState(index=0, name="H100", capability=(9, 0), memory_bytes=80 * GIB, used_bytes=0)
CUDA_TORCH = Torch(version="2.13.0+cu126", cuda="12.6", devices=1, architectures=("sm_80", "sm_90"))


def machine(**changes: Any) -> Machine:
    """A machine with nothing wrong."""
    known: dict[str, Any] = {
        "facts": facts(),
        "torch": Torch(version="2.13.0+cpu"),
        "driver": Driver(),
        "name_addresses": ("10.0.0.11",),
        "ports": (32768, 60999),
        "sockets": 100,
        "port_fault": "",
        "limits": LIMITS,
        "shm": dataclasses.replace(SPACE, path="/dev/shm", kind="tmpfs", total_bytes=8 * GIB, free_bytes=8 * GIB),
        "runs": SPACE,
        "state": dataclasses.replace(SPACE, path="/home/ada/.local/state/launcher"),
        "tmp": dataclasses.replace(SPACE, path="/tmp"),
        "machine_cpus": 8,
        "memory_bytes": 64 * GIB,
        "memory_limit_bytes": None,
        "available_bytes": 50 * GIB,
        "clock_synchronised": True,
        "pyspy_fault": "",
        "wandb_version": "0.31.0",
        "wandb_key": "WANDB_API_KEY",
        "tools": {"git": "/usr/bin/git"},
    }
    return Machine(**{**known, **changes})


def with_gpu(**changes: Any) -> Machine:
    driver = changes.pop("driver", Driver(version="560.35", cuda=(12, 6), gpus=(H100,)))
    return machine(**{"facts": facts(gpus=1), "torch": CUDA_TORCH, "driver": driver, **changes})


def found(on: Machine, level: Level) -> list[Diagnosis]:
    return [each for each in diagnose(on) if each.level is level]


def the_one(on: Machine, level: Level) -> Diagnosis:
    """The only finding of a level; it says what to do."""
    (finding,) = found(on, level)
    assert finding.fix
    return finding


@pytest.mark.parametrize("good", [machine(), with_gpu()], ids=["cpu", "gpu"])
def test_a_machine_with_nothing_wrong_has_no_finding_and_says_what_was_looked_at(good: Machine) -> None:
    assert {each.level for each in diagnose(good)} == {Level.OK}
    assert {"torch", "GPUs", "/dev/shm", "runs", "open files", "name", "ports", "W&B"} <= {
        each.what for each in diagnose(good)
    }


PROBLEMS: dict[str, tuple[Machine, str, str]] = {
    "torch does not import": (
        machine(torch=Torch(fault="ImportError: libcudnn.so.9: cannot open shared object file")),
        "torch",
        "libcudnn.so.9",
    ),
    "torch without gloo": (machine(torch=Torch(version="2.13.0", distributed=False)), "torch", "torch.distributed"),
    "driver does not answer": (
        machine(facts=facts(gpu_fault="NVML: Driver/library version mismatch")),
        "GPUs",
        "version mismatch",
    ),
    "torch without CUDA": (with_gpu(torch=Torch(version="2.13.0+cpu")), "CUDA", "2.13.0+cpu was built without CUDA"),
    "driver older than torch": (
        with_gpu(torch=dataclasses.replace(CUDA_TORCH, cuda="13.0")),
        "CUDA",
        "needs CUDA 13.0, driver 560.35 runs up to 12.6",
    ),
    "CUDA does not start": (
        with_gpu(torch=dataclasses.replace(CUDA_TORCH, fault="no CUDA-capable device")),
        "CUDA",
        "no CUDA-capable device",
    ),
    "torch sees fewer GPUs": (
        with_gpu(torch=dataclasses.replace(CUDA_TORCH, devices=0)),
        "CUDA",
        "the driver has 1 GPUs for us, torch sees 0",
    ),
    "GPU newer than torch": (
        with_gpu(driver=Driver(version="1", cuda=(12, 6), gpus=(dataclasses.replace(H100, capability=(12, 0)),))),
        "CUDA",
        "no code for H100 (sm_120); it has sm_80, sm_90",
    ),
    "no memory left": (machine(available_bytes=GIB // 2), "memory", "512 MiB of 64 GiB"),
    "Docker's /dev/shm": (
        machine(shm=dataclasses.replace(SPACE, total_bytes=64 << 20, free_bytes=64 << 20)),
        "/dev/shm",
        "64 MiB of 64 MiB free",
    ),
    "full /dev/shm": (
        machine(shm=dataclasses.replace(SPACE, total_bytes=8 * GIB, free_bytes=100 << 20)),
        "/dev/shm",
        "100 MiB of 8 GiB",
    ),
    "no /dev/shm": (machine(shm=None), "/dev/shm", "missing"),
    "runs cannot be written": (machine(runs=dataclasses.replace(SPACE, writable=False)), "runs", "cannot be written"),
    "list cannot be kept": (machine(state=dataclasses.replace(SPACE, writable=False)), "list", "cannot be written"),
    "full disk": (machine(runs=dataclasses.replace(SPACE, free_bytes=5 << 20)), "runs", "5 MiB of 500 GiB"),
    "no inodes": (machine(runs=dataclasses.replace(SPACE, free_inodes=0.0)), "runs", "0.0% of its inodes"),
    "full /tmp": (machine(tmp=dataclasses.replace(SPACE, free_bytes=5 << 20)), "temporary", "5 MiB"),
    "few files": (machine(limits={**LIMITS, "nofile": (256, 4096)}), "open files", "256 (hard: 4,096)"),
    "few processes": (machine(limits={**LIMITS, "nproc": (100, 100)}), "processes", "100"),
    "no loopback": (machine(facts=facts(interfaces=(ETHERNET,))), "network", "loopback interface is down"),
    "no port": (machine(port_fault="Permission denied"), "ports", "Permission denied"),
    "ports used up": (machine(sockets=27_000), "ports", "27,000 TCP sockets in use"),
    "narrow port range": (machine(ports=(60000, 60999)), "ports", "60000-60999"),
}

NOTES: dict[str, tuple[Machine, str, str]] = {
    "no torch": (machine(torch=None), "torch", "not installed for /usr/bin/python3"),
    "another torch": (machine(torch=Torch(version="2.5.1")), "torch", "2.5.1"),
    "busy GPU": (
        with_gpu(driver=Driver(version="1", cuda=(12, 6), gpus=(dataclasses.replace(H100, used_bytes=40 * GIB),))),
        "GPUs",
        "GPU 0: 40 GiB of 80 GiB",
    ),
    "a quota": (machine(facts=facts(cpu_quota=2.5)), "CPUs", "3 of the machine's 8 (affinity: 8, a quota of 2.5)"),
    "a memory limit": (machine(memory_limit_bytes=4 * GIB), "memory", "may use 4 GiB"),
    "a name on loopback": (machine(name_addresses=("127.0.1.1",)), "name", "resolves to 127.0.1.1"),
    "a name on IPv6 loopback": (machine(name_addresses=("::1", "127.0.0.1")), "name", "resolves to ::1, 127.0.0.1"),
    "a name without address": (machine(name_addresses=()), "name", "has no address"),
    "nothing but loopback": (machine(facts=facts(interfaces=(LOOPBACK,))), "network", "no address but loopback"),
    "locked memory": (with_gpu(limits={**LIMITS, "memlock": (65536, -1)}), "locked memory", "65,536"),
    "core dumps": (machine(limits={**LIMITS, "core": (-1, -1)}), "core dumps", "unlimited"),
    "soft limit of files": (machine(limits={**LIMITS, "nofile": (1024, 4096)}), "open files", "1,024"),
    "runs in memory": (machine(runs=dataclasses.replace(SPACE, kind="tmpfs")), "runs", "gone after a reboot"),
    "little space": (machine(runs=dataclasses.replace(SPACE, free_bytes=5 * GIB)), "runs", "5 GiB"),
    "clock": (machine(clock_synchronised=False), "clock", "not synchronised"),
    "no ptrace": (machine(pyspy_fault="Permission Denied"), "stacks", "Permission Denied"),
    "no W&B": (machine(wandb_version=None), "W&B", "not installed"),
    "no login": (machine(wandb_key=""), "W&B", "no key"),
}


@pytest.mark.parametrize(("on", "what", "text"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_what_some_run_would_fail_of_is_a_problem_with_a_fix(on: Machine, what: str, text: str) -> None:
    problem = the_one(on, Level.PROBLEM)
    assert problem.what == what
    assert text in problem.message


@pytest.mark.parametrize(("on", "what", "text"), NOTES.values(), ids=NOTES.keys())
def test_what_is_good_to_know_is_a_note_with_a_fix(on: Machine, what: str, text: str) -> None:
    """F033 for the names."""
    assert found(on, Level.PROBLEM) == []
    note = the_one(on, Level.NOTE)
    assert note.what == what
    assert text in note.message


def test_a_name_on_loopback_alone_is_right_where_there_is_no_network() -> None:
    alone = machine(facts=facts(interfaces=(LOOPBACK,)), name_addresses=("127.0.1.1",))
    assert [each.what for each in found(alone, Level.NOTE)] == ["network"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 6), ("sm_80",), True),  # machine code of the same major version
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # PTX is compiled for it
        ((9, 0), ("sm_90a",), True),
        ((9, 0), (), True),  # not known
    ],
)
def test_which_code_runs_on_which_gpu(capability: tuple[int, int], architectures: tuple[str, ...], runs: bool) -> None:
    driver = Driver(version="1", cuda=(12, 6), gpus=(dataclasses.replace(H100, capability=capability),))
    on = with_gpu(driver=driver, torch=dataclasses.replace(CUDA_TORCH, architectures=architectures))
    assert (found(on, Level.PROBLEM) == []) is runs


def test_the_gpus_that_cuda_visible_devices_leaves_are_those_that_torch_should_see() -> None:
    two = Driver(version="1", cuda=(12, 6), gpus=(H100, dataclasses.replace(H100, index=1)))
    one_visible = facts(gpus=0, environment={"CUDA_VISIBLE_DEVICES": "1"})
    one_visible = dataclasses.replace(one_visible, gpus=(Gpu(index=1, name="H100", memory_bytes=80 * GIB),))
    assert found(with_gpu(driver=two, facts=one_visible), Level.PROBLEM) == []
