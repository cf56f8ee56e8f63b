"""Images in folders, one folder per class."""

from __future__ import annotations

import importlib.util
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.data.base import Batch, Data, DataError
from jobs.registry import OptionError, dataset

PATHS = ("root", "eval_root")
"""Read by `launch`, which looks for the folders before a run begins."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet by colour, pixels from 0 to 1: what networks that were trained there expect."""
BOUNDS = {"eval_share": (0, 1), "size": (1, None)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
HAS = ({"task": "classification", "shape": (3, "=size", "=size")},)
"""What a sample is, for the check, which reads it from here: `=` names an option."""
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of a random crop: its share of the area, and width by height."""
CROPS = 10
"""How many are tried until one lies inside the image."""
NAMED = 10
"""How many of the classes a message lists."""


@dataset("image_folder")
def image_folder(
    *, root: str, eval_root: str | None = None, eval_share: float = 0.1, size: int = 224, augment: bool = False
) -> ImageFolder:
    """Images in a folder per class, `root/CLASS/*.png` or `.jpg`, 3 x size x size; classes by the order of their names.

    Args:
        root: Folder of the folders; relative to the workdir.
        eval_root: Folder of the held-out images, with the same classes.
        eval_share: Without eval_root, the share of the images of each class that is held out.
        size: Height and width in pixels that images are brought to: the shorter side is scaled, the rest cut off.
        augment: Training images are cropped and mirrored at random, as is usual for ImageNet.
    """
    if not 0 <= eval_share < 1:
        raise OptionError(f"data.eval_share: {eval_share} is no share; write 0 to below 1")
    return ImageFolder(
        Path(root).expanduser(), Path(eval_root).expanduser() if eval_root else None, eval_share, size, augment
    )


@dataclass(frozen=True)
class ImageFolder:
    """Folders of images. Nothing is brought or copied; each image is read when it is its turn."""

    root: Path
    eval_root: Path | None
    eval_share: float
    size: int
    augment: bool

    def prepare(self) -> None:
        """Look whether there are folders of images. Raises DataError."""
        if importlib.util.find_spec("PIL") is None:
            raise DataError("data: image_folder reads images with Pillow, which is not installed: pip install pillow")
        for root, key in ((self.root, "data.root"), (self.eval_root, "data.eval_root")):
            if root is not None:
                list_classes(root, key)

    def load(self) -> Data:
        """List the images. Raises DataError where there are none."""
        by_class = list_images(self.root, "data.root")
        classes = sorted(by_class)
        if self.eval_root is not None:
            held_out = list_images(self.eval_root, "data.eval_root")
            if strange := sorted(held_out.keys() - by_class.keys()):
                raise DataError(
                    f"data.eval_root: {self.eval_root} has classes that {self.root} has not: {_few(strange)}"
                )
        else:
            held_out = {name: files[: int(len(files) * self.eval_share)] for name, files in by_class.items()}
            by_class = {name: files[len(held_out[name]) :] for name, files in by_class.items()}
        train = Images(classes, by_class, size=self.size, augment=self.augment)
        evaluation = Images(classes, held_out, size=self.size)
        return Data(train, evaluation if len(evaluation) else None, classes=len(classes))


class Images:
    """Images by index, with the number of their class."""

    def __init__(
        self, classes: Sequence[str], files: dict[str, list[str]], *, size: int, augment: bool = False
    ) -> None:
        paths = [(os.fsencode(path), number) for number, name in enumerate(classes) for path in files.get(name, ())]
        # arrays, for there may be millions: loader processes share them, where each object would be copied when it is
        # looked at
        self._paths = np.array([path for path, _ in paths], dtype=np.bytes_)
        self._classes = np.array([number for _, number in paths], dtype=np.int64)
        self._size, self._augment = size, augment
        self.draws = augment
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int, /) -> Batch:
        """(3, size, size) and the class. Raises DataError for a file that is no image."""
        from PIL import Image, UnidentifiedImageError

        path = os.fsdecode(bytes(self._paths[index]))
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: cannot be read as an image ({type(error).__name__}: {error})") from None
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=self._box(*image.size))
        if self._augment and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return pixels.sub_(self._mean).div_(self._std).contiguous(), torch.tensor(self._classes[index])

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """What is cut out of an image, before it is scaled: (left, upper, right, lower) in pixels."""
        if self._augment:
            for _ in range(CROPS):
                area = width * height * random.uniform(*SCALE)
                ratio = math.exp(random.uniform(*map(math.log, RATIO)))
                wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
                if wide <= width and high <= height:
                    left, upper = random.uniform(0, width - wide), random.uniform(0, height - high)
                    return left, upper, left + wide, upper + high
        side = min(width, height)
        left, upper = (width - side) / 2, (height - side) / 2
        return left, upper, left + side, upper + side


def list_images(root: Path, key: str) -> dict[str, list[str]]:
    """The images of each class, by name. Raises DataError, with the key, where there is no folder with images."""
    images = {folder.name: _images(folder) for folder in list_classes(root, key)}
    if empty := [name for name, files in images.items() if not files]:
        kinds = " ".join(ENDINGS)
        raise DataError(f"{key}: {root.absolute()} has folders without images ({kinds}): {_few(empty)}")
    return images


def list_classes(root: Path, key: str) -> list[Path]:
    """The folder of each class. Raises DataError, with the key, where there is none."""
    if not root.is_dir():
        raise DataError(f"{key}: there is no folder {root.absolute()}")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{key}: {root.absolute()} has no folders; each class has one, with its images in it")
    return folders


def _images(folder: Path) -> list[str]:
    found = (f"{place}/{name}" for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.lower().endswith(ENDINGS))


def _few(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
