"""Probes of this machine that other processes answer, or a name server: each in bounded time, and never in vain."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

_TORCH_LIMIT_S = 90.0
_SPY_LIMIT_S = 15.0
_NAME_LIMIT_S = 5.0

ASK_TORCH = """
import json, torch
cuda = torch.cuda
found = {
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": cuda.device_count() if torch.version.cuda else 0,
    "architectures": cuda.get_arch_list() if torch.version.cuda else [],
    "distributed": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "fault": "",
    "cudnn": "",
    "nccl": "",
}
if torch.version.cuda:
    try:
        number = torch.backends.cudnn.version() or 0
        found["cudnn"] = "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100) if number else ""
        found["nccl"] = ".".join(map(str, cuda.nccl.version()))
        cuda.init()
    except Exception as error:
        found["fault"] = str(error).splitlines()[0]
print("launch-torch " + json.dumps(found))
"""
_SLEEP = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says of itself, in a process of its own."""

    version: str = ""
    cuda: str | None = None
    """The CUDA that it was built for."""
    devices: int = 0
    architectures: tuple[str, ...] = ()
    """`sm_90` ..., that it has code for."""
    distributed: bool = True
    fault: str = ""
    """Why it cannot be imported, or CUDA not be started."""
    cudnn: str = ""
    """The versions that it has loaded of these libraries."""
    nccl: str = ""

    @property
    def text(self) -> str:
        """`2.13.0 (CUDA 12.8, cuDNN 9.10.2, NCCL 2.28.3)`."""
        parts = (("CUDA", self.cuda), ("cuDNN", self.cudnn), ("NCCL", self.nccl))
        of = ", ".join(f"{name} {version}" for name, version in parts if version)
        return f"{self.version} ({of})" if of else self.version


def ask_torch(python: str, *, limit_s: float = _TORCH_LIMIT_S) -> Torch:
    """Import torch in a process of its own, and start CUDA there if it has any."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(fault=f"importing it takes more than {limit_s:g} s")
    except OSError as error:
        return Torch(fault=str(error))
    return torch_of(done.stdout, done.stderr, done.returncode)


def torch_of(output: str, errors: str, code: int) -> Torch:
    """What ASK_TORCH has said, of a process that has ended with this code."""
    for line in output.splitlines():
        if line.startswith("launch-torch "):
            raw: dict[str, Any] = json.loads(line.removeprefix("launch-torch "))
            return Torch(**{**raw, "architectures": tuple(raw["architectures"])})
    said = errors.strip().splitlines()
    return Torch(fault=said[-1] if said else f"its import ended with exit code {code}")


def resolve(name: str, *, limit_s: float = _NAME_LIMIT_S) -> tuple[str, ...]:
    """The addresses of a name. Empty where there is none, or no answer in time."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
        except OSError:
            return  # unknown: nothing is found

    asking = threading.Thread(target=ask, daemon=True)  # a name server that is away takes a minute to say so
    asking.start()
    asking.join(limit_s)
    return tuple(found)


def ask_pyspy(program: str | None) -> str:
    """Why py-spy cannot read another process of ours, found by trying. Empty where it can."""
    if program is None:
        return "py-spy is not installed"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.read(2)
        try:
            done = subprocess.run(
                [program, "dump", "--pid", str(sleeper.pid)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SPY_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            sleeper.kill()
    return "" if done.returncode == 0 else next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
