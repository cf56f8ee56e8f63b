"""What `launch doctor` asks a machine. The probing alone; `doctor.py` judges. A tool that is absent is a fact, too."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.planning.facts import Facts, control_groups
from launcher.planning.probes import Torch, ask_pyspy, ask_torch, resolve
from launcher.planning.wandb_login import key_source

TOOLS = ("git", "nvidia-smi", "ip", "sbatch", "srun", "docker", "ssh", "sky")
RESOURCES = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
_NOT_SYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU of the machine, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA driver; empty without one."""

    version: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that it can run."""
    gpus: tuple[GpuState, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Space:
    """A file system at a folder."""

    path: str
    kind: str
    """ext4, tmpfs, nfs4 ..."""
    total_bytes: int
    free_bytes: int
    free_inodes: float
    """0 to 1; 1 where they are not counted."""
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A plain value, so that tests write their own."""

    facts: Facts
    torch: Torch | None
    """None: not installed for this interpreter."""
    driver: Driver
    name_addresses: tuple[str, ...]
    """What the host's own name resolves to; empty: to nothing, in time."""
    ports: tuple[int, int] | None
    """The range from which free ports are given."""
    sockets: int
    """TCP sockets in use."""
    port_fault: str
    """Why no free port can be had."""
    limits: dict[str, tuple[int, int]]
    """Soft and hard; -1 = unlimited."""
    shm: Space | None
    runs: Space
    state: Space
    """Where the list of the user's runs is kept."""
    tmp: Space
    machine_cpus: int
    memory_bytes: int
    memory_limit_bytes: int | None
    """Of the control group; None without one."""
    available_bytes: int
    clock_synchronised: bool | None
    pyspy_fault: str
    """Why py-spy cannot read another process; empty where it can."""
    wandb_version: str | None
    wandb_key: str
    """Where there is a key for W&B; never the key."""
    tools: dict[str, str]
    """Name -> path of those that are there."""


def probe_machine(
    facts: Facts, runs_root: Path, state_root: Path, *, pyspy: str | None, wandb_version: str | None
) -> Machine:
    """Ask this machine. Takes some seconds, for torch is imported in a process of its own; changes nothing."""
    root = Path("/")
    return Machine(
        facts=facts,
        torch=None if facts.torch_version is None else ask_torch(facts.python),
        driver=_driver(),
        name_addresses=resolve(facts.hostname),
        ports=_port_range(root),
        sockets=_sockets(root),
        port_fault=_port_fault(),
        limits={name: resource.getrlimit(number) for name, number in RESOURCES.items()},
        shm=space_at(Path("/dev/shm"), root) if Path("/dev/shm").is_dir() else None,
        runs=space_at(runs_root, root),
        state=space_at(state_root, root),
        tmp=space_at(Path(os.environ.get("TMPDIR") or "/tmp"), root),
        machine_cpus=os.cpu_count() or 1,
        memory_bytes=_meminfo(root, "MemTotal"),
        memory_limit_bytes=memory_limit(root),
        available_bytes=_meminfo(root, "MemAvailable"),
        clock_synchronised=_clock_synchronised(),
        pyspy_fault=ask_pyspy(pyspy),
        wandb_version=wandb_version,
        wandb_key=key_source(os.environ),
        tools={name: found for name in TOOLS if (found := shutil.which(name))},
    )


def space_at(path: Path, root: Path) -> Space:
    """The file system of a folder, or of the nearest one above it that is there."""
    folder = path.absolute()
    while not _is_there(folder):
        folder = folder.parent
    stat = os.statvfs(folder)
    return Space(
        path=str(path.absolute()),
        kind=_mount_kind(folder.resolve(), root),
        total_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
        free_inodes=stat.f_favail / stat.f_files if stat.f_files else 1.0,
        writable=os.access(folder, os.W_OK | os.X_OK),
    )


def _is_there(path: Path) -> bool:
    """Also False for a folder below one that is closed to us."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def memory_limit(root: Path) -> int | None:
    """The smallest memory limit of this process's control groups, v1 and v2, on the way up; None without one."""
    files = [
        folder / name
        for folder in control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")  # v2, v1
    ]
    limits = [limit for file in files for limit in _numbers(file)]
    real = [limit for limit in limits if limit < _meminfo(root, "MemTotal")]  # v1 writes a huge one for none
    return min(real, default=None)


def _driver() -> Driver:
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return Driver()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Driver()  # `facts.gpu_fault` says it
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return Driver(
            version=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_gpu_state(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
        )
    except pynvml.NVMLError:
        return Driver()
    finally:
        pynvml.nvmlShutdown()


def _gpu_state(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuState(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        capability=(int(major), int(minor)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
    )


def _port_range(root: Path) -> tuple[int, int] | None:
    numbers = [int(part) for line in _lines(root / "proc/sys/net/ipv4/ip_local_port_range") for part in line.split()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _sockets(root: Path) -> int:
    return sum(max(0, len(_lines(root / "proc/net" / name)) - 1) for name in ("tcp", "tcp6"))


def _port_fault() -> str:
    """Listen on a port of the kernel's choice, as the head agent will."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2.0):
            return ""
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _clock_synchronised() -> bool | None:
    """As the kernel sees it; None where it may not be asked."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(1024))
    except AttributeError:
        return None
    return None if state < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else state != _NOT_SYNCHRONISED


def _meminfo(root: Path, name: str) -> int:
    found = [line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else 0


def _mount_kind(folder: Path, root: Path) -> str:
    mounts: list[Sequence[str]] = [line.split() for line in _lines(root / "proc/self/mounts")]
    above = [entry for entry in mounts if len(entry) > 2 and folder.is_relative_to(_unescaped(entry[1]))]
    return max(above, key=lambda entry: len(entry[1]))[2] if above else "unknown"


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ")


def _numbers(path: Path) -> list[int]:
    return [int(line) for line in _lines(path) if line.isdecimal()]


def _lines(path: Path) -> list[str]:
    """The lines of a file of /proc or /sys; none where it is missing or closed to us."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def limits_text(limits: Mapping[str, tuple[int, int]], name: str) -> str:
    """`1024 (hard 4096)`."""
    soft, hard = ("unlimited" if number < 0 else f"{number:,}" for number in limits[name])
    return soft if soft == hard else f"{soft} (hard: {hard})"
