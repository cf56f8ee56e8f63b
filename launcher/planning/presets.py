"""Network presets: what the fabrics of providers need by name, and which one fits what the hosts have. Pure.

NCCL finds devices, topology and interfaces by itself, and what it finds is left alone. A value stands here only where
its provider says that NCCL cannot know it, each with where that is written and when it was read. What a host brings
itself (a script, /etc/nccl.conf) is used as it is there, since lists of values that are copied out of it grow old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.planning.host_facts import FabricPort, HostFacts, gpu_links
from launcher.planning.host_script import GIB_SCRIPT, NCCL_CONF, TCPXO_SCRIPTS

VERBS = "/dev/infiniband"
"""Devices of InfiniBand, RoCE and EFA."""


@dataclass(frozen=True)
class Known:
    """One value that a provider asks for."""

    name: str
    value: str
    source: str
    read: str
    """The month in which the source was read."""
    only_gpus: tuple[str, ...] = ()
    """Beginnings of names of GPUs that it is for. Empty: all."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One way of the ranks to each other."""

    what: str
    """For people, after `it has`."""
    values: tuple[Known, ...] = ()
    needs: tuple[str, ...] = ()
    """Paths of which a host has to have one."""
    mounts: tuple[str, ...] = ()
    """`HOST:CONTAINER[:ro]`, each where the host has it."""
    verbs: bool = False
    """Whether a container needs VERBS, and memory that stays in place."""
    setup: tuple[str, ...] = ()
    """Lines of bash that each node runs before its agent."""


def _sourced(find: str, missing: str, *more: str) -> str:
    """A line that reads a provider's script, which may do what `bash -eu` does not forgive."""
    then = "".join(f"; {line}" for line in more)
    return f'{find}; [ -r "$script" ] || {{ echo \'{missing}\' >&2; exit 1; }}; set +eu; . "$script"; set -eu{then}'


_NCCL = "NCCL user guide, environment variables"
_TCPX = "SkyPilot 0.14.1, sky/provision/gcp/constants.py"
_OCI = "oracle-quickstart/oci-hpc-oke, docs/recommended-nccl-rccl-parameters-by-shape.md"
_HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA B200")
_TX = "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
_RX = "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"

