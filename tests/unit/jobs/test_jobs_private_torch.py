"""What the job needs of torch and torch calls private: in one file, and as we assume it. Run with each torch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed import distributed_c10d

import jobs
from jobs import private_torch

_PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!dynamo\b|_version__)|\bdistributed_c10d\b|\b(module|net)\._[a-z]")


def test_private_names_stand_in_one_file() -> None:
    folder = Path(jobs.__file__).parent
    found = {
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in folder.rglob("*.py")
        if path.name != "private_torch.py"
        for line in path.read_text().splitlines()
        if _PRIVATE.search(line)
    }
    assert found == set()


def test_each_of_many_is_copied_and_measured() -> None:
    sources = [torch.ones(3), torch.full((2, 2), 2.0, dtype=torch.float64)]
    targets = [torch.zeros_like(source) for source in sources]
    private_torch.copy_each(targets, sources)
    private_torch.copy_each([], [])
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert [norm.item() for norm in private_torch.norm_of_each(sources)] == [pytest.approx(3**0.5), 4.0]


def test_each_of_many_is_scaled() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    private_torch.scale_each(tensors, 0.5)
    private_torch.scale_each([], 0.5)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.5], [1.0]]


def test_a_scaler_is_told_of_an_overflow_elsewhere() -> None:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=8.0), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    private_torch.tell_overflow(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([1.0, 1.0], 4.0)


def test_the_buffers_of_a_module_are_its_own_and_no_copy() -> None:
    norm = torch.nn.BatchNorm1d(2)
    private_torch.buffers_of(norm)["running_mean"] = torch.full((2,), 7.0)
    assert norm.running_mean.tolist() == [7.0, 7.0]


def test_a_part_of_a_tensor_is_a_view() -> None:
    whole = torch.arange(6).reshape(2, 3)
    part = private_torch.narrow_tensor_by_index(whole, [1, 1], [1, 2])
    assert part.tolist() == [[4, 5]]
    assert part.data_ptr() == whole[1, 1:].data_ptr()


def test_all_groups_can_be_aborted_without_naming_one() -> None:
    parameters = inspect.signature(distributed_c10d._abort_process_group).parameters
    assert all(parameter.default is not parameter.empty for parameter in parameters.values())
