"""F008: batches of loader processes that do not fit into /dev/shm are refused before the training."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jobs import shared_memory
from jobs.data.base import TensorSamples
from jobs.loader import Loader
from jobs.sampler import Sampler
from jobs.shared_memory import SharedMemoryError, check_shared_memory, size_bytes

MIB = 1 << 20


@pytest.fixture
def of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB, of which 60 are free: what Docker gives."""
    found = SimpleNamespace(f_bavail=60 * 256, f_blocks=64 * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: found)


@pytest.mark.usefixtures("of_a_container")
def test_f008_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(SharedMemoryError) as caught:
        check_shared_memory(5 * MIB, loader_workers=4, prefetch=2, ranks=2)
    assert str(caught.value) == (
        "data.loader_workers 4 x data.prefetch 2 batches of 5.0 MiB on 2 ranks take 90 MiB of /dev/shm, the one in use "
        "included, and 60 MiB are free (of 64); set data.prefetch to 1, or give the container more (docker.shm_size)"
    )


@pytest.mark.usefixtures("of_a_container")
@pytest.mark.parametrize(
    ("batch_mib", "advised"),
    [
        (8, "set data.loader_workers to 2 and data.prefetch to 1"),
        (14, "set data.loader_workers to 1 and data.prefetch to 1"),
        (20, "set data.loader_workers to 0"),
    ],
)
def test_f008_fewer_processes_where_even_one_batch_of_each_is_too_much(batch_mib: int, advised: str) -> None:
    with pytest.raises(SharedMemoryError, match=advised):
        check_shared_memory(batch_mib * MIB, loader_workers=4, prefetch=2, ranks=2)


@pytest.mark.usefixtures("of_a_container")
def test_f008_what_is_advised_fits() -> None:
    check_shared_memory(5 * MIB, loader_workers=4, prefetch=1, ranks=2)
    check_shared_memory(8 * MIB, loader_workers=2, prefetch=1, ranks=2)
    check_shared_memory(14 * MIB, loader_workers=1, prefetch=1, ranks=2)
    check_shared_memory(999 * MIB, loader_workers=0, prefetch=2, ranks=2)


@pytest.mark.usefixtures("of_a_container")
def test_f008_a_loader_looks_at_a_batch_of_its_own() -> None:
    samples = TensorSamples(torch.zeros(64, MIB // 4), torch.zeros(64))
    sampler = Sampler(num_samples=64, global_batch_size=16, seed=0)
    assert size_bytes(Loader(samples, sampler).peek()) == 16 * MIB + 16 * 4
    Loader(samples, sampler, loader_workers=1).check_room(1)
    with pytest.raises(SharedMemoryError, match=r"batches of 16\.0 MiB on 1 rank take 80 MiB"):
        Loader(samples, sampler, loader_workers=2).check_room(1)


def test_f008_the_folder_is_the_one_that_torch_uses(tmp_path: Path) -> None:
    assert Path("/dev/shm") == shared_memory.SHARED_MEMORY
    check_shared_memory(1, loader_workers=1, prefetch=1, ranks=1, folder=tmp_path)
