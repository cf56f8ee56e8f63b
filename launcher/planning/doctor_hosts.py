"""What is wrong with a host that was asked by the probe, alone and beside the others. Pure: facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.planning.doctor import Diagnosis, found_note, found_ok, found_problem
from launcher.planning.host_facts import HostFacts, HostSpace, gpu_links
from launcher.planning.presets import VERBS
from launcher.wording import size

_GIB = 1 << 30
_HARDWARE = 0x08 | 0x40 | 0x80
"""Of NVML's reasons for lower clocks: heat or power, as the hardware sees it."""
_HEAT = 0x20
_HOT_C = 88
_POWER_SHARE = 0.9
_CLOCK_S = 1.0
"""So far clocks may be apart: what is written down is put in order by them, and tickets of logins expire."""
_QUOTA = re.compile(r"(\d+)(\*?)\s+(\d+)\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A host, and what else was asked of it."""

    name: str
    """As the user names it; empty: this machine."""
    facts: HostFacts
    ahead_s: float | None = None
    """Of the clock here."""
    unsure_s: float = 0.0
    """By how much that may be wrong: half of the time that the answer took."""
    torch: str | None = None
    """The version in its interpreter; None: nobody asked."""


def diagnose_host(host: HostFacts, *, where: str = "") -> list[Diagnosis]:
    """What the probe has found on a host. where: its name, for one that is not this machine.

    Of this machine only what `diagnose` does not look at.
    """
    checks = (*_ALWAYS, *(_ELSEWHERE if where else ()))
    return [replace(found, where=where) for check in checks for found in check(host)]


# ---------------------------------------------------------------- what this machine is asked, too


def _health(host: HostFacts) -> Iterator[Diagnosis]:
    found = False
    for gpu in host.gpus:
        who = f"GPU {gpu.index}"
        reasons = gpu.throttle_reasons or 0
        if gpu.ecc_uncorrected:
            found = True
            message = (
                f"{who}: {gpu.ecc_uncorrected} memory errors that ECC could not correct, since the driver is loaded"
            )
            yield found_problem(
                "GPU health", message, f"`nvidia-smi -r -i {gpu.index}`; if they come again, replace it"
            )
        if reasons & _HARDWARE:
            found = True
            fix = "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`: fans, airflow, power supply"
            yield found_problem("GPU health", f"{who}: its hardware holds the clocks back, for heat or power", fix)
        elif reasons & _HEAT or (gpu.temperature_c or 0) >= _HOT_C:
            found = True
            yield found_note(
                "GPU health", f"{who}: {gpu.temperature_c} °C, and slower for it", "airflow; fans; its neighbours"
            )
        if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < _POWER_SHARE * gpu.power_default_w:
            found = True
            message = f"{who}: limited to {gpu.power_limit_w:g} W of {gpu.power_default_w:g} W"
            yield found_note(
                "GPU health", message, f"`nvidia-smi -i {gpu.index} -pl {gpu.power_default_w:g}`, where you may"
            )
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            found = True
            message = f"{who}: {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
            yield found_note(
                "GPU health", message, "under load `nvidia-smi -q` shows all; if not, the card or its slot"
            )
    known = [gpu for gpu in host.gpus if gpu.throttle_reasons is not None]
    if known and not found:
        yield found_ok("GPU health", f"no ECC error, no clock held back, full power ({len(known)} asked)")
    elif host.gpu_fault and not host.gpus:
        yield found_problem(
            "GPU health", host.gpu_fault, "nvidia-smi by hand; a driver that was updated needs a reboot"
        )


def _topology(host: HostFacts) -> Iterator[Diagnosis]:
    links = gpu_links(host.topology)
    kinds = {link: [pair for pair, each in links.items() if each == link] for link in dict.fromkeys(links.values())}
    if not kinds:
        return
    if len(kinds) == 1:
        (kind,) = kinds
        how = f"by NVLink ({kind})" if kind.startswith("NV") else f"over PCIe ({kind})"
        yield found_ok("topology", f"all {len(host.gpus)} GPUs are joined {how}")
    elif any(kind.startswith("NV") for kind in kinds) and any(not kind.startswith("NV") for kind in kinds):
        listed = "; ".join(f"{kind}: {len(pairs)} pairs" for kind, pairs in kinds.items())
        fix = (
            "`nvidia-smi nvlink -s`: a link that is down; where it is built so, ranks that talk most go on joined GPUs"
        )
        yield found_note("topology", f"NVLink joins only some of the GPUs ({listed})", fix)
    else:
        yield found_ok("topology", "; ".join(f"{kind}: {len(pairs)} pairs of GPUs" for kind, pairs in kinds.items()))


def _fabric(host: HostFacts) -> Iterator[Diagnosis]:
    if not host.ports:
        return
    active, down = host.active_ports, [port for port in host.ports if not port.is_active]
    names = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}
    for kind, word in names.items():
        of_kind = [port for port in active if port.kind == kind]
        if of_kind:
            rates = sorted({port.rate_gbps or 0.0 for port in of_kind})
            yield found_ok("fabric", f"{len(of_kind)} x {word} at {', '.join(f'{rate:g}' for rate in rates)} Gb/s")
    if down and active:
        listed = ", ".join(f"{port.device}:{port.port}" for port in down)
        yield found_note("fabric", f"no link: {listed}", "`ibstat`; the cable, the switch, or the subnet manager")
    elif down:
        yield found_problem(
            "fabric", f"{len(down)} ports, and none has a link", "`ibstat`; cables, switch, subnet manager"
        )
    if VERBS not in host.paths:
        fix = f"in a container --device {VERBS} --cap-add IPC_LOCK; on a host `modprobe ib_uverbs`"
        yield found_problem("fabric", f"no {VERBS}: NCCL goes over sockets, and says so only with NCCL_DEBUG=INFO", fix)
    elif host.memlock_kib is not None:
        fix = "ulimit -l unlimited; in a container --ulimit memlock=-1; for sshd and slurmd in their units"
        yield found_problem(
            "fabric", f"locked memory: {host.memlock_kib} KiB at most, and the fabric needs it unlimited", fix
        )
    if host.nccl_conf:
        yield found_ok("fabric", f"/etc/nccl.conf: {', '.join(host.nccl_conf)}")