PRESETS: Mapping[str, Preset] = {
    # Whether there is InfiniBand is left to NCCL unless a preset was named: `auto` must never slow a cluster down.
    "auto": Preset(what="what was found"),
    "loopback": Preset(what="one machine"),
    "ethernet": Preset(what="Ethernet alone", values=(Known("NCCL_IB_DISABLE", "1", _NCCL, "2026-11"),)),
    "infiniband": Preset(
        what="InfiniBand",
        values=(
            Known("NCCL_IB_DISABLE", "0", _NCCL, "2026-11"),
            Known("NCCL_IB_TIMEOUT", "22", _NCCL, "2026-11"),
            Known("NCCL_IB_RETRY_CNT", "7", _NCCL, "2026-11"),
        ),
        verbs=True,
    ),
    # The traffic class is the network's own, and NCCL chooses the GID since 2.21: neither is guessed.
    "roce": Preset(what="RoCE", values=(Known("NCCL_IB_TIMEOUT", "22", _NCCL, "2026-11"),), verbs=True),
    # aws-ofi-nccl sets all else for each type of machine; its cheat sheet warns of what older guides have set.
    "aws-efa": Preset(
        what="EFA",
        values=(Known("FI_PROVIDER", "efa", "aws/aws-ofi-nccl, doc/efa-env-var.md", "2026-08"),),
        verbs=True,
    ),
    "gcp-gib": Preset(
        what="Google's gIB profile",
        needs=(GIB_SCRIPT,),
        mounts=("/usr/local/gib:/usr/local/gib:ro",),
        verbs=True,
        # Google NCCL/gIB guide, read 2026-11: source the script, and have lib64 in LD_LIBRARY_PATH.
        setup=(
            _sourced(
                f"script={GIB_SCRIPT}",
                f"network.preset gcp-gib: there is no {GIB_SCRIPT} on this node",
                'export LD_LIBRARY_PATH="/usr/local/gib/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
            ),
        ),
    ),
    "gcp-tcpxo": Preset(
        what="Google's TCPXO profile",
        needs=TCPXO_SCRIPTS,
        mounts=(
            "/var/lib/tcpxo/lib64:/var/lib/tcpxo/lib64:ro",
            "/dev/aperture_devices:/dev/aperture_devices",
        ),
        # GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md (2026-01), and for the names of
        # the interfaces of virtual machines dstack's docs/clusters/gcp.md (2026-08).
        setup=(
            _sourced(
                f'script={TCPXO_SCRIPTS[0]}; [ -r "$script" ] || script={TCPXO_SCRIPTS[1]}; '
                'export NCCL_LIB_DIR="${script%/*}" NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY=/dev/aperture_devices '
                'LD_LIBRARY_PATH="${script%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
                f"network.preset gcp-tcpxo: there is no {TCPXO_SCRIPTS[0]} on this node",
                "if [ -e /sys/class/net/enp0s12 ]; then export NCCL_FASTRAK_CTRL_DEV=enp0s12 "
                "NCCL_FASTRAK_IFNAME=enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0; fi",
            ),
        ),
    ),
    "gcp-tcpx": Preset(
        what="Google's TCPX",
        values=(
            Known("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "eth1,eth2,eth3,eth4", _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_CTRL_DEV", "eth0", _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_TX_BINDINGS", _TX, _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_RX_BINDINGS", _RX, _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "50000", _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", "/run/tcpx", _TCPX, "2026-11"),
            Known("NCCL_GPUDIRECTTCPX_FORCE_ACK", "0", _TCPX, "2026-11"),
        ),
        needs=("/run/tcpx",),
        mounts=(
            "/run/tcpx:/run/tcpx",
            "/var/lib/tcpx/lib64:/usr/local/tcpx/lib64:ro",
            "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64:ro",
        ),
        setup=(
            'export LD_LIBRARY_PATH="/usr/local/nvidia/lib64:/usr/local/tcpx/lib64:/var/lib/tcpx/lib64'
            '${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
        ),
    ),
    # All that NCCL needs is in the host's /etc/nccl.conf, which a container does not see unless it is mounted.
    "azure-nd": Preset(what="Azure's NCCL configuration", needs=(NCCL_CONF,), verbs=True),
    "oci-roce": Preset(
        what="Oracle's RoCE",
        values=(
            Known("NCCL_IB_HCA", "mlx5", _OCI, "2026-11"),
            Known("NCCL_IB_GID_INDEX", "3", _OCI, "2026-11"),
            Known("NCCL_IB_TC", "41", _OCI, "2026-11"),
            Known("NCCL_IB_SL", "0", _OCI, "2026-11"),
            Known("NCCL_IB_TIMEOUT", "22", _OCI, "2026-11"),
            Known("NCCL_IB_SPLIT_DATA_ON_QPS", "0", _OCI, "2026-11"),
            Known("NCCL_CUMEM_ENABLE", "0", _OCI, "2026-11", only_gpus=_HOPPER),
            Known("NCCL_IGNORE_CPU_AFFINITY", "1", _OCI, "2026-11", only_gpus=_HOPPER),
        ),
        verbs=True,
    ),
    "coreweave": Preset(
        what="CoreWeave's InfiniBand",
        values=(Known("NCCL_IB_HCA", "ibp", "coreweave/nccl-tests, slurm/ for H100", "2026-11"),),
        verbs=True,
    ),
}

_BROUGHT = ("gcp-gib", "gcp-tcpxo")
"""What a host brings a script for, the best first."""
_KINDS = {"efa": "aws-efa", "infiniband": "infiniband", "roce": "roce"}


class ContainerNeeds(NamedTuple):
    """What a container has to be given for a preset."""

    mounts: tuple[str, ...]
    """`HOST:CONTAINER[:ro]`, as `docker run -v` takes them."""
    devices: tuple[str, ...]
    caps: tuple[str, ...]
    source_scripts: tuple[str, ...]
    """Lines of bash before the agent. They are in the plan's `setup` already."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `auto` has become."""

    preset: str
    why: str
    """After `auto: `."""
    off: Mapping[str, str]
    """Variables that this choice has to set, with the reason."""


def container_needs(preset: str, facts: HostFacts) -> ContainerNeeds:
    """What a container on a host needs, of what the host has. `auto` is what fits this host alone."""
    if preset == "auto":
        preset = choose_preset((facts,)).preset
    chosen = PRESETS[preset]
    mounts = [mount for mount in chosen.mounts if _has(facts, mount.partition(":")[0])]
    if NCCL_CONF in facts.paths:  # NCCL reads it on any way; the files that it names are the provider's
        mounts.append(f"{NCCL_CONF}:{NCCL_CONF}:ro")
        mounts += [f"{path}:{path}:ro" for path in ("/opt/microsoft",) if path in facts.paths]
    verbs = chosen.verbs and VERBS in facts.paths
    return ContainerNeeds(
        mounts=tuple(mounts),
        devices=(VERBS,) if verbs else (),
        caps=("IPC_LOCK",) if verbs else (),
        source_scripts=chosen.setup,
    )


def _has(facts: HostFacts, path: str) -> bool:
    """Whether a host has a path, or something in it that was asked for."""
    return any(known == path or known.startswith(f"{path}/") for known in facts.paths)


def choose_preset(hosts: Sequence[HostFacts]) -> Choice:
    """The preset that fits what all of the hosts have, and why. They are the nodes of one run."""
    everywhere = "" if len(hosts) == 1 else f" on all {len(hosts)} nodes"
    for name in _BROUGHT:
        brought = [_first(PRESETS[name].needs, host) for host in hosts]
        if all(brought):
            return _plain(name, f"{brought[0]} is there{everywhere}")
    kinds = [{port.kind for port in host.active_ports} if VERBS in host.paths else set() for host in hosts]
    for kind, name in _KINDS.items():
        if all(kind in found for found in kinds):
            ports = [port for port in hosts[0].active_ports if port.kind == kind]
            if name == "infiniband" and all(host.nccl_conf and "/opt/microsoft" in host.paths for host in hosts):
                return _plain("azure-nd", f"{NCCL_CONF} and {_listed(ports)}{everywhere}")
            return _plain(name, f"{_listed(ports)}{everywhere}")
    if any(kinds):
        without = next(index for index, found in enumerate(kinds) if not found & _shared(kinds))
        have = next(index for index, found in enumerate(kinds) if found)
        ports = list(hosts[have].active_ports)
        why = f"node {have} ({hosts[have].hostname}) has {_listed(ports)}, and {_lack(hosts[without], without)}"
        return Choice(preset="ethernet", why=why, off={"NCCL_IB_DISABLE": "1"})
    return _plain("ethernet", f"no InfiniBand, RoCE or EFA{everywhere}")


def why_one_machine(hosts: Sequence[HostFacts]) -> str:
    """How the GPUs of the one machine of a run are joined, where that is known: NCCL finds it by itself."""
    links = sorted(set(gpu_links(hosts[0].topology).values())) if hosts else []
    if not links:
        return ""
    if all(link.startswith("NV") for link in links):
        return f"one machine, whose GPUs are joined by NVLink ({', '.join(links)})"
    return f"one machine, whose GPUs are joined by {', '.join(links)} (`nvidia-smi topo -m`)"


def _shared(kinds: Sequence[set[str]]) -> set[str]:
    """What the first host that has anything has."""
    return next(found for found in kinds if found)


def _lack(host: HostFacts, index: int) -> str:
    who = f"node {index} ({host.hostname})"
    if host.active_ports and VERBS not in host.paths:
        return f"{who} has no {VERBS}"
    if host.active_ports:
        return f"{who} has {_listed(list(host.active_ports))}"
    return f"{who} has no port with a link" if host.ports else f"{who} has none"


def _first(paths: Sequence[str], host: HostFacts) -> str:
    return next((path for path in paths if path in host.paths), "")


def _plain(preset: str, why: str) -> Choice:
    return Choice(preset=preset, why=why, off={})


def _listed(ports: Sequence[FabricPort]) -> str:
    """`8 ports of InfiniBand at 400 Gb/s (mlx5_0 ...)`."""
    kind = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}[ports[0].kind]
    rates = {port.rate_gbps for port in ports}
    rate = f" at {ports[0].rate_gbps:g} Gb/s" if len(rates) == 1 and ports[0].rate_gbps else ""
    more = " ..." if len(ports) > 1 else ""
    return f"{len(ports)} port{'s' * (len(ports) > 1)} of {kind}{rate} ({ports[0].device}{more})"


def preset_values(preset: str, hosts: Sequence[HostFacts]) -> list[Known]:
    """The values of a named preset, for the GPUs that the hosts have."""
    names = [gpu.name for host in hosts for gpu in host.gpus]
    return [
        known
        for known in PRESETS[preset].values
        if not known.only_gpus or any(name.startswith(known.only_gpus) for name in names)
    ]


def missing_for(preset: str, hosts: Sequence[HostFacts]) -> list[str]:
    """What hosts lack for a named preset, a sentence each."""
    chosen, found = PRESETS[preset], []
    for index, host in enumerate(hosts):
        who = f"node {index} ({host.hostname})"
        if chosen.needs and not _first(chosen.needs, host):
            found.append(f"{who} has no {' or '.join(chosen.needs)}")
        if chosen.verbs and VERBS not in host.paths:
            found.append(f"{who} has no {VERBS}")
    return found
