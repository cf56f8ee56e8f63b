from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import random
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset, TensorDataset

from jobs.data import cifar10 as cifar
from jobs.data.base import Data, DataError
from jobs.data.cifar10 import cifar10
from jobs.data.download import RemoteFile
from jobs.data.draws import uniform
from jobs.data.given import Given
from jobs.data.image_folder import image_folder
from jobs.data.mnist import mnist
from jobs.data.once import prepare_once
from jobs.data.synthetic import synthetic
from jobs.data.text import text
from jobs.data.windows import TokenWindows
from jobs.loader import Fetch, Loader
from jobs.registry import OptionError
from jobs.sampler import Sampler
from jobs.world import Meeting, PeerError, World

Image = pytest.importorskip("PIL.Image")


# ------------------------------------------------------------------------------------------------------------ draws


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


# ---------------------------------------------------------------------------------------------------------- cifar10


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


# ----------------------------------------------------------------------------------------------------- image_folder


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


# ------------------------------------------------------------------------------------------------------------- text


def make_text(path: Path | str, tmp_path: Path, **options: Any) -> Data:
    source = text(path=str(path), cache=str(tmp_path / "cache"), **options)
    source.prepare()
    assert source.is_ready()
    return source.load()


def all_inputs(samples: Any) -> bytes:
    return bytes(torch.cat([samples[k][0] for k in range(len(samples))]).tolist())


def test_windows_lie_end_to_end_and_targets_are_the_next_tokens() -> None:
    samples = TokenWindows(np.arange(14, dtype=np.uint16), 4)
    assert [[part.tolist() for part in samples[k]] for k in range(len(samples))] == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[4, 5, 6, 7], [5, 6, 7, 8]],
        [[8, 9, 10, 11], [9, 10, 11, 12]],
    ]
    assert len(TokenWindows(np.arange(13, dtype=np.uint16), 4)) == 3
    assert len(TokenWindows(np.arange(4, dtype=np.uint16), 4)) == 0


def test_the_bytes_of_all_files_are_one_row_of_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_bytes("zwölf".encode())
    (folder / "a.txt").write_bytes(b"ten eleven ")
    (folder / "more" / "c.md").write_bytes(b"#" * 200)
    data = make_text(folder, tmp_path, context=4, pattern="*.txt", eval_share=0)
    assert all_inputs(data.train) == b"ten eleven \0zwo\xcc"[:12] + "zwölf".encode()[:4]
    assert data.evaluation is None
    assert len(all_inputs(make_text(folder, tmp_path, context=4, eval_share=0).train)) > 200
    assert len(make_text(f"{folder}/**/*.md", tmp_path, context=50, eval_share=0).train) == 4
    assert len(make_text(folder / "a.txt", tmp_path, context=2, eval_share=0).train) == 5


def test_the_last_share_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"t" * 800 + b"e" * 199)
    data = make_text(tmp_path / "a.txt", tmp_path, context=10, eval_share=0.2)
    assert data.evaluation is not None
    assert set(all_inputs(data.train)) == {ord("t")}
    assert set(all_inputs(data.evaluation)) == {ord("e")}


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "</s>": 1, **{f"w{k}": k + 2 for k in range(300)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_text("w1 w299\nw7 other w0 ")
    data = make_text(tmp_path / "texts", tmp_path, context=5, eval_share=0, tokenizer=str(tmp_path))
    assert data.train[0][0].tolist() == [3, 301, 9, 0, 2]
    assert data.train[1][0].tolist() == [1, 3, 301, 9, 0]
    assert json.loads(next((tmp_path / "cache").rglob("tokens.json")).read_text())["vocabulary"] == 302


def test_text_that_has_changed_is_prepared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"old " * 50)
    source = text(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"), context=4, eval_share=0)
    source.prepare()
    before = source.load()
    (tmp_path / "a.txt").write_bytes(b"newer" * 50)
    assert not source.is_ready()
    capsys.readouterr()
    source.prepare()
    assert "has changed since its tokens were made" in capsys.readouterr().out
    assert all_inputs(source.load().train)[:5] == b"newer"
    assert all_inputs(before.train)[:4] == b"old "  # who has them open goes on
    source.prepare()
    assert capsys.readouterr().out == ""


def test_the_standard_library_is_found_without_its_tests() -> None:
    files = text(path="stdlib").files()
    assert any(path.name == "argparse.py" for path in files)
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)
    assert not any(path.name == "test_argparse.py" for path in files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.txt"}, r"data.path: there is no /.*/nowhere.txt"),
        ({"path": "."}, r"data.path: there are no files like \*.xyz in"),
        ({"path": "a.txt", "context": 100}, r"data.context: 100 tokens, and a.txt has 4 in all"),
        ({"path": "a.txt", "tokenizer": "none.json"}, r"data.tokenizer: there is no .*none.json"),
        ({"path": "a.txt", "tokenizer": "a.txt"}, r"data.tokenizer: a.txt is no tokenizer of Hugging Face"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"abc")
    source = text(cache=str(tmp_path / "cache"), pattern="*.xyz", **options)

    def make() -> Data:
        source.prepare()
        return source.load()

    with pytest.raises(DataError, match=message):
        make()


# ------------------------------------------------------------------------------------------------------------ given


PAIRS = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))


