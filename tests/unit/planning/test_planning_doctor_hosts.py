"""What the probe of a host means, alone and beside others; what sums and products mean beside the hardware."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.planning.all_reduce import Tried, judge_products
from launcher.planning.doctor import Diagnosis, Level
from launcher.planning.doctor_hosts import Asked, diagnose_host, diagnose_together
from launcher.planning.doctor_links import judge_between
from launcher.planning.doctor_speed import peak_between_gpus, peak_between_nodes, peak_flops
from launcher.planning.host_facts import FabricPort, HostFacts, HostGpu, HostInterface, HostSpace, gpu_links

GIB = 1 << 30
H100 = HostGpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    driver="550.90.07",
    ecc_uncorrected=0,
    throttle_reasons=1,
    power_limit_w=700.0,
    power_default_w=700.0,
    temperature_c=30,
    pcie_width=16,
    pcie_width_max=16,
)
PORT = FabricPort(device="mlx5_0", port=1, state="ACTIVE", link_layer="InfiniBand", rate_gbps=400.0, driver="mlx5_core")
ETH0 = HostInterface(name="eth0", addresses=("10.0.0.1",), mtu=9000, speed_mbps=25_000)
NVLINKS = ("\tGPU0\tGPU1\tCPU Affinity", "GPU0\t X \tNV18\t0-47", "GPU1\tNV18\t X \t0-47")


def host(**changes: Any) -> HostFacts:
    """With nothing wrong."""
    known: dict[str, Any] = {
        "hostname": "h0",
        "interfaces": (ETH0,),
        "gpus": (H100, dataclasses.replace(H100, index=1)),
        "cuda": "12.4",
        "topology": NVLINKS,
        "ports": (PORT,),
        "paths": ("/dev/infiniband",),
        "docker": "26.1.5",
        "docker_runtimes": ("nvidia", "runc"),
        "slurm": "24.05.1",
        "cpus": 96,
        "memory_bytes": 1 << 40,
        "available_bytes": 1 << 40,
        "nofile": 65536,
        "spaces": (
            HostSpace(path="/dev/shm", total_bytes=64 * GIB, free_bytes=64 * GIB, is_writable=True),
            HostSpace(path="/runs", total_bytes=500 * GIB, free_bytes=200 * GIB, is_writable=True),
        ),
    }
    return HostFacts(**{**known, **changes})


def gpu(**changes: Any) -> HostFacts:
    return host(gpus=(dataclasses.replace(H100, **changes),), topology=())


def test_a_host_with_nothing_wrong_has_no_finding_and_says_what_was_looked_at() -> None:
    found = diagnose_host(host(), where="h0")
    assert {each.level for each in found} == {Level.OK}
    assert {each.where for each in found} == {"h0"}
    looked = {"GPU health", "topology", "fabric", "links", "Docker", "SLURM", "GPUs", "CPUs", "/dev/shm", "runs"}
    assert looked == {each.what for each in found}
    assert next(each.message for each in found if each.what == "topology") == "all 2 GPUs are joined by NVLink (NV18)"


WRONG: dict[str, tuple[HostFacts, Level, str, str]] = {
    "ECC": (gpu(ecc_uncorrected=3), Level.PROBLEM, "GPU health", "GPU 0: 3 memory errors"),
    "heat, by the hardware": (gpu(throttle_reasons=0x40), Level.PROBLEM, "GPU health", "holds the clocks back"),
    "heat": (gpu(throttle_reasons=0x20, temperature_c=91), Level.NOTE, "GPU health", "91 °C, and slower for it"),
    "power limit": (gpu(power_limit_w=400.0), Level.NOTE, "GPU health", "limited to 400 W of 700 W"),
    "lanes": (gpu(pcie_width=8), Level.NOTE, "GPU health", "8 of 16 PCIe lanes"),
    "driver": (host(gpus=(), topology=(), gpu_fault="nvidia-smi does not answer"), Level.PROBLEM, "GPU health", "not"),
    "a port down": (
        host(ports=(PORT, dataclasses.replace(PORT, device="mlx5_1", state="DOWN"))),
        Level.NOTE,
        "fabric",
        "no link: mlx5_1:1",
    ),
    "all ports down": (
        host(ports=(dataclasses.replace(PORT, state="DOWN"),)),
        Level.PROBLEM,
        "fabric",
        "1 ports, and none has a link",
    ),
    "no device": (host(paths=()), Level.PROBLEM, "fabric", "no /dev/infiniband"),
    "memlock": (host(memlock_kib=8192), Level.PROBLEM, "fabric", "8192 KiB at most"),
    "quota": (host(quota=("/dev/vda1 10240* 10000 20000 6days 5 0 0",)), Level.PROBLEM, "quota", "over the quota"),
    "quota nearly": (host(quota=("nas:/home 19000 0 20000 5 0 0",)), Level.NOTE, "quota", "of 19.5 MiB used"),
    "docker down": (host(docker="", docker_fault="Cannot connect"), Level.NOTE, "Docker", "Cannot connect"),
    "no GPU runtime": (host(docker_runtimes=("runc",)), Level.NOTE, "Docker", "no runtime for GPUs among runc"),
    "slurm down": (host(slurm_fault="Unable to contact"), Level.NOTE, "SLURM", "Unable to contact"),
    "small shm": (
        host(spaces=(HostSpace(path="/dev/shm", total_bytes=64 << 20, free_bytes=64 << 20, is_writable=True),)),
        Level.PROBLEM,
        "/dev/shm",
        "64.0 MiB of 64.0 MiB free",
    ),
    "few files": (host(nofile=256), Level.PROBLEM, "open files", "at most 256"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_each_thing_that_is_wrong_is_one_finding_with_a_fix(case: tuple[HostFacts, Level, str, str]) -> None:
    on, level, what, said = case
    (found,) = [each for each in diagnose_host(on, where="h0") if each.level is not Level.OK]
    assert (found.level, found.what) == (level, what)
    assert said in found.message
    assert found.fix


def test_of_this_machine_only_what_is_not_looked_at_elsewhere() -> None:
    assert not {"GPUs", "CPUs", "/dev/shm", "runs"} & {each.what for each in diagnose_host(host())}


def together(*hosts: Asked) -> list[Diagnosis]:
    return list(diagnose_together(hosts))


def test_hosts_that_differ() -> None:
    other = host(gpus=(dataclasses.replace(H100, driver="535.1"),), interfaces=(dataclasses.replace(ETH0, mtu=1500),))
    found = together(
        Asked(name="h0", facts=host(), torch="2.13.0", ahead_s=0.1, unsure_s=0.1),
        Asked(name="h1", facts=other, torch="2.12.0", ahead_s=-40.0, unsure_s=0.1),
    )
    assert {each.what: each.level for each in found} == {
        "GPUs": Level.NOTE,
        "driver": Level.NOTE,
        "torch": Level.PROBLEM,
        "MTU": Level.PROBLEM,
        "clock": Level.NOTE,
    }
    assert next(each.message for each in found if each.what == "clock") == "h1: 40.0 s behind this machine"
    assert all(each.fix for each in found)


def test_hosts_that_are_alike_have_clocks_within_what_can_be_told() -> None:
    (clock,) = together(*(Asked(name=name, facts=host(), ahead_s=1.3, unsure_s=0.5) for name in ("h0", "h1")))
    assert (clock.level, clock.message) == (Level.OK, "within 1.30 s of this machine (measured to 0.50 s)")


def test_links_of_a_real_table_with_nics_and_affinity() -> None:
    lines = (
        "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity",
        "GPU0\t X \tPHB\tSYS\tPIX\t0-23\t0",
        "GPU1\tPHB\t X \tSYS\tPHB\t0-23\t0",
        "GPU2\tSYS\tSYS\t X \tSYS\t24-47\t1",
        "NIC0\tPIX\tPHB\tSYS\t X ",
    )
    assert gpu_links(lines) == {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}
    assert gpu_links(()) == {}


def test_what_hardware_should_give() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Voodoo 2") is None
    nvlinks = peak_between_gpus(host())
    assert nvlinks is not None
    assert (nvlinks.bytes_per_s, nvlinks.why) == (450e9, "18 NVLinks")
    assert peak_between_gpus(host(topology=())) is None
    fabric = peak_between_nodes((host(ports=(PORT,) * 8), host(ports=(PORT,) * 8)), ("10.0.0.1", "10.0.0.2"))
    assert fabric is not None
    assert (fabric.bytes_per_s, fabric.why) == (400e9, "3200 Gb/s of InfiniBand")
    plain = peak_between_nodes((host(ports=()), host(ports=())), ("10.0.0.1", "10.0.0.1"))
    assert plain is not None
    assert (plain.bytes_per_s, plain.why) == (3.125e9, "the 25 Gb/s of the interface")
    assert peak_between_nodes((host(ports=()), host(ports=())), ("10.0.0.1", "10.9.9.9")) is None


def between(*tried: Tried, on_gpus: bool = True, **of: Any) -> list[Diagnosis]:
    names = [f"h{index}" for index in range(len(tried))]
    facts = {name: host(**of) for name in names}
    return list(
        judge_between(dict(zip(names, tried, strict=True)), facts, ["10.0.0.1"] * len(tried), ranks=2, on_gpus=on_gpus)
    )


def works(**more: Any) -> Tried:
    return Tried(**{"ok": True, "reduce_s": 0.004, "size_bytes": 64 << 20, "flops": (7e14, 7e14), **more})


def test_sums_between_hosts_beside_the_fabric() -> None:
    summed, product = between(works(network="IB"), works(network="IB"))
    assert summed.level is Level.OK
    assert summed.message == (
        "2 hosts, 4 GPUs over NCCL: 64 MiB in 4 ms, bus bandwidth 25.2 GB/s, 50% of 400 Gb/s of InfiniBand (50 GB/s)"
    )
    assert product.message == (
        "700 TFLOP/s at least, 700 in the middle (4 ranks), 71% of the data sheet of NVIDIA H100 80GB HBM3"
    )
    slow, _ = between(works(reduce_s=0.04), works())
    assert (slow.level, "5% of 400 Gb/s" in slow.message) == (Level.NOTE, True)


def test_sockets_beside_a_fabric_are_a_problem_and_said() -> None:
    found = between(works(network="Socket"), works(network="Socket"))
    (problem,) = [each for each in found if each.level is Level.PROBLEM]
    assert problem.message == "NCCL goes over sockets between the hosts, though each has ports of infiniband"
    assert Level.PROBLEM not in {each.level for each in between(works(network="Socket"), works(), ports=())}


def test_of_hosts_that_fail_the_one_that_says_why_is_named() -> None:
    (found,) = between(
        Tried(ok=False, said="rank 0: RuntimeError: Connection closed by peer"),
        Tried(ok=False, said="rank 2: RuntimeError: CUDA error: uncorrectable ECC error"),
    )
    assert found.level is Level.PROBLEM
    assert found.message.endswith("h1: rank 2: RuntimeError: CUDA error: uncorrectable ECC error")
    assert "h0" not in found.message


def test_a_gpu_that_is_slower_than_the_others_is_named() -> None:
    names = [f"rank {index}" for index in range(4)]
    (slower,) = judge_products((7e14, 7e14, 4e14, 7e14), gpus=[H100.name] * 4, names=names)
    assert (slower.level, "slower: rank 2" in slower.message) == (Level.NOTE, True)
    (low,) = judge_products((1e14,) * 4, gpus=[H100.name] * 4, names=names)
    assert (low.level, "10% of the data sheet" in low.message) == (Level.NOTE, True)
    (cpu,) = judge_products((1e10, 2e9), gpus=(), names=names[:2])
    assert cpu.level is Level.OK
