"""What a host has and brings: the value that the answer of the probe (`host_script.py`) is read into. Pure.

The same probe runs here, over ssh, and in a container; who has a machine runs `probe_argv` there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.planning.host_script import GPU_BASE, GPU_HEALTH

ACTIVE = "ACTIVE"
"""State of a port of InfiniBand that has a link."""


@dataclass(frozen=True, kw_only=True)
class HostInterface:
    """One network interface of a host that is up."""

    name: str
    addresses: tuple[str, ...]
    mtu: int | None = None
    speed_mbps: int | None = None
    """What the link says it can; None where it does not say."""
    is_virtual: bool = False
    """A bridge, a tunnel, loopback: no device of its own."""


@dataclass(frozen=True, kw_only=True)
class FabricPort:
    """One port of a device for remote memory access: InfiniBand, RoCE or EFA."""

    device: str
    """`mlx5_0`."""
    port: int
    state: str
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE); EFA says `Unspecified`."""
    rate_gbps: float | None
    driver: str

    @property
    def kind(self) -> str:
        """`infiniband`, `roce` or `efa`."""
        if self.driver == "efa":
            return "efa"
        return "roce" if self.link_layer == "Ethernet" else "infiniband"

    @property
    def is_active(self) -> bool:
        """Whether it has a link."""
        return self.state == ACTIVE


@dataclass(frozen=True, kw_only=True)
class HostGpu:
    """One GPU, as nvidia-smi tells it. None: it does not tell."""

    index: int
    name: str
    memory_bytes: int
    driver: str
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    throttle_reasons: int | None = None
    """The bits of NVML."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    temperature_c: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostSpace:
    """A file system at a folder."""

    path: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A plain value, so that tests write their own."""

    hostname: str
    interfaces: tuple[HostInterface, ...] = ()
    knows_addresses: bool = True
    """False: there is no `ip` to ask, so no interface shows an address."""
    ports: tuple[FabricPort, ...] = ()
    paths: tuple[str, ...] = ()
    """Those of PATHS that are there."""
    nccl_conf: tuple[str, ...] = ()
    """Lines of /etc/nccl.conf, without comments."""
    vendor: str = ""
    """What the firmware says: `Amazon EC2`, `Google`, `OracleCloud.com` ..."""
    gpus: tuple[HostGpu, ...] = ()
    gpu_fault: str = ""
    """Why GPUs cannot be asked, where there is a driver."""
    cuda: str = ""
    """The newest CUDA that the driver can run."""
    topology: tuple[str, ...] = ()
    """Lines of `nvidia-smi topo -m`."""
    docker: str = ""
    """Version of the engine; empty without one that answers."""
    docker_fault: str = ""
    """What the docker command says where the engine does not answer."""
    docker_runtimes: tuple[str, ...] = ()
    podman: str = ""
    slurm: str = ""
    slurm_fault: str = ""
    """What sinfo says where SLURM does not answer."""
    quota: tuple[str, ...] = ()
    """Lines of `quota`, those of file systems alone."""
    memlock_kib: int | None = None
    """None: unlimited."""
    nofile: int | None = None
    cpus: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    spaces: tuple[HostSpace, ...] = ()
    """/dev/shm first, then the folders that were asked for."""
    own_name_address: str = ""
    """A loopback address that /etc/hosts gives the host's own name; empty: none."""
    reached_at: str = ""
    """Its own address, by which ssh has reached it."""
    clock_s: float | None = None
    """Its time when it was asked, in seconds since the epoch."""

    @property
    def active_ports(self) -> tuple[FabricPort, ...]:
        """Ports that have a link."""
        return tuple(port for port in self.ports if port.is_active)

    @property
    def shm(self) -> HostSpace | None:
        """/dev/shm."""
        return next((space for space in self.spaces if space.path == "/dev/shm"), None)


