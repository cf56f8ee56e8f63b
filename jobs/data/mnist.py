"""Handwritten digits."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jobs.data.base import Data, TensorSamples
from jobs.data.download import RemoteFile, cache_folder, download
from jobs.registry import dataset

SAMPLE = Path(__file__).parent / "mnist_sample"
MEAN, STD = 33.3285, 78.565
"""Of the pixels (0 to 255) of the training images."""
HAS = ({"task": "classification", "shape": (1, 28, 28), "classes": 10},)
"""What a sample is, for the check, which reads it from here: `=` names an option."""

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://systemds.apache.org/assets/datasets/mnist/",
)
FILES = (
    RemoteFile("train-images-idx3-ubyte.gz", "6bbc9ace898e44ae57da46a324031adb"),
    RemoteFile("train-labels-idx1-ubyte.gz", "a25bea736e30d166cdddb491f175f624"),
    RemoteFile("t10k-images-idx3-ubyte.gz", "2646ac647ad5339dbf082846283269ea"),
    RemoteFile("t10k-labels-idx1-ubyte.gz", "27ae3e4e09519cfbb04c329615203637"),
)


@dataset("mnist")
def mnist(*, full: bool = False, root: str | None = None) -> Mnist:
    """Handwritten digits, 28 x 28 pixels. Without options a sample of 10,000 + 2,000 that is shipped with the package.

    Args:
        full: All 60,000 + 10,000 digits; downloaded once, checked, and kept in `root`.
        root: Folder of the full files. Default: launcher/mnist in the user's cache folder.
    """
    if not full:
        return Mnist(SAMPLE, ())
    mirrors = tuple(os.environ.get("LAUNCH_MNIST_MIRRORS", "").split()) or MIRRORS
    return Mnist(Path(root).expanduser() if root else cache_folder() / "mnist", mirrors)


@dataclass(frozen=True)
class Mnist:
    """The four files in a folder, in the original gzipped IDX format."""

    folder: Path
    mirrors: tuple[str, ...]
    """Where the full files come from, tried in order. Empty = the sample, nothing is downloaded."""

    @property
    def home(self) -> Path | None:
        """Where the full files are brought."""
        return self.folder if self.mirrors else None

    def is_ready(self) -> bool:
        """Whether all files are there."""
        return all((self.folder / file.name).exists() for file in FILES)

    def prepare(self) -> None:
        """Download what is missing. Raises `jobs.data.download.DownloadError` when no mirror serves a file."""
        if self.mirrors:
            download(FILES, self.folder, self.mirrors, hint=", or use the shipped sample (data.full=false)")

    def load(self) -> Data:
        """Read the four files into memory."""
        return Data(self._read("train"), self._read("t10k"), classes=10)

    def _read(self, part: str) -> TensorSamples:
        images = read_idx(self.folder / f"{part}-images-idx3-ubyte.gz").unsqueeze(1)
        labels = read_idx(self.folder / f"{part}-labels-idx1-ubyte.gz").long()
        return TensorSamples(images, labels, mean=MEAN, std=STD)


def read_idx(path: Path) -> Tensor:
    """Read a gzipped IDX file of bytes. Raises ValueError where it is something else."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path}: not an IDX file of bytes (it starts with {raw[:4].hex()})")
    axes = raw[3]
    sizes = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(sizes).copy())
