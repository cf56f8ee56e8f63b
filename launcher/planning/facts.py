"""Facts: what is true on this machine, found by probing; the plan that is made from them is pure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.errors import Problem, Refused
from launcher.planning.calls import answer
from launcher.planning.code import CodeFacts
from launcher.planning.docker_facts import DockerFacts, docker_from_json
from launcher.planning.host_facts import HostFacts, host_from_json
from launcher.planning.interpreters import Interpreter, probe
from launcher.planning.slurm_facts import Allocation, SlurmFacts, SlurmProbe, allocation_of, slurm_from_json
from launcher.planning.ssh_facts import SshHost, ssh_hosts_from_json
from launcher.planning.store_facts import store_fault

FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TP_", "FI_")
FORWARDED_NAMES = frozenset(
    {
        "ACCELERATE_USE_CPU",
        "OMP_NUM_THREADS",
        "WANDB_MODE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_LAUNCH_BLOCKING",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_OFFLINE",
        "LAUNCH_ENGINE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "SBATCH_PARTITION",
        "TRANSFORMERS_OFFLINE",
    }
)
GIT_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device of this machine."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A plain value, so that tests write their own (tests/golden/*/facts.json)."""

    hostname: str
    user: str
    cwd: str
    python: str
    """Absolute path of our own interpreter."""
    python_version: str
    torch_version: str | None
    """Of our own interpreter, read from the package's metadata; torch is not imported."""
    interpreter: Interpreter | None = None
    """What the workers run in. None: our own interpreter."""
    workers_python: str | None = None
    """The interpreter of a container's image, which could not be asked."""
    cpus: tuple[int, ...]
    """CPUs this process may use (affinity), not the machine's."""
    cpu_quota: float | None = None
    """CPUs' worth of time that a container or a job may use at once (cgroup), where there is such a limit."""
    gpus: tuple[Gpu, ...]
    """Those that CUDA_VISIBLE_DEVICES leaves."""
    gpu_fault: str = ""
    """Why the driver could not be asked, where there is one that does not answer."""
    interfaces: tuple[Interface, ...]
    environment: dict[str, str]
    """Only what a plan may depend on: NCCL_*, GLOO_*, TORCH_*, OMP_NUM_THREADS, WANDB_MODE, CUDA_VISIBLE_DEVICES ..."""
    slurm_configured: bool
    nsys: bool | None = None
    """Whether Nsight Systems is here. None: nobody looked."""
    git: dict[str, Any] = field(default_factory=lambda: {"sha": None, "dirty": False})
    """{"sha": str | None, "dirty": bool}"""
    code: CodeFacts | None = None
    """The code that is launched. None: nobody asked."""
    store_fault: str = ""
    """Why the recipe's `checkpoint.store` cannot be used here."""
    secrets_missing: tuple[str, ...] = ()
    """Variables that the recipe names as secrets and that are not set here. No value is ever read."""
    slurm: SlurmFacts | None = None
    """None: there is none on this machine, or nobody asked."""
    allocation: Allocation | None = None
    """The job of SLURM that this process is in."""
    template: str | None = None
    """The text of the recipe's `slurm.template`."""
    until_s: float | None = None
    """The moment of the recipe's `limits.until`, in seconds since the epoch, by the time zone of this machine."""
    after_job: str | None = None
    """The newest job of the run that the recipe's `slurm.after` names."""
    hosts: tuple[HostFacts, ...] = ()
    """The machines of the nodes, by index, where they are known and could be asked. Empty: nobody asked."""

    ssh: tuple[SshHost, ...] = ()
    """The hosts of the recipe's `ssh.hosts`, one for each node, as they have answered."""

    docker: tuple[DockerFacts, ...] = ()
    """The Docker engines that the containers of a run are on. Empty: nobody asked."""

    @property
    def num_cpus(self) -> int:
        """How many CPUs can work at once: the affinity, or the quota where that is less."""
        cpus = max(1, len(self.cpus))
        return cpus if self.cpu_quota is None else max(1, min(cpus, math.ceil(self.cpu_quota)))


def gather_facts(
    *,
    cwd: Path | None = None,
    python: str | None = None,
    secrets: Iterable[str] = (),
    slurm: bool = False,
    template: Path | None = None,
    until: str | None = None,
    store: str = "",
) -> Facts:
    """Probe this machine. Takes tens of milliseconds, imports no torch, and changes nothing.

    What the recipe says: `python`, the interpreter of the workers; `secrets`, variables that have to be set; `template`
    and `until` of its sections `slurm` and `limits`, `store` of `checkpoint`. `slurm`: ask that, too. Raises Refused
    for a template that cannot be read.
    """
    here = (cwd or Path.cwd()).absolute()
    git = _start_git(here)  # runs while the rest is looked up
    probing = SlurmProbe() if slurm else None
    gpus, gpu_fault = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Facts(
        hostname=socket.gethostname(),
        user=_user(),
        cwd=str(here),
        python=sys.executable,
        python_version=".".join(str(part) for part in sys.version_info[:3]),
        torch_version=package_version("torch", sys.path),
        interpreter=None if python in (None, sys.executable) else probe(python),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpu_quota=cpu_quota(Path("/")),
        gpus=gpus,
        gpu_fault=gpu_fault,
        interfaces=_interfaces(),
        environment=forwarded(os.environ),
        slurm_configured=_slurm_configured(),
        nsys=shutil.which("nsys") is not None,
        git=_finish_git(git),
        store_fault=store_fault(store),
        secrets_missing=tuple(name for name in dict.fromkeys(secrets) if not os.environ.get(name)),
        slurm=None if probing is None else probing.answer(),
        allocation=allocation_of(os.environ),
        template=None if template is None else _template(template),
        until_s=None if until is None else datetime.fromisoformat(until).timestamp(),
    )


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Refused([Problem(where="slurm.template", message=f"{path} cannot be read: {why}")]) from error