def host_facts(answer: str) -> HostFacts:
    """Read what the probe said, among anything that a shell of the host says besides. Raises ValueError."""
    said: dict[str, list[str]] = {}
    for line in answer.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "launch-host":
            key, _, value = rest.partition(" ")
            said.setdefault(key, []).append(value)
    if "begin" not in said or "end" not in said:
        last = next((line for line in reversed(answer.splitlines()) if line.strip()), "nothing")
        raise ValueError(f"the probe of the host did not come to its end; the last it said: {last.strip()}")
    docker, docker_fault, runtimes = _docker(said)
    addresses: dict[str, list[str]] = {}
    for name, address in _words(said, "address", 2):
        if not address.startswith("fe80:"):
            addresses.setdefault(name, []).append(address)
    memory = {name: int(value) * 1024 for name, value in _words(said, "memory", 2) if value.isdecimal()}
    return HostFacts(
        hostname=_one(said, "hostname"),
        interfaces=_interfaces(said, addresses),
        knows_addresses="no-ip" not in said,
        ports=tuple(
            FabricPort(
                device=device,
                port=int(number),
                state=state,
                link_layer=layer,
                rate_gbps=_real(rate),
                driver=driver,
            )
            for device, number, state, layer, rate, driver in _words(said, "port", 6)
            if number.isdecimal()
        ),
        paths=tuple(said.get("path", ())),
        nccl_conf=tuple(line.strip() for line in said.get("nccl-conf", ())),
        vendor=", ".join(dict.fromkeys(filter(None, map(str.strip, said.get("vendor", ()))))),
        gpus=_gpus(said),
        gpu_fault=_one(said, "gpu-fault"),
        cuda=_one(said, "cuda"),
        topology=tuple(said.get("topo", ())),
        docker=docker,
        docker_fault=docker_fault,
        docker_runtimes=runtimes,
        podman=_one(said, "podman"),
        slurm=_slurm(_one(said, "slurm")),
        slurm_fault=_fault(_one(said, "sinfo")),
        quota=tuple(line.strip() for line in said.get("quota", ()) if re.search(r"\d+\*?\s+\d+\s+\d+", line)),
        memlock_kib=_whole(_one(said, "memlock")),
        nofile=_whole(_one(said, "nofile")),
        cpus=_whole(_one(said, "cpus")) or 0,
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        spaces=tuple(
            HostSpace(
                path=path, total_bytes=int(total) * 1024, free_bytes=int(free) * 1024, is_writable=writable == "yes"
            )
            for total, free, writable, path in _words(said, "space", 4)
            if total.isdecimal() and free.isdecimal()
        ),
        reached_at=_reached_at(_one(said, "reached-at")),
        own_name_address=_one(said, "own-name"),
        clock_s=_real(_one(said, "clock")),
    )


def gpu_links(topology: Sequence[str]) -> dict[tuple[int, int], str]:
    """How pairs of GPUs are joined, by `nvidia-smi topo -m`: `NV18`, or the PCIe between them (`PIX` to `SYS`)."""
    rows = [line.split() for line in topology]
    columns = next((row for row in rows if row and row[0] == "GPU0" and row[1:2] != ["X"]), [])
    names = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and row is not columns and len(row) > len(names):
            own = int(row[0].removeprefix("GPU"))
            for name, link in zip(names, row[1:], strict=False):
                other = int(name.removeprefix("GPU"))
                if own < other:
                    links[own, other] = link
    return links


def host_from_json(raw: Mapping[str, Any]) -> HostFacts:
    """Read what `dataclasses.asdict` has made of a value. Raises TypeError for unknown names."""
    parts: dict[str, Any] = {
        "interfaces": tuple(
            HostInterface(**{**each, "addresses": tuple(each["addresses"])}) for each in raw.get("interfaces", ())
        ),
        "ports": tuple(FabricPort(**each) for each in raw.get("ports", ())),
        "gpus": tuple(HostGpu(**each) for each in raw.get("gpus", ())),
        "spaces": tuple(HostSpace(**each) for each in raw.get("spaces", ())),
    }
    texts = ("paths", "nccl_conf", "topology", "docker_runtimes", "quota")
    return HostFacts(**{**raw, **parts, **{name: tuple(raw.get(name, ())) for name in texts}})


