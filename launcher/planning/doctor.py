"""What is wrong with a machine, and what to do about each. Pure: facts in, findings out."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from launcher.planning.engine import OLDEST_TORCH, major_minor, supported_torch, supports, version_text
from launcher.planning.machine import TOOLS, limits_text

if TYPE_CHECKING:
    from launcher.planning.machine import Machine, Space

_GIB = 1 << 30
_MIB = 1 << 20
_BUSY_GPU = 0.1
_FEW_PORTS = 2_000
_OWN_FILE_SYSTEMS = ("tmpfs", "ramfs")


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Good to know; runs work."""
    PROBLEM = "PROBLEM"
    """Some run will fail of it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One thing that was looked at."""

    level: Level
    what: str
    message: str
    fix: str = ""
    where: str = ""
    """The host; empty: this machine."""


def diagnose(machine: Machine) -> list[Diagnosis]:
    """Everything that was looked at, in the order of a run. A note or a problem always has a fix."""
    return [finding for check in _CHECKS for finding in check(machine)]


def found_ok(what: str, message: str) -> Diagnosis:
    """All is well with it."""
    return Diagnosis(level=Level.OK, what=what, message=message)


def found_note(what: str, message: str, fix: str) -> Diagnosis:
    """It will do; and what would be better."""
    return Diagnosis(level=Level.NOTE, what=what, message=message, fix=fix)


def found_problem(what: str, message: str, fix: str) -> Diagnosis:
    """It will not do; and what to do about it."""
    return Diagnosis(level=Level.PROBLEM, what=what, message=message, fix=fix)


def _torch(machine: Machine) -> Iterator[Diagnosis]:
    python = f"{machine.facts.python} (Python {machine.facts.python_version})"
    install = "pip install -c constraints.txt '.[train]'"
    torch = machine.torch
    if torch is None:
        fix = f"{install}; or name an interpreter that has it: `python:` in the recipe of a script"
        yield found_note("torch", f"not installed for {python}", fix)
        return
    if not torch.version:
        yield found_problem("torch", f"cannot be imported by {python}: {torch.fault}", install)
    elif not torch.distributed:
        yield found_problem("torch", f"{torch.version} was built without torch.distributed or gloo", install)
    elif not supports(torch.version):
        message = (
            f"{torch.version} for {python}; the agent knows {supported_torch('and')} and leaves others to torchrun"
        )
        yield found_note("torch", f"{message} (from {version_text(OLDEST_TORCH)})", install)
    else:
        yield found_ok("torch", f"{torch.text} for {python}")


def _gpus(machine: Machine) -> Iterator[Diagnosis]:
    driver, torch = machine.driver, machine.torch
    if machine.facts.gpu_fault:
        fix = "the driver's module and library are of different versions, or it is not loaded: reboot, or nvidia-smi"
        yield found_problem("GPUs", machine.facts.gpu_fault, fix)
        return
    if not driver.gpus:
        yield found_ok("GPUs", "none: runs use the CPU")
        return
    newest = f"CUDA {version_text(driver.cuda)}" if driver.cuda else "an unknown CUDA"
    names = ", ".join(dict.fromkeys(gpu.name for gpu in driver.gpus))
    yield found_ok("GPUs", f"{len(driver.gpus)} ({names}), driver {driver.version}, for up to {newest}")
    for gpu in driver.gpus:
        if gpu.used_bytes > _BUSY_GPU * gpu.memory_bytes:
            used = f"GPU {gpu.index}: {_size(gpu.used_bytes)} of {_size(gpu.memory_bytes)} are in use"
            yield found_note("GPUs", used, "`nvidia-smi` shows by whom; CUDA_VISIBLE_DEVICES chooses others")
    if torch is not None and torch.version:
        yield from _torch_on_gpus(machine)


def _torch_on_gpus(machine: Machine) -> Iterator[Diagnosis]:
    torch, driver = machine.torch, machine.driver
    assert torch is not None
    visible = machine.facts.gpus
    cuda = major_minor(torch.cuda)
    if torch.cuda is None or cuda is None:
        message = f"{len(driver.gpus)} GPUs, and torch {torch.version} was built without CUDA: runs would use the CPU"
        yield found_problem("CUDA", message, "install a CUDA build: https://pytorch.org/get-started/locally")
    elif driver.cuda is not None and driver.cuda[0] < cuda[0]:
        message = f"torch {torch.version} needs CUDA {torch.cuda}, driver {driver.version} runs up to "
        fix = f"a newer driver, or a torch that was built for CUDA {driver.cuda[0]}"
        yield found_problem("CUDA", message + version_text(driver.cuda), fix)
    elif torch.fault:
        yield found_problem("CUDA", f"torch {torch.version} cannot start it: {torch.fault}", "`nvidia-smi` says more")
    elif torch.devices != len(visible):
        message = f"the driver has {len(visible)} GPUs for us, torch sees {torch.devices}"
        yield found_problem(
            "CUDA", message, "look at CUDA_VISIBLE_DEVICES, and at the devices that a container was given"
        )
    elif too_new := [gpu for gpu in driver.gpus if not _has_code(gpu.capability, torch.architectures)]:
        message = (
            f"torch {torch.version} has no code for {too_new[0].name} (sm_{''.join(map(str, too_new[0].capability))})"
        )
        yield found_problem("CUDA", f"{message}; it has {', '.join(torch.architectures)}", "a torch for a newer CUDA")
    else:
        yield found_ok("CUDA", f"{torch.cuda} in torch, {torch.devices} GPUs that it can use")


