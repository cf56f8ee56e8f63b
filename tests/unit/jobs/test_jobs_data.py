from __future__ import annotations

import functools
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.data import cifar10 as cifar
from jobs.data.base import DataError
from jobs.data.cifar10 import cifar10
from jobs.data.download import RemoteFile
from jobs.data.draws import uniform
from jobs.loader import Fetch, Loader
from jobs.registry import OptionError
from jobs.sampler import Sampler


def test_draws_of_a_sample_depend_on_seed_and_index_alone() -> None:
    all_of_them = uniform(7, torch.arange(100), 3)
    some = torch.tensor([42, 3, 99])
    assert np.array_equal(uniform(7, some, 3), all_of_them[some.numpy()])
    assert not np.isin(uniform(8, torch.arange(100), 3), all_of_them).any()


def test_draws_are_spread_evenly_and_independent() -> None:
    numbers = uniform(0, torch.arange(50_000), 2)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert counts.min() > 0.95 * numbers.size / 20
    for one, other in ((numbers[:, 0], numbers[:, 1]), (numbers[1:, 0], numbers[:-1, 0])):
        assert abs(float(np.mean((one - 0.5) * (other - 0.5)))) < 0.02 / 12


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """A server of files below `mirror`."""
    (tmp_path / "mirror").mkdir()
    handler = functools.partial(Quiet, directory=str(tmp_path / "mirror"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def photographs(tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The archive on the mirror, with 4 images in each of its files: label, then pixels."""
    rows = np.random.default_rng(0).integers(0, 256, (24, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    archive = tmp_path / "mirror" / cifar.ARCHIVE.name
    with tarfile.open(archive, "w:gz") as packed:
        for k, name in enumerate((*cifar.TRAIN, *cifar.HELD_OUT, "readme.html")):
            raw = rows[4 * k : 4 * k + 4].tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(raw)
            packed.addfile(member, io.BytesIO(raw))
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(cifar, "ARCHIVE", RemoteFile(cifar.ARCHIVE.name, digest, is_of_content=False))
    monkeypatch.setenv("LAUNCH_CIFAR10_MIRRORS", mirror)
    return rows


def test_cifar10_is_downloaded_unpacked_and_read(
    tmp_path: Path, photographs: np.ndarray[Any, np.dtype[np.uint8]]
) -> None:
    source = cifar10(root=str(tmp_path / "data"))
    assert not source.is_ready()
    source.prepare()
    assert source.is_ready()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        ".lock",
        *sorted((*cifar.TRAIN, *cifar.HELD_OUT)),
    ]
    data = source.load()
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (20, 4)
    image, label = data.train[5]
    assert int(label) == photographs[5, 0]
    pixels = image * torch.tensor(cifar.STD).view(3, 1, 1) + torch.tensor(cifar.MEAN).view(3, 1, 1)
    assert torch.allclose(pixels, torch.from_numpy(photographs[5, 1:].reshape(3, 32, 32)).float(), atol=1e-3)
    (tmp_path / "mirror" / cifar.ARCHIVE.name).unlink()
    source.prepare()  # nothing is asked for again


def test_another_archive_is_not_taken_for_cifar10(
    tmp_path: Path, photographs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "ARCHIVE", RemoteFile(cifar.ARCHIVE.name, "0" * 32, is_of_content=False))
    with pytest.raises(RuntimeError, match=f"the wrong content: MD5 .* instead of {'0' * 32}"):
        cifar10(root=str(tmp_path / "data")).prepare()


def test_a_file_that_is_none_of_cifar10_is_named(tmp_path: Path) -> None:
    for name in (*cifar.TRAIN, *cifar.HELD_OUT):
        (tmp_path / name).write_bytes(b"abc")
    with pytest.raises(DataError, match=r"data_batch_1.bin: 3 bytes are no images"):
        cifar10(root=str(tmp_path)).load()


def test_an_image_is_moved_and_mirrored_by_its_draws() -> None:
    """Against torch's own padding, slicing and flipping, image by image."""
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    numbers = torch.from_numpy(uniform(0, torch.arange(40), 3))
    moved = cifar._moved(images, numbers, crop=4, flip=True)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for k in range(40):
        down, right = int(numbers[k, 0] * 9), int(numbers[k, 1] * 9)
        wanted = padded[k, :, down : down + 32, right : right + 32]
        assert torch.equal(moved[k], wanted if numbers[k, 2] < 0.5 else wanted.flip(2))
    assert torch.equal(cifar._moved(images, numbers, crop=0, flip=False), images)


def make_photographs(**options: Any) -> cifar.Photographs:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return cifar.Photographs(images, torch.arange(64), **options)


def test_an_augmented_image_is_the_same_in_any_batch_and_another_in_the_next_epoch() -> None:
    """Whatever the number of ranks and loader processes: it depends on (seed, epoch, index)."""
    fetch = Fetch(make_photographs(crop=4, flip=True), seed=1)
    first, _ = fetch[0, torch.arange(64)]
    assert torch.equal(fetch[0, torch.tensor([9, 33])][0], first[[9, 33]])
    again, _ = fetch[1, torch.arange(64)]
    assert sum(torch.equal(*pair) for pair in zip(first, again, strict=True)) < 5
    other, _ = Fetch(make_photographs(crop=4, flip=True), seed=2)[0, torch.arange(64)]
    assert sum(torch.equal(*pair) for pair in zip(first, other, strict=True)) < 5


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_augmented_batches_are_the_same_on_one_rank_and_on_two_and_after_a_resume(loader_workers: int) -> None:
    samples = make_photographs(crop=4, flip=True)

    def images(world_size: int, *, samples_seen: int = 0) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for rank in range(world_size):
            sampler = Sampler(num_samples=64, global_batch_size=8, seed=0, rank=rank, world_size=world_size)
            loader = Loader(samples, sampler, samples_seen=samples_seen, loader_workers=loader_workers)
            for batch, labels in loader.take((64 - samples_seen) // 8):
                found.update(zip(labels.tolist(), batch, strict=True))
            loader.close()
        return found

    whole = images(1)
    assert whole.keys() == set(range(64))
    for others in (images(2), images(1, samples_seen=24)):
        assert all(torch.equal(whole[label], image) for label, image in others.items())


def test_held_out_images_are_left_as_they_are(tmp_path: Path, photographs: object) -> None:
    source = cifar10(root=str(tmp_path / "data"), crop=4, flip=True)
    source.prepare()
    data, plain = source.load(), cifar10(root=str(tmp_path / "data")).load()
    assert data.evaluation is not None
    assert plain.evaluation is not None
    assert torch.equal(data.evaluation[1][0], plain.evaluation[1][0])


def test_a_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(OptionError, match=r"data.crop: 32 pixels"):
        cifar10(crop=32)
