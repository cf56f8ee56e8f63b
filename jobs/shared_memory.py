"""Whether the batches of all loader processes of a node fit into its shared memory, found out before the training.

Loader processes hand their batches over in /dev/shm. A container has 64 MiB of it unless it was given more, and where
it is full a loader process dies of a bus error, or waits for ever, often not before the second epoch.
"""

from __future__ import annotations

import os
from pathlib import Path

from jobs.data.base import Batch
from launcher.wording import count

SHARED_MEMORY = Path("/dev/shm")
_MIB = 1 << 20


class SharedMemoryError(RuntimeError):
    """The batches do not fit; says what would."""

    launch_plain = True


def size_bytes(batch: Batch) -> int:
    """What a batch takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in batch)


def check_shared_memory(
    batch_bytes: int, *, loader_workers: int, prefetch: int, ranks: int, folder: Path = SHARED_MEMORY
) -> None:
    """Raise SharedMemoryError where the batches that wait, and the one that is trained on, do not fit.

    ranks: on this node, each with its loader processes. Without any, nothing is needed.
    """
    if not loader_workers:
        return
    there = os.statvfs(folder)
    free_bytes = there.f_bavail * there.f_frsize
    per_batch = max(1, batch_bytes * ranks)
    wanted = (loader_workers * prefetch + 1) * per_batch
    if wanted <= free_bytes:
        return
    product = (
        f"data.loader_workers {loader_workers} x data.prefetch {prefetch} batches of {batch_bytes / _MIB:,.1f} MiB"
        f" on {count(ranks, 'rank')}"
    )
    raise SharedMemoryError(
        f"{product} take {wanted / _MIB:,.0f} MiB of {folder}, the one in use included, and"
        f" {free_bytes / _MIB:,.0f} MiB are free (of {there.f_blocks * there.f_frsize / _MIB:,.0f});"
        f" {_what_fits(free_bytes // per_batch - 1, loader_workers)}, or give the container more (docker.shm_size)"
    )


def _what_fits(batches: int, loader_workers: int) -> str:
    """Keys with which so many batches wait at most."""
    if batches < 1:
        return "set data.loader_workers to 0"
    if batches >= loader_workers:
        return f"set data.prefetch to {batches // loader_workers}"
    return f"set data.loader_workers to {batches} and data.prefetch to 1"
