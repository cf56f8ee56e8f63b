"""Small photographs of ten kinds of things."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jobs.data.base import Batch, Data, DataError
from jobs.data.download import RemoteFile, cache_folder, download, locked, part_of
from jobs.data.draws import uniform
from jobs.registry import OptionError, dataset

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = RemoteFile("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", is_of_content=False)
INSIDE = "cifar-10-batches-bin"
"""The folder in the archive."""
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
HELD_OUT = ("test_batch.bin",)
BOUNDS = {"crop": (0, 32)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
HAS = ({"task": "classification", "shape": (3, 32, 32), "classes": 10},)
"""What a sample is, for the check, which reads it from here: `=` names an option."""
SIDE = 32
_ROW_BYTES = 1 + 3 * SIDE * SIDE
"""A label, then the red, the green and the blue pixels."""
MEAN = (125.307, 122.950, 113.865)
STD = (62.993, 62.089, 66.705)
"""Of the pixels (0 to 255) of the training images, by colour."""


@dataset("cifar10")
def cifar10(*, root: str | None = None, crop: int = 0, flip: bool = False) -> Cifar10:
    """Photographs of ten kinds of things, 3 x 32 x 32 pixels: 50,000 and 10,000. Downloaded once (170 MB), and checked.

    Args:
        root: Folder of the files. Default: launcher/cifar10 in the user's cache folder.
        crop: Training images are moved by up to so many pixels in each direction, at random. 4 is usual.
        flip: Half of the training images are mirrored, at random.
    """
    if not 0 <= crop < SIDE:
        raise OptionError(f"data.crop: {crop} pixels, and an image has {SIDE}; write 0 to {SIDE - 1}")
    mirrors = tuple(os.environ.get("LAUNCH_CIFAR10_MIRRORS", "").split()) or MIRRORS
    return Cifar10(Path(root).expanduser() if root else cache_folder() / "cifar10", mirrors, crop, flip)


@dataclass(frozen=True)
class Cifar10:
    """The files of the binary version in a folder."""

    home: Path
    mirrors: tuple[str, ...]
    """Where the archive comes from, tried in order."""
    crop: int = 0
    flip: bool = False

    def is_ready(self) -> bool:
        """Whether all files are there."""
        return all((self.home / name).exists() for name in TRAIN + HELD_OUT)

    def prepare(self) -> None:
        """Download and unpack what is missing. Raises `jobs.data.download.DownloadError` when no mirror serves it."""
        if self.is_ready():
            return
        download([ARCHIVE], self.home, self.mirrors)
        archive = self.home / ARCHIVE.name
        with locked(self.home):
            if self.is_ready():
                return
            with tarfile.open(archive) as packed:
                for name in TRAIN + HELD_OUT:
                    _unpack(packed, name, self.home / name)
            archive.unlink()

    def load(self) -> Data:
        """Read the files into memory."""
        train, held_out = self._read(TRAIN), self._read(HELD_OUT)
        return Data(Photographs(*train, crop=self.crop, flip=self.flip), Photographs(*held_out), classes=10)

    def _read(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        raw = np.concatenate([_rows(self.home / name) for name in names])
        images = torch.from_numpy(raw[:, 1:].reshape(-1, 3, SIDE, SIDE).copy())
        return images, torch.from_numpy(raw[:, 0].astype(np.int64))


class Photographs:
    """Images in memory; those to train on are moved and mirrored at random, by the seed of the epoch."""

    draws = False
    """Nothing of a global generator."""

    def __init__(self, images: Tensor, labels: Tensor, *, crop: int = 0, flip: bool = False) -> None:
        self._images, self._labels, self._crop, self._flip = images, labels, crop, flip
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int, /) -> Batch:
        images, labels = self.drawn(torch.tensor([index]), seed=0)
        return images[0], labels[0]

    def drawn(self, indices: Tensor, seed: int) -> Batch:
        """These images, each as this seed moves and mirrors it."""
        images = self._images[indices]
        if self._crop or self._flip:
            numbers = torch.from_numpy(uniform(seed, indices, 3))
            images = _moved(images, numbers, crop=self._crop, flip=self._flip)
        return images.float().sub_(self._mean).div_(self._std), self._labels[indices]


def _moved(images: Tensor, numbers: Tensor, *, crop: int, flip: bool) -> Tensor:
    """Each image moved by up to `crop` pixels down and right, black where it has none, and mirrored or not.

    numbers: three for each image, from 0 to below 1.
    """
    height, width = images.shape[-2:]
    down, right = ((numbers[:, k] * (2 * crop + 1)).long() for k in range(2))
    rows = down[:, None] + torch.arange(height)
    columns = right[:, None] + torch.arange(width)
    if flip:
        columns = torch.where(numbers[:, 2, None] < 0.5, columns, columns.flip(1))
    padded = torch.nn.functional.pad(images, (crop,) * 4)
    channels = torch.arange(images.shape[1])
    return padded[
        torch.arange(len(images))[:, None, None, None],
        channels[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _unpack(packed: tarfile.TarFile, name: str, path: Path) -> None:
    content = packed.extractfile(f"{INSIDE}/{name}")
    assert content is not None, "the MD5 of the archive is that of the right one"
    part = part_of(path)
    with content, part.open("wb") as file:
        while chunk := content.read(1 << 20):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _rows(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    raw = np.fromfile(path, np.uint8)
    if not len(raw) or len(raw) % _ROW_BYTES:
        raise DataError(
            f"{path}: {len(raw)} bytes are no images of the binary version of CIFAR-10 (each has {_ROW_BYTES}); remove "
            f"the file, and it is downloaded again"
        )
    return raw.reshape(-1, _ROW_BYTES)