def _interfaces(host: HostFacts) -> Iterator[Diagnosis]:
    cables = [each for each in host.interfaces if each.addresses and not each.is_virtual]
    if cables:
        words = [
            f"{each.name}: MTU {each.mtu}" + (f", {each.speed_mbps / 1000:g} Gb/s" if each.speed_mbps else "")
            for each in cables
        ]
        yield found_ok("links", "; ".join(words))


def _quota(host: HostFacts) -> Iterator[Diagnosis]:
    for line in host.quota:
        found = _QUOTA.search(line)
        if found is None:
            continue
        used, over, soft, hard = int(found[1]), found[2], int(found[3]), int(found[4])
        limit, where = hard or soft, line.split()[0]
        if over:
            yield found_problem(
                "quota", f"{where}: {size(used * 1024)} used, over the quota", "free some, or ask for more"
            )
        elif limit and used > 0.9 * limit:
            message = f"{where}: {size(used * 1024)} of {size(limit * 1024)} used"
            yield found_note("quota", message, "free some, or ask for more: a checkpoint that does not fit is lost")


def _docker(host: HostFacts) -> Iterator[Diagnosis]:
    if host.docker_fault:
        yield found_note("Docker", host.docker_fault, "is dockerd started, and may this user use it (group docker)?")
    elif host.docker and host.gpus and not {"nvidia", "nvidia-container-runtime"} & set(host.docker_runtimes):
        fix = "install nvidia-container-toolkit, then `nvidia-ctk runtime configure --runtime=docker`, restart docker"
        message = f"engine {host.docker}, and no runtime for GPUs among {', '.join(host.docker_runtimes) or 'none'}"
        yield found_note("Docker", message, fix)
    elif host.docker:
        yield found_ok("Docker", f"engine {host.docker}")


def _slurm(host: HostFacts) -> Iterator[Diagnosis]:
    if host.slurm_fault:
        yield found_note("SLURM", host.slurm_fault, "`sinfo` by hand: slurmctld, munge, slurm.conf")
    elif host.slurm:
        yield found_ok("SLURM", f"{host.slurm}, answers")


# ---------------------------------------------------------------- what only another machine is asked this way


def _gpus(host: HostFacts) -> Iterator[Diagnosis]:
    if host.gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in host.gpus))
        cuda = f", for up to CUDA {host.cuda}" if host.cuda else ""
        yield found_ok("GPUs", f"{len(host.gpus)} ({names}), driver {host.gpus[0].driver}{cuda}")
    elif not host.gpu_fault:
        yield found_ok("GPUs", "none: runs use the CPU")


