from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from jobs.durable import hash_file
from jobs.tensorfile import _TYPES, Entry, TensorFile, TensorFileError, write_tensors

OTHER_TYPES = (torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), value=lambda: tensor)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits but those of a NaN."""
    count = torch.Size(shape).numel()
    if dtype.is_complex:
        return torch.complex(torch.arange(count).double(), -torch.arange(count).double()).to(dtype).reshape(shape)
    return torch.arange(count).remainder(2 if dtype is torch.bool else 100).to(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    shapes = [(3, 4), (), (0,), (5,), (2, 3, 1)]
    return {f"{dtype}/{shape}": some(dtype, *shape) for dtype in (*_TYPES, *OTHER_TYPES) for shape in shapes}


def test_every_type_comes_back_bit_by_bit(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "rank-0.safetensors"
    info = write_tensors(path, [entry(name, tensor) for name, tensor in tensors.items()])
    assert (info.size_bytes, info.xxh3_128) == (path.stat().st_size, hash_file(path))
    with TensorFile(path) as file:
        for name, tensor in tensors.items():
            read = torch.empty_like(tensor)
            file.read_into(read, file.begin_of(name, tensor.dtype, tuple(tensor.shape)))
            assert same(read, tensor), name


def test_the_package_safetensors_reads_it(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "rank-0.safetensors"
    write_tensors(path, [entry(name, tensor) for name, tensor in tensors.items()])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.dtype in OTHER_TYPES:
            assert read[name].dtype is torch.uint8
        else:
            assert same(read[name], tensor), name


def test_views_and_transposed_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    path = tmp_path / "rank-0.safetensors"
    write_tensors(path, [entry("view", whole[1:3, ::2]), entry("turned", whole.T), entry("none", torch.empty(0, 3))])
    read = load_file(path)
    assert torch.equal(read["view"], whole[1:3, ::2])
    assert torch.equal(read["turned"], whole.T)
    assert read["none"].shape == (0, 3)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", [entry("x", torch.ones(1))])
    with pytest.raises(FileExistsError, match="a"):
        write_tensors(tmp_path / "a", [entry("x", torch.zeros(1))])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "says"),
    [
        ("y", torch.float32, (2,), "y is missing"),
        ("x", torch.float16, (2,), "x is .*F32.* not torch.float16"),
        ("x", torch.float32, (3,), "x is .* not torch.float32 .3."),
    ],
)
def test_a_tensor_that_is_not_as_listed_is_named(
    tmp_path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], says: str
) -> None:
    write_tensors(tmp_path / "a", [entry("x", torch.ones(2))])
    with TensorFile(tmp_path / "a") as file, pytest.raises(TensorFileError, match=says):
        file.begin_of(name, dtype, shape)


@pytest.mark.parametrize(
    "entry_of_x",
    [
        None,
        [],
        {},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 60]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": "x"},
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_of_that_file(tmp_path: Path, entry_of_x: object) -> None:
    header = json.dumps({"x": entry_of_x}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with TensorFile(tmp_path / "a") as file, pytest.raises(TensorFileError, match=r"^a: x is "):
        file.begin_of("x", torch.float32, (2,))


@given(content=st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_error_and_nothing_worse(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    path.write_bytes(content)
    with pytest.raises(TensorFileError), TensorFile(path) as file:
        file.begin_of("x", torch.float32, (2,))


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", [entry("x", torch.ones(2))])
    with TensorFile(tmp_path / "a") as file:
        begin = file.begin_of("x", torch.float32, (2,))
        with (tmp_path / "a").open("rb+") as harmed:
            harmed.truncate(begin + 4)
        for place in (begin, 1 << 70):
            with pytest.raises(TensorFileError, match="ends too early"):
                file.read_into(torch.empty(2), place)
