"""Whether ranks can add up numbers, and how fast: the test of `launch doctor`, and what its outcome means.

GPUs that cannot reach each other's memory, for PCIe access control (ACS) or an IOMMU in between, hang in the first
collective and say nothing (F074). So the test has a limit, and is made again with NCCL told not to try that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.doctor import Diagnosis, Level
from launcher.planning.doctor_speed import LEAST_OF_OTHERS, LEAST_SHARE, Peak, peak_flops

if TYPE_CHECKING:
    from launcher.planning.machine import Machine

LIMIT_S = 60.0
_START_LIMIT_S = 90.0
"""For the import of torch, before the ranks are there."""
_SEVERAL = 2
P2P_OFF = "NCCL_P2P_DISABLE"
_WHAT = "all-reduce"
_NO_P2P = (
    "in the BIOS switch off ACS, or start the kernel with iommu=pt; until then `network: {nccl: {P2P_DISABLE: true}}` "
    "in recipes for this machine, which is slower"
)
_SLOW = (
    "`launch doctor` above names ports, lanes and clocks that are down; `NCCL_DEBUG=INFO` shows the way that NCCL takes"
)
_ALL_ELSE = f"NCCL_DEBUG=INFO `launch doctor` shows where NCCL stops; {P2P_OFF} is not it"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of one all-reduce."""

    ok: bool
    hung: bool = False
    said: str = ""
    """What went wrong, as a sentence without a full stop."""
    reduce_s: float | None = None
    size_bytes: int = 0
    flops: Sequence[float] = ()
    """Of each rank, by a product of matrices."""
    network: str = ""
    """What NCCL uses between machines, by its own word: `IB`, `Socket`, the name of a plugin."""


Runner = Callable[[Mapping[str, str]], Tried]
"""Makes one all-reduce with these variables on top of the environment."""


def judge_all_reduce(
    run: Runner,
    *,
    ranks: int,
    on_gpus: bool,
    environment: Mapping[str, str],
    peak: Peak | None = None,
    gpus: Sequence[str] = (),
) -> Iterator[Diagnosis]:
    """Try it; where GPUs fail, once more without peer-to-peer, and say what that means. Nothing is left set.

    peak: what the way between the ranks should carry. gpus: their names, one for each rank.
    """
    where = f"{ranks} GPUs over NCCL" if on_gpus else f"{ranks} processes on the CPU over gloo"
    first = run({})
    is_off = on_gpus and environment.get(P2P_OFF, "0") not in ("", "0")
    if first.ok and is_off:
        message = f"{where}: {_speed(first, ranks)}, with {P2P_OFF}={environment[P2P_OFF]} from the environment"
        yield Diagnosis(
            level=Level.NOTE, what=_WHAT, message=message, fix=f"unset {P2P_OFF} to see whether it is needed"
        )
    elif first.ok:
        yield against_peak(first, ranks, where, peak)
    elif not on_gpus:
        fix = "`launch doctor` above names what of network and memory is wrong; gloo needs no more"
        yield Diagnosis(level=Level.PROBLEM, what=_WHAT, message=f"{where}: {first.said}", fix=fix)
    elif is_off:
        message = f"{where}: {first.said}, though {P2P_OFF}={environment[P2P_OFF]} is in the environment"
        yield Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix=_ALL_ELSE)
    else:
        yield _without_p2p(run({P2P_OFF: "1"}), first, where, ranks)
    if first.ok and first.flops:
        yield from judge_products(first.flops, gpus=gpus, names=[f"rank {rank}" for rank in range(len(first.flops))])


def against_peak(tried: Tried, ranks: int, where: str, peak: Peak | None) -> Diagnosis:
    """How fast it was, beside what the hardware should give."""
    message = f"{where}: {_speed(tried, ranks)}"
    if peak is None:
        return Diagnosis(level=Level.OK, what=_WHAT, message=message)
    share = _bus(tried, ranks) / peak.bytes_per_s
    message += f", {share:.0%} of {peak.why} ({peak.bytes_per_s / 1e9:.3g} GB/s)"
    if share >= LEAST_SHARE:
        return Diagnosis(level=Level.OK, what=_WHAT, message=message)
    return Diagnosis(level=Level.NOTE, what=_WHAT, message=message, fix=_SLOW)


