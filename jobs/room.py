"""Whether what is to be saved has room, found out before the training and not at the first save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jobs.durable import free_bytes, reserve
from jobs.folders import complete
from jobs.state import TrainingState
from jobs.whole import NO_SPACE, SMALL_BYTES

SNAPSHOTS = 2
"""How many snapshots there are in the memory of a node at most: one, and the next while it is written."""
ANSWER_S = 60.0
"""How long a file system may take to answer at the start."""
MEMINFO = Path("/proc/meminfo")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class NoAnswerError(OSError):
    """A file system hangs."""


def expected_bytes(state: TrainingState, make_optimizer: MakeOptimizer) -> int:
    """Size of a checkpoint, without the small files: also before the optimizer has made its state, at its first step.

    What that will be is seen from an optimizer of the same kind for parameters of two elements per axis.
    """
    if state.optimizer.state:
        return sum(_size(tensor) for tensor in state.tensors().values())
    size_bytes = sum(_size(tensor) for tensor in state.net.state_dict().values())
    real = [parameter for parameter in state.net.parameters() if parameter.requires_grad]
    small = [nn.Parameter(torch.zeros([min(2, n) for n in each.shape], dtype=each.dtype)) for each in real]
    for parameter in small:
        parameter.grad = parameter.detach().clone()
    optimizer = make_optimizer(small)
    optimizer.step()
    for parameter, like in zip(small, real, strict=True):
        for slot in optimizer.state.get(parameter, {}).values():
            if isinstance(slot, Tensor):
                as_large = slot.shape == parameter.shape
                size_bytes += (like.numel() if as_large else slot.numel()) * slot.dtype.itemsize
    return size_bytes


def check_disk(folder: Path, size_bytes: int, *, keep: int, probe: Path) -> str:
    """Raise OSError, with both numbers, where not even one checkpoint fits; returns what is to be said otherwise.

    The room for one is set aside in `probe` and given back: so a quota is seen too, where the file system can do that.
    """
    wanted = size_bytes + SMALL_BYTES
    free = free_bytes(folder)
    if free < wanted:
        raise OSError(
            f"{NO_SPACE}: a checkpoint takes {wanted:,} bytes, and {free:,} are free; make room there, or move the runs"
        )
    try:
        with probe.open("xb") as file:
            reserve(file.fileno(), wanted)
    except OSError as error:
        raise OSError(f"a checkpoint takes {wanted:,} bytes, which are not to be had: {error.strerror}") from error
    finally:
        probe.unlink(missing_ok=True)
    missing = keep + 1 - len(complete(folder))
    if missing * wanted <= free:
        return ""
    return (
        f"{folder} has {free:,} bytes free; with checkpoint.keep: {keep} it will take {missing * wanted:,} more "
        f"(one is written before an old one goes): a save may fail"
    )


def check_memory(folder: Path, size_bytes: int, *, meminfo: Path = MEMINFO) -> None:
    """Raise OSError, with both numbers, where snapshots do not fit: into the file system in memory, or the memory.

    What they take is two of them, and the copy that is made before one is written.
    """
    wanted = SNAPSHOTS * (size_bytes + SMALL_BYTES)
    free, available = free_bytes(folder), available_bytes(meminfo)
    advice = "leave checkpoint.memory_every out, or give the node more"
    if free < wanted:
        told = f"{SNAPSHOTS} snapshots take {wanted:,} bytes, and {folder} has {free:,} free; {advice}"
        raise OSError(f"{NO_SPACE}: {told}")
    if available < wanted + size_bytes:
        raise OSError(
            f"{SNAPSHOTS} snapshots and a copy take {wanted + size_bytes:,} bytes of memory, and {available:,} are "
            f"available; {advice}"
        )


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """Memory that can be used without swapping."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def answered(action: Callable[[], None], what: str) -> None:
    """Do something with a file system that may hang. Raises what it raises, and NoAnswerError after ANSWER_S."""
    errors: list[OSError] = []

    def run() -> None:
        try:
            action()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if thread.is_alive():
        raise NoAnswerError(f"{what} does not answer, {ANSWER_S:.0f} s: does its file system hang?")
    if errors:
        raise errors[0]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