def _capacity(host: HostFacts) -> Iterator[Diagnosis]:
    yield found_ok("CPUs", f"{host.cpus}, {size(host.available_bytes)} of {size(host.memory_bytes)} memory available")
    if host.nofile is not None and host.nofile < 1024:
        yield found_problem("open files", f"at most {host.nofile}", "ulimit -n 65536, for sshd or slurmd")


def _spaces(host: HostFacts) -> Iterator[Diagnosis]:
    for space in host.spaces:
        yield _space(space)
    if host.shm is None:
        yield found_problem(
            "/dev/shm", "missing: loader workers and NCCL share memory there", "mount -t tmpfs tmpfs /dev/shm"
        )


def _space(space: HostSpace) -> Diagnosis:
    is_shm = space.path == "/dev/shm"
    what = "/dev/shm" if is_shm else "runs"
    message = f"{space.path}: {size(space.free_bytes)} of {size(space.total_bytes)} free"
    shm_fix = "mount -o remount,size=8g /dev/shm; in a container --shm-size 8g"
    if not space.is_writable:
        return found_problem(what, f"{space.path} cannot be written", "--runs-dir DIR: the same path on each host")
    if space.free_bytes < _GIB:
        return found_problem(what, message, shm_fix if is_shm else "free some, or --runs-dir DIR")
    if not is_shm and space.free_bytes < 10 * _GIB:
        return found_note(what, message, "free some, or --runs-dir DIR")
    return found_ok(what, message)


_ALWAYS: tuple[Callable[[HostFacts], Iterator[Diagnosis]], ...] = (
    _health,
    _topology,
    _fabric,
    _interfaces,
    _quota,
    _docker,
    _slurm,
)
_ELSEWHERE: tuple[Callable[[HostFacts], Iterator[Diagnosis]], ...] = (_gpus, _capacity, _spaces)


# ---------------------------------------------------------------- beside each other


def diagnose_together(hosts: Sequence[Asked]) -> Iterator[Diagnosis]:
    """What has to be the same on all hosts of a run, and their clocks."""
    facts = {each.name: each.facts for each in hosts}
    kinds = {name: f"{len(host.gpus)} x {host.gpus[0].name}" if host.gpus else "none" for name, host in facts.items()}
    yield from _same("GPUs", kinds)
    yield from _same("driver", {name: host.gpus[0].driver for name, host in facts.items() if host.gpus})
    yield from _same("torch", {each.name: each.torch for each in hosts if each.torch is not None}, must=True)
    mtus = {each.name: mtu for each in hosts if (mtu := _mtu_of(each.facts)) is not None}
    yield from _same("MTU", {name: str(mtu) for name, mtu in mtus.items()})
    known = [each for each in hosts if each.ahead_s is not None]
    for each in known:
        ahead_s = each.ahead_s or 0.0
        if abs(ahead_s) > _CLOCK_S + each.unsure_s:
            way = "ahead of" if ahead_s > 0 else "behind"
            message = f"{each.name}: {abs(ahead_s):.1f} s {way} this machine"
            yield found_note("clock", message, "chronyd or systemd-timesyncd on both: records are put in order by time")
    if known and not any(abs(each.ahead_s or 0.0) > _CLOCK_S + each.unsure_s for each in known):
        most = max(abs(each.ahead_s or 0.0) for each in known)
        unsure = max(each.unsure_s for each in known)
        yield found_ok("clock", f"within {most:.2f} s of this machine (measured to {unsure:.2f} s)")


def _mtu_of(host: HostFacts) -> int | None:
    """Of the interface by which the host was reached, else of its only cable."""
    cables = [each for each in host.interfaces if each.addresses and each.mtu and "127.0.0.1" not in each.addresses]
    reached = [each for each in cables if host.reached_at in each.addresses]
    found = reached or (cables if len(cables) == 1 else [])
    return found[0].mtu if found else None


def _same(what: str, values: dict[str, str], *, must: bool = False) -> Iterator[Diagnosis]:
    if len(set(values.values())) < 2:
        return
    message = f"not the same on all hosts: {', '.join(f'{name} {value}' for name, value in values.items())}"
    fixes = {
        "GPUs": "a run takes what the smallest host has; `ssh.hosts`, or `docker.hosts`, of one kind",
        "driver": "one version: the older one decides which CUDA runs everywhere",
        "torch": "one version on all hosts: messages between different ones are not promised to fit",
        "MTU": "one MTU on all hosts and on the switch: large messages are lost in between otherwise",
    }
    yield (found_problem if must or what == "MTU" else found_note)(what, message, fixes[what])