def judge_products(flops: Sequence[float], *, gpus: Sequence[str], names: Sequence[str]) -> Iterator[Diagnosis]:
    """Products of matrices: beside the data sheet of the GPU, and each rank beside the others."""
    what, kinds = "matrix product", dict.fromkeys(gpus)
    peak = peak_flops(next(iter(kinds))) if len(kinds) == 1 else None
    least, median = min(flops), statistics.median(flops)
    message = f"{least / 1e12:.3g} TFLOP/s at least, {median / 1e12:.3g} in the middle ({len(flops)} ranks)"
    if peak is not None:
        message += f", {least / peak:.0%} of the data sheet of {next(iter(kinds))}"
    slow = [name for name, each in zip(names, flops, strict=True) if each < LEAST_OF_OTHERS * median]
    if gpus and slow and len(kinds) == 1:
        fix = "`nvidia-smi -q -d PERFORMANCE,CLOCK`, there: heat, power, or another process"
        yield Diagnosis(level=Level.NOTE, what=what, message=f"{message}; slower: {', '.join(slow)}", fix=fix)
    elif peak is not None and least < LEAST_SHARE * peak:
        fix = "`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`: is the GPU shared, cut in parts (MIG), or held back?"
        yield Diagnosis(level=Level.NOTE, what=what, message=message, fix=fix)
    else:
        yield Diagnosis(level=Level.OK, what=what, message=message)


def _without_p2p(second: Tried, first: Tried, where: str, ranks: int) -> Diagnosis:
    if second.ok:
        message = f"{where}: {first.said}; with {P2P_OFF}=1 it works ({_speed(second, ranks)})"
        return Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix=_NO_P2P)
    message = f"{where}: {first.said}; with {P2P_OFF}=1 it fails, too ({second.said})"
    return Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix=_ALL_ELSE)


def _speed(tried: Tried, ranks: int) -> str:
    """As nccl-tests count: the bus bandwidth is what each link carries, whatever the number of ranks."""
    assert tried.reduce_s is not None
    bus = _bus(tried, ranks)
    return f"{tried.size_bytes >> 20} MiB in {tried.reduce_s * 1e3:.3g} ms, bus bandwidth {bus / 1e9:.3g} GB/s"


def _bus(tried: Tried, ranks: int) -> float:
    assert tried.reduce_s is not None
    return 2 * (ranks - 1) / ranks * tried.size_bytes / max(tried.reduce_s, 1e-9)


def all_reduce_here(
    machine: Machine,
    *,
    asked: bool | None,
    environment: Mapping[str, str],
    make: Callable[..., Runner] | None = None,
    peak: Peak | None = None,
) -> Iterator[Diagnosis]:
    """Try it on the GPUs of a machine where there are several, or where it is asked for. make: `runner`, or another.

    peak: what the way between the GPUs should carry.
    """
    torch = machine.torch
    is_usable = torch is not None and bool(torch.version) and torch.distributed
    gpus = torch.devices if torch is not None and is_usable and not torch.fault else 0
    if asked is False or (asked is None and gpus < _SEVERAL):
        return
    if not is_usable:
        message = "cannot be tried: there is no torch here that could do it"
        yield Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix="see torch, above")
        return
    on_gpus = gpus >= _SEVERAL
    ranks = gpus if on_gpus else _SEVERAL
    loopback = next((each.name for each in machine.facts.interfaces if each.loopback), "")
    run = (make or runner)(machine.facts.python, ranks=ranks, on_gpus=on_gpus, loopback=loopback)
    visible = {gpu.index: gpu.name for gpu in machine.facts.gpus}
    names = list(visible.values()) if on_gpus and len(visible) == ranks else []
    yield from judge_all_reduce(
        run, ranks=ranks, on_gpus=on_gpus, environment=environment, peak=peak if on_gpus else None, gpus=names
    )


def runner(python: str, *, ranks: int, on_gpus: bool, loopback: str, limit_s: float = LIMIT_S) -> Runner:
    """One that starts real ranks on this machine. loopback: the interface over which they meet."""

    def run(more: Mapping[str, str]) -> Tried:
        order = {"device": "cuda" if on_gpus else "cpu", "ranks": ranks, "limit_s": limit_s}
        over = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
        try:
            done = subprocess.run(
                [python, "-P", "-m", "jobs.all_reduce"],
                input=json.dumps(order),
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, **over, **more},
                timeout=limit_s + _START_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Tried(ok=False, hung=True, said=f"importing torch takes more than {_START_LIMIT_S:g} s")
        except OSError as error:
            return Tried(ok=False, said=str(error))
        lines, errors = done.stdout.splitlines(), done.stderr.strip().splitlines()
        if done.returncode or not lines:
            return Tried(ok=False, said=errors[-1] if errors else f"the test ended with exit code {done.returncode}")
        return Tried(**json.loads(lines[-1]))

    return run
