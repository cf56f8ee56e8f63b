from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.data.base import DataError
from jobs.data.image_folder import image_folder

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes; images of several sizes, of one colour each: class 0 is red, class 1 is blue."""
    for name, colour in (("apple", (255, 0, 0)), ("berry", (0, 0, 255))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for k in range(10):
            ending = "png" if k % 2 else "JPG"
            Image.new("RGB", (20 + k, 30 - k), colour).save(tmp_path / "pictures" / name / f"{k}.{ending}")
    return tmp_path / "pictures"


def test_a_folder_per_class_is_a_dataset(pictures: Path) -> None:
    source = image_folder(root=str(pictures), size=16, eval_share=0.2)
    source.prepare()
    data = source.load()
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (16, 4)
    for samples in (data.train, data.evaluation):
        for k in range(len(samples)):
            image, label = samples[k]
            assert image.shape == (3, 16, 16)
            assert image.mean(dim=(1, 2)).argmax() == (0, 2)[int(label)]


def test_held_out_images_may_have_a_folder_of_their_own(pictures: Path) -> None:
    data = image_folder(root=str(pictures), eval_root=str(pictures), size=8).load()
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (20, 20)


def test_an_image_is_scaled_and_its_middle_cut_out(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    image = Image.new("RGB", (64, 32), (0, 0, 0))
    image.paste((255, 255, 255), (16, 0, 48, 32))  # white in the middle, black left and right
    image.save(tmp_path / "one" / "a.png")
    pixels, _ = image_folder(root=str(tmp_path), size=16, eval_share=0).load().train[0]
    assert (pixels > 1).float().mean() == 1


def test_augmented_images_are_drawn_by_the_seeded_generators(pictures: Path) -> None:
    samples = image_folder(root=str(pictures), size=12, augment=True).load().train
    noisy = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for path in pictures.rglob("*.*"):
        Image.fromarray(noisy).save(path)
    random.seed(5)
    first = samples[0][0]
    other = samples[0][0]
    random.seed(5)
    assert torch.equal(samples[0][0], first)
    assert not torch.equal(first, other)
    assert first.shape == (3, 12, 12)


def test_what_is_wrong_with_a_folder_of_images_is_said(tmp_path: Path, pictures: Path) -> None:
    def fails(**options: Any) -> str:
        with pytest.raises(DataError) as caught:
            image_folder(**options).load().train[0]
        return str(caught.value)

    assert fails(root=str(tmp_path / "nowhere")) == f"data.root: there is no folder {tmp_path / 'nowhere'}"
    assert "has no folders; each class has one" in fails(root=str(pictures / "apple"))
    (tmp_path / "held out" / "cherry").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "held out" / "cherry" / "a.png")
    assert fails(root=str(pictures), eval_root=str(tmp_path / "held out")).endswith(": cherry")
    (pictures / "cherry").mkdir()
    assert "has folders without images" in fails(root=str(pictures))
    (pictures / "cherry").rmdir()
    for path in (pictures / "apple").iterdir():
        path.write_bytes(b"no image")
    assert "cannot be read as an image (UnidentifiedImageError" in fails(root=str(pictures))


def test_without_pillow_it_is_said_what_to_install(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install pillow"):
        image_folder(root=str(pictures)).prepare()
