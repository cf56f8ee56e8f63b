"""Facts: what is true on this machine. The only place that probes; everything after it is pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """Absolute path of the interpreter."""
    python_version: str
    torch_version: str | None
    """Read from the package's metadata; torch is not imported."""
    cpus: tuple[int, ...]
    """CPUs this process may use (affinity), not the machine's."""
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    environment: dict[str, str]
    """Only what a plan may depend on: NCCL_*, GLOO_*, TORCH_*, OMP_NUM_THREADS, WANDB_MODE, CUDA_VISIBLE_DEVICES ..."""
    slurm_configured: bool
    git: dict[str, Any]
    """{"sha": str | None, "dirty": bool}"""