def _has_code(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Machine code runs on its own major version from its minor one on; PTX (`compute_`) on everything newer."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        known = (int(digits[:-1]), int(digits[-1]))
        if (kind == "compute" and known <= capability) or (known[0] == capability[0] and known[1] <= capability[1]):
            return True
    return not architectures


def _cpus(machine: Machine) -> Iterator[Diagnosis]:
    facts = machine.facts
    if facts.num_cpus >= machine.machine_cpus:
        yield found_ok("CPUs", f"{machine.machine_cpus}")
        return
    quota = "" if facts.cpu_quota is None else f", a quota of {facts.cpu_quota:g}"
    message = f"{facts.num_cpus} of the machine's {machine.machine_cpus} (affinity: {len(facts.cpus)}{quota})"
    yield found_note("CPUs", message, "threads are planned for what is allowed; ask for more where the limit was set")


def _memory(machine: Machine) -> Iterator[Diagnosis]:
    total, limit = machine.memory_bytes, machine.memory_limit_bytes
    message = f"{_size(machine.available_bytes)} of {_size(total)} available"
    if limit is not None:
        fix = "beyond the limit the kernel kills a worker; raise it where the container or job is started"
        yield found_note("memory", f"{message}, but this control group may use {_size(limit)}", fix)
    elif machine.available_bytes < _GIB:
        yield found_problem("memory", message, "end what uses it, or use another machine")
    else:
        yield found_ok("memory", message)


def _name(machine: Machine) -> Iterator[Diagnosis]:
    name, found = machine.facts.hostname, machine.name_addresses
    own = [
        address for interface in machine.facts.interfaces if not interface.loopback for address in interface.addresses
    ]
    hint = f"in /etc/hosts: {own[0] if own else 'ADDRESS'} {name}"
    if not found:
        message = f"{name}, this host's name, has no address; the launcher does not need it, torchrun by hand does"
        yield found_note("name", message, hint)
    elif own and all(_is_loopback(address) for address in found):
        message = f"{name} resolves to {', '.join(found)} here, which no other machine reaches"
        fix = f"the launcher passes addresses, never this name; for other programs, {hint}"
        yield found_note("name", message, fix)
    else:
        yield found_ok("name", f"{name} resolves to {', '.join(found)}")


def _interfaces(machine: Machine) -> Iterator[Diagnosis]:
    usable = [interface for interface in machine.facts.interfaces if interface.addresses]
    cables = [f"{each.name} {' '.join(each.addresses)}" for each in usable if not each.loopback]
    if not any(interface.loopback for interface in usable):
        fix = "ip link set lo up; ip addr add 127.0.0.1/8 dev lo"
        yield found_problem("network", "the loopback interface is down: nothing on this machine can meet", fix)
    elif not cables:
        fix = "for runs on this machine alone that is enough; else connect it, or give the container a network"
        yield found_note("network", "no address but loopback", fix)
    else:
        yield found_ok("network", "; ".join(cables))


def _ports(machine: Machine) -> Iterator[Diagnosis]:
    low, high = machine.ports or (32768, 60999)
    count = high - low + 1
    message = f"{count:,} for connections ({low}-{high}), {machine.sockets:,} TCP sockets in use"
    if machine.port_fault:
        fix = "a firewall, or a security profile of the container, forbids it"
        yield found_problem("ports", f"this machine cannot connect to itself on a free port: {machine.port_fault}", fix)
    elif count - machine.sockets < _FEW_PORTS:
        yield found_problem("ports", message, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield found_ok("ports", message)


def _limits(machine: Machine) -> Iterator[Diagnosis]:
    limits = machine.limits
    files, processes = limits["nofile"][0], limits["nproc"][0]
    text = limits_text(limits, "nofile")
    if 0 <= files < 1024:
        yield found_problem("open files", f"at most {text}", "ulimit -n 65536")
    elif 0 <= files < 4096 and files != limits["nofile"][1]:
        yield found_note("open files", f"at most {text}; many loader workers need more", "ulimit -n 65536")
    else:
        yield found_ok("open files", f"at most {text}")
    text = limits_text(limits, "nproc")
    if 0 <= processes < 1024:
        yield found_problem("processes", f"at most {text} of this user, threads counted", "ulimit -u 65536")
    else:
        yield found_ok("processes", f"at most {text}")
    text, locked = limits_text(limits, "memlock"), limits["memlock"][0]
    if machine.driver.gpus and locked >= 0:
        fix = "ulimit -l unlimited; in a container --ulimit memlock=-1; on a cluster in limits.conf, for slurmd too"
        yield found_note("locked memory", f"at most {text} bytes; NCCL over InfiniBand needs more", fix)
    if limits["core"][0] != 0:
        message = f"core dumps up to {limits_text(limits, 'core')}: a crashed worker may write all of its memory"
        yield found_note("core dumps", message, "ulimit -c 0")


def _shm(machine: Machine) -> Iterator[Diagnosis]:
    shm = machine.shm
    fix = "docker run --shm-size 8g (or --ipc=host); mount -o remount,size=8g /dev/shm"
    if shm is None or not shm.writable:
        yield found_problem("/dev/shm", "missing, or not writable: loader workers and NCCL share memory there", fix)
        return
    message = f"{_size(shm.free_bytes)} of {_size(shm.total_bytes)} free"
    if shm.total_bytes < _GIB:
        yield found_problem("/dev/shm", f"{message}; loader workers hand their batches over in it", fix)
    elif shm.free_bytes < _GIB // 4:
        yield found_problem("/dev/shm", message, "`ls -l /dev/shm` shows what others have left there")
    else:
        yield found_ok("/dev/shm", message)


def _disk(machine: Machine) -> Iterator[Diagnosis]:
    yield from _space(
        "runs", machine.runs, problem_below=_GIB, note_below=10 * _GIB, fix="--runs-dir DIR, or LAUNCH_RUNS"
    )
    yield from _space(
        "list", machine.state, problem_below=_MIB, note_below=10 * _MIB, fix="set XDG_STATE_HOME to a folder of yours"
    )
    yield from _space(
        "temporary", machine.tmp, problem_below=64 * _MIB, note_below=_GIB, fix="free some, or set TMPDIR"
    )


def _space(what: str, space: Space, *, problem_below: int, note_below: int, fix: str) -> Iterator[Diagnosis]:
    message = f"{space.path} ({space.kind}): {_size(space.free_bytes)} of {_size(space.total_bytes)} free"
    if not space.writable:
        yield found_problem(what, f"{space.path} cannot be written", fix)
    elif space.free_bytes < problem_below or space.free_inodes < 0.001:
        inodes = f", {space.free_inodes:.1%} of its inodes" if space.free_inodes < 0.001 else ""
        yield found_problem(what, message + inodes, fix)
    elif space.free_bytes < note_below:
        yield found_note(what, message, fix)
    elif what == "runs" and space.kind in _OWN_FILE_SYSTEMS:
        yield found_note(what, f"{message}; it is memory, and gone after a reboot", fix)
    else:
        yield found_ok(what, message)


def _clock(machine: Machine) -> Iterator[Diagnosis]:
    if machine.clock_synchronised is False:
        message = "the kernel says that it is not synchronised; times of several machines may not fit together"
        yield found_note("clock", message, "chronyd or systemd-timesyncd (in a virtual machine: on its host)")
    elif machine.clock_synchronised:
        yield found_ok("clock", "synchronised")


def _stacks(machine: Machine) -> Iterator[Diagnosis]:
    if machine.pyspy_fault:
        fix = "as root, --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0; without, a rank writes its own log"
        yield found_note("stacks", f"py-spy cannot read another process: {machine.pyspy_fault}", fix)
    else:
        yield found_ok("stacks", "py-spy can read other processes")


def _wandb(machine: Machine) -> Iterator[Diagnosis]:
    if machine.wandb_version is None:
        yield found_note("W&B", "not installed: curves are in metrics.jsonl alone", "pip install wandb")
    elif not machine.wandb_key:
        fix = "wandb login, or export WANDB_API_KEY; `launch sync RUN` sends what was kept"
        yield found_note("W&B", f"{machine.wandb_version}, no key: curves stay on this machine", fix)
    else:
        yield found_ok("W&B", f"{machine.wandb_version}, with a key from {machine.wandb_key}")


def _tools(machine: Machine) -> Iterator[Diagnosis]:
    here = [name for name in TOOLS if name in machine.tools]
    absent = [name for name in TOOLS if name not in machine.tools]
    yield found_ok("tools", f"{', '.join(here) or 'none'}" + (f"; not here: {', '.join(absent)}" if absent else ""))


_CHECKS: tuple[Callable[[Machine], Iterator[Diagnosis]], ...] = (
    _torch,
    _gpus,
    _cpus,
    _memory,
    _shm,
    _disk,
    _limits,
    _name,
    _interfaces,
    _ports,
    _clock,
    _stacks,
    _wandb,
    _tools,
)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _size(size_bytes: int) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes} bytes"