def facts_to_json(facts: Facts) -> str:
    """The facts as text; `facts_from_json` reads them back to an equal value."""
    return json.dumps(dataclasses.asdict(facts), indent=1, ensure_ascii=False) + "\n"


def facts_from_json(text: str) -> Facts:
    """Read facts. Raises TypeError for unknown or missing names."""
    raw = json.loads(text)
    raw["cpus"] = tuple(raw["cpus"])
    raw["gpus"] = tuple(Gpu(**gpu) for gpu in raw["gpus"])
    raw["interfaces"] = tuple(
        Interface(**{**interface, "addresses": tuple(interface["addresses"])}) for interface in raw["interfaces"]
    )
    raw["code"] = CodeFacts(**raw["code"]) if raw.get("code") else None
    raw["interpreter"] = Interpreter(**raw["interpreter"]) if raw.get("interpreter") else None
    raw["hosts"] = tuple(host_from_json(host) for host in raw.get("hosts", ()))
    raw["ssh"] = ssh_hosts_from_json(raw.get("ssh", ()))
    raw["docker"] = docker_from_json(raw.get("docker", ()))
    raw["secrets_missing"] = tuple(raw.get("secrets_missing", ()))
    raw["slurm"] = slurm_from_json(raw.get("slurm"))
    raw["allocation"] = Allocation(**raw["allocation"]) if raw.get("allocation") else None
    return Facts(**raw)


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a plan may depend on, sorted. No secret has such a name."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
    }


def package_version(name: str, search: Iterable[str]) -> str | None:
    """Version of an installed package by the name of its metadata folder: no file is parsed, no other one is read."""
    prefix, suffix = f"{name}-", ".dist-info"
    for folder in search:
        try:
            entries = os.listdir(folder or ".")  # noqa: PTH208 - names only; this is on the way of every dry run
        except OSError:
            continue  # not every entry of sys.path is a folder
        for entry in entries:
            if entry.startswith(prefix) and entry.endswith(suffix):
                return entry[len(prefix) : -len(suffix)]
    return None


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that the control groups of this process allow at once, the smallest on the way up; v1 and v2.

    `root` is where /proc and /sys are found.
    """
    quotas = [quota for folder in control_groups(root, "cpu") if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def visible_gpus(gpus: Sequence[tuple[Gpu, str]], visible: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of (device, uuid) pairs; as in CUDA, the first unknown entry ends the list."""
    if visible is None:
        return tuple(gpu for gpu, _ in gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        found = [gpu for gpu, uuid in gpus if _names_gpu(entry, gpu, uuid)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def _names_gpu(entry: str, gpu: Gpu, uuid: str) -> bool:
    return gpu.index == int(entry) if entry.isdecimal() else entry.startswith("GPU-") and uuid.startswith(entry)


def _gpus(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """The devices that can be used, and why they cannot be known, if so."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return (), ""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        return visible_gpus([_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())], visible), ""
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> tuple[Gpu, str]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(index=index, name=nvml.nvmlDeviceGetName(handle), memory_bytes=memory), nvml.nvmlDeviceGetUUID(handle)


def _interfaces() -> tuple[Interface, ...]:
    """Interfaces that are up, with their IPv4 and IPv6 addresses (link-local ones left out: they name no host)."""
    import psutil

    stats = psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            addresses=tuple(
                address.address
                for address in addresses
                if address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith("fe80:")
            ),
            loopback="loopback" in stats[name].flags.split(","),
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    )


def _user() -> str:
    """Login name; a container may run under a number that has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _slurm_configured() -> bool:
    if shutil.which("sbatch") is None:
        return False
    return "SLURM_CONF" in os.environ or any(Path("/etc").glob("slurm*/slurm.conf"))


def _start_git(cwd: Path) -> subprocess.Popen[str] | None:
    """Commit and state of the working tree in one call, which takes no lock; None where there is no git."""
    git = shutil.which("git")
    if git is None or not cwd.is_dir():
        return None
    return subprocess.Popen(
        [git, "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )


def _finish_git(process: subprocess.Popen[str] | None) -> dict[str, Any]:
    """Read the answer; a repository that takes too long counts as none."""
    output = ""
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = answer(process, limit_s=GIT_LIMIT_S)
    return parse_git_status(output)


def parse_git_status(output: str) -> dict[str, Any]:
    """`git status --porcelain=v2 --branch` as {"sha", "dirty"}."""
    lines = output.splitlines()
    shas = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    sha = shas[0] if shas and shas[0] != "(initial)" else None
    return {"sha": sha, "dirty": any(not line.startswith("#") for line in lines)}


def control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups of `cpu` or `memory`, v1 and v2, each with all its parents.

    `root` is where /proc and /sys are found. Not every folder has to be there.
    """
    file = root / "proc/self/cgroup"
    folders: list[Path] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        for mount in ("", "unified") if not controllers else (controllers, controller, ",".join(sorted(names))):
            base = root / "sys/fs/cgroup" / mount
            below = base / path.lstrip("/")
            folders += [folder for folder in (below, *below.parents) if folder.is_relative_to(base)]
    return folders


def _quota_of(folder: Path) -> float | None:
    """The limit of one control group in CPUs, None where it has none."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    try:
        if v2.is_file():
            quota, period = v2.read_text().split()
        elif v1.is_file():
            quota, period = v1.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            return None
    except OSError:
        return None  # groups above a container's own may be closed to it
    return None if quota in ("max", "-1") else int(quota) / int(period)
