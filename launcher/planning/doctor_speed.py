"""What hardware should give: products of matrices by a GPU, sums between GPUs and between nodes. Data, and pure.

Peaks are those of data sheets, without sparsity. A program that is as good as it gets reaches three quarters of them,
and a broken one a tenth: what counts here lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.planning.host_facts import HostFacts, gpu_links

LEAST_SHARE = 0.5
"""Of a peak: less than that is said."""
LEAST_OF_OTHERS = 0.85
"""GPUs of one kind differ by less."""

PEAK_TFLOPS: dict[str, float] = {
    # Dense bf16 (fp16 where there is no bf16) of NVIDIA's data sheets, read 2026-11; the longest name that fits counts.
    "V100": 125,
    "T4": 65,
    "A10G": 70,
    "A10": 125,
    "A100": 312,
    "A30": 165,
    "A40": 150,
    "RTX A6000": 155,
    "L4": 121,
    "L40S": 362,
    "L40": 181,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "H20": 148,
    "B200": 2250,
    "GB200": 2500,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 210,
}
_NVLINK_GBPS = {"V100": 25, "A100": 25, "A30": 25, "H100": 25, "H200": 25, "GH200": 25, "B200": 50, "GB200": 50}
"""Bytes per second of one link and direction, in 10^9."""


@dataclass(frozen=True)
class Peak:
    """What a way between ranks should carry."""

    bytes_per_s: float
    why: str


def peak_flops(name: str) -> float | None:
    """Of a GPU, by its name; None: it is not known here."""
    known = [(len(key), tflops) for key, tflops in PEAK_TFLOPS.items() if key in name]
    return max(known)[1] * 1e12 if known else None


def peak_between_gpus(host: HostFacts) -> Peak | None:
    """The bus bandwidth that GPUs of one machine should reach; None where nothing is known of the way."""
    links = gpu_links(host.topology)
    if not links or not host.gpus:
        return None
    counts = [int(link[2:]) for link in links.values() if link.startswith("NV") and link[2:].isdecimal()]
    if len(counts) < len(links):
        return None  # over PCIe, for some: by how many switches and sockets, a table cannot know
    known = [rate for key, rate in _NVLINK_GBPS.items() if key in host.gpus[0].name]
    if not known:
        return None
    count = min(counts)
    return Peak(count * known[-1] * 1e9, f"{count} NVLinks")


def peak_between_nodes(hosts: Sequence[HostFacts], addresses: Sequence[str]) -> Peak | None:
    """What all ranks of a node together should send to another: of its fabric, else of the interface of an address."""
    rates = [sum(port.rate_gbps or 0.0 for port in host.active_ports) for host in hosts]
    if all(rates):
        kind = hosts[0].active_ports[0].kind
        words = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}[kind]
        return Peak(min(rates) * 1e9 / 8, f"{min(rates):g} Gb/s of {words}")
    speeds = [
        each.speed_mbps
        for host, address in zip(hosts, addresses, strict=True)
        for each in host.interfaces
        if address in each.addresses and each.speed_mbps and not each.is_virtual
    ]
    if len(speeds) < len(hosts):
        return None
    return Peak(min(speeds) * 1e6 / 8, f"the {min(speeds) / 1000:g} Gb/s of the interface")