def _interfaces(said: dict[str, list[str]], addresses: Mapping[str, list[str]]) -> tuple[HostInterface, ...]:
    """Those that are up, by `ip` where there is one; what the kernel shows of their devices."""
    known = {name: (mtu, speed, state, kind) for name, mtu, speed, state, kind in _words(said, "interface", 5)}
    up = dict(_words(said, "link", 2)) or {name: mtu for name, (mtu, _, state, _) in known.items() if state != "down"}
    nothing = ("", "", "", "virtual")
    return tuple(
        HostInterface(
            name=name,
            addresses=tuple(addresses.get(name, ())),
            mtu=_whole(mtu),
            speed_mbps=_whole(known.get(name, nothing)[1]) or None,
            is_virtual=known.get(name, nothing)[3] == "virtual",
        )
        for name, mtu in up.items()
    )


def _one(said: dict[str, list[str]], key: str) -> str:
    return said.get(key, [""])[0].strip()


def _words(said: dict[str, list[str]], key: str, count: int) -> list[list[str]]:
    """The lines of a key that have so many words; the last word takes the rest."""
    lines = [line.split(maxsplit=count - 1) for line in said.get(key, ())]
    return [words for words in lines if len(words) == count]


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _real(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _reached_at(connection: str) -> str:
    """Of SSH_CONNECTION: the address of the server."""
    words = connection.split()
    return words[2] if len(words) == 4 else ""


def _slurm(text: str) -> str:
    """Of `slurm 24.05.1`: the version."""
    name, _, version = text.partition(" ")
    return version if name == "slurm" else ""


def _fault(text: str) -> str:
    """Of `CODE OUTPUT`: what was said where the code is not 0."""
    code, _, rest = text.partition(" ")
    return "" if code in ("", "0") else rest.strip() or f"exit code {code}"


def _docker(said: dict[str, list[str]]) -> tuple[str, str, tuple[str, ...]]:
    """Version, fault, runtimes."""
    code, _, rest = _one(said, "docker").partition(" ")
    if code == "124":
        return "", "the engine does not answer", ()
    if code != "0":
        return "", rest.strip() or (f"exit code {code}" if code else ""), ()
    version, _, runtimes = rest.partition(" ")
    return version, "" if version else "the engine does not answer", tuple(filter(None, runtimes.strip().split(",")))


def _gpus(said: dict[str, list[str]]) -> tuple[HostGpu, ...]:
    health = {words[0]: words for words in _cells(said, "health", len(GPU_HEALTH))}
    found = []
    for index, name, memory_mib, driver in _cells(said, "gpu", len(GPU_BASE)):
        _, ecc, reasons, limit, default, temperature, _, width, width_max = health.get(index, [""] * len(GPU_HEALTH))
        found.append(
            HostGpu(
                index=int(index),
                name=name,
                memory_bytes=(_whole(memory_mib) or 0) << 20,
                driver=driver,
                ecc_uncorrected=_whole(ecc),
                throttle_reasons=int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else None,
                power_limit_w=_real(limit),
                power_default_w=_real(default),
                temperature_c=_whole(temperature),
                pcie_width=_whole(width),
                pcie_width_max=_whole(width_max),
            )
        )
    return tuple(found)


def _cells(said: dict[str, list[str]], key: str, count: int) -> list[list[str]]:
    """Lines of nvidia-smi's CSV."""
    rows = [[cell.strip() for cell in line.split(",")] for line in said.get(key, ())]
    return [row for row in rows if len(row) == count and row[0].isdecimal()]