@pytest.mark.parametrize(
    ("made", "held_out"),
    [(PAIRS, None), ((PAIRS, PAIRS), 6), ([PAIRS, None], None), (Data(PAIRS, PAIRS), 6), (synthetic(samples=6), 1000)],
)
def test_a_function_may_return_a_dataset_a_pair_or_a_source(made: Any, held_out: int | None) -> None:
    source = Given("mine:data", lambda: made)
    source.prepare()
    data = source.load()
    assert len(data.train) == 6
    assert (None if data.evaluation is None else len(data.evaluation)) == held_out
    inputs, targets = Fetch(data.train, 0)[0, torch.tensor([1, 4])]
    assert (len(inputs), len(targets)) == (2, 2)


def test_a_function_is_called_once_and_not_before_it_is_time() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return synthetic(kind="regression")

    source = Given("mine:data", make)
    assert not calls
    source.prepare()
    source.load()
    assert calls == [1]
    assert source.task == "regression"


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Endless(), "IterableDataset"),
        (7, "is a int: it returns a dataset"),
        ([], "is empty"),
        ([1, 2, 3], "a sample is a int, and not a pair"),
        ([(object(), 1)] * 3, "a sample is object and int, and tensors or numbers are needed"),
        ([({"a": 1}, 1)] * 3, "each has to be one tensor or number"),
        ((PAIRS, []), "the held-out data of mine:data is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Given("mine:data", lambda: made).load()


# ------------------------------------------------------------------------------------------------------------- once


class Recorded:
    """A source with a folder per node, or one for all; says who has prepared."""

    def __init__(self, home: Path, rank: int, log: list[int], fails: bool = False) -> None:
        self.home, self._rank, self._log, self._fails = home, rank, log, fails

    def is_ready(self) -> bool:
        return (self.home / "done").exists()

    def prepare(self) -> None:
        if self._fails:
            raise DataError("no space left")
        self._log.append(self._rank)
        (self.home / "done").touch()

    def load(self) -> Data:
        raise NotImplementedError


def meet(make: Any, nodes: int = 3, per_node: int = 2) -> list[BaseException | None]:
    """Prepare what `make(rank, node)` returns, on all ranks at once."""
    store = HashStore()

    def one(rank: int) -> BaseException | None:
        node, local_rank = divmod(rank, per_node)
        world = World(rank=rank, size=nodes * per_node, local_rank=local_rank, local_size=per_node, node=node)
        try:
            prepare_once(make(rank, node), Meeting(store, world))
        except RuntimeError as error:
            return error
        return None

    with ThreadPoolExecutor(nodes * per_node) as pool:
        return list(pool.map(one, range(nodes * per_node)))


@pytest.mark.parametrize(
    ("folders", "preparing"),
    [
        (("all", "all", "all"), [0]),
        (("own-0", "own-1", "own-2"), [0, 2, 4]),
        (("own-0", "shared", "shared"), [0, 2]),
    ],
)
def test_data_is_prepared_once_per_file_system(tmp_path: Path, folders: tuple[str, ...], preparing: list[int]) -> None:
    """F006: whichever nodes share a folder."""
    log: list[int] = []
    assert meet(lambda rank, node: Recorded(tmp_path / folders[node], rank, log)) == [None] * 6
    assert sorted(log) == preparing
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["done"] * len(preparing)
    assert meet(lambda rank, node: Recorded(tmp_path / folders[node], rank, log)) == [None] * 6
    assert sorted(log) == preparing  # it is there already


def test_what_one_cannot_prepare_fails_on_all_and_leaves_no_token(tmp_path: Path) -> None:
    outcomes = meet(lambda rank, node: Recorded(tmp_path, rank, [], fails=True))
    assert isinstance(outcomes[0], DataError)
    assert all(isinstance(outcome, PeerError) and "no space left" in str(outcome) for outcome in outcomes[1:])
    assert not list(tmp_path.iterdir())


def test_a_source_without_a_folder_is_prepared_by_the_first_node_before_the_others() -> None:
    log: list[tuple[str, int]] = []

    class Other:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def prepare(self) -> None:
            log.append(("begin", self._rank))
            log.append(("end", self._rank))

        def load(self) -> Data:
            raise NotImplementedError

    assert meet(lambda rank, node: Other(rank)) == [None] * 6
    assert log[:2] == [("begin", 0), ("end", 0)]
    assert sorted(rank for what, rank in log if what == "begin") == [0, 2, 4]


def test_what_ships_with_the_package_asks_nobody(tmp_path: Path) -> None:
    assert mnist().home is None
    assert synthetic().home is None
    assert mnist(full=True, root=str(tmp_path)).home == tmp_path
