"""Room for what a training will save, found before it begins."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from jobs import durable, room
from jobs.optim import adamw, sgd
from jobs.room import NoAnswerError, answered, check_disk, check_memory, expected_bytes
from jobs.state import TrainingState
from jobs.whole import SMALL_BYTES
from launcher.agent.causes import classify
from launcher.runs.states import Cause

FREE = 10 * SMALL_BYTES


def network() -> nn.Module:
    net = nn.Sequential(nn.Linear(7, 1), nn.BatchNorm1d(1), nn.Linear(1, 5), nn.Linear(5, 5))
    net[3].requires_grad_(False)
    return net


@pytest.mark.parametrize("make", [adamw, sgd, partial(sgd, momentum=0.9), torch.optim.Adafactor])
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(make: Callable[..., Optimizer]) -> None:
    net = network()
    state = TrainingState(net, make(net.parameters()))
    expected = expected_bytes(state, make)
    net(torch.randn(4, 7)).sum().backward()
    state.optimizer.step()
    real = sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.tensors().values())
    assert expected_bytes(state, make) == real
    if make is not torch.optim.Adafactor:  # which keeps rows and columns: those of two elements do not tell how many
        assert expected == real
    assert expected >= 0.5 * real


def test_making_the_estimate_changes_nothing() -> None:
    net = network()
    state = TrainingState(net, adamw(net.parameters()))
    before = [tensor.clone() for tensor in net.state_dict().values()]
    torch.manual_seed(1)
    drawn = torch.get_rng_state()

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return adamw(parameters)

    expected_bytes(state, make)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one, other) for one, other in zip(before, net.state_dict().values(), strict=True))
    assert not state.optimizer.state


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda folder: FREE)


@pytest.mark.usefixtures("free")
def test_a_checkpoint_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    check = partial(check_disk, tmp_path, keep=1, probe=tmp_path / ".probe")
    assert check(4 * SMALL_BYTES) == ""  # two of them, with their small files, are all that there is room for
    with pytest.raises(OSError, match=r"a checkpoint takes 10,485,761 bytes, and 10,485,760 are free; make room") as no:
        check(9 * SMALL_BYTES + 1)
    message = f"SaveError: no checkpoint can be written to /a: {no.value}"
    assert classify(1, {"message": {"message": message}, "exception_bases": ["SaveError"]}) is Cause.DISK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("free")
def test_fewer_than_are_to_be_kept_are_a_warning(tmp_path: Path) -> None:
    told = check_disk(tmp_path, 4 * SMALL_BYTES, keep=2, probe=tmp_path / ".probe")
    assert "has 10,485,760 bytes free; with checkpoint.keep: 2 it will take 15,728,640 more" in told


@pytest.mark.usefixtures("free")
def test_a_quota_is_seen_where_the_file_system_sets_room_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_quota(descriptor: int, size_bytes: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(room, "reserve", over_quota)
    with pytest.raises(OSError, match=r"takes 1,048,586 bytes, which are not to be had: Disk quota exceeded"):
        check_disk(tmp_path, 10, keep=1, probe=tmp_path / ".probe")
    assert list(tmp_path.iterdir()) == []


def test_room_is_set_aside_before_the_first_byte_and_not_where_that_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    with durable.hashed_file(tmp_path / "a", size_bytes=3 << 20) as file:
        sizes.append((tmp_path / "a").stat().st_blocks * 512)
        file.write(b"x")
    assert sizes[0] >= 3 << 20

    def cannot(number: int) -> Callable[..., int]:
        def fallocate(*_: Any) -> int:
            durable.ctypes.set_errno(number)
            return -1

        return fallocate

    monkeypatch.setattr(durable, "_fallocate", cannot(errno.EOPNOTSUPP))
    with durable.hashed_file(tmp_path / "b", size_bytes=3 << 20) as file:
        file.write(b"x")
    assert (tmp_path / "b").stat().st_size == 1
    monkeypatch.setattr(durable, "_fallocate", cannot(errno.EDQUOT))
    with pytest.raises(OSError, match=r"quota exceeded.*/c"), durable.hashed_file(tmp_path / "c", size_bytes=1):
        pass


@pytest.mark.usefixtures("free")
def test_snapshots_fit_into_the_file_system_and_the_memory_or_are_refused(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99999999 kB\nMemAvailable:   9216 kB\n")
    check_memory(tmp_path, 2 * SMALL_BYTES, meminfo=meminfo)
    with pytest.raises(OSError, match=r"2 snapshots take 12,582,912 bytes, and .* has 10,485,760 free; leave"):
        check_memory(tmp_path, 5 * SMALL_BYTES, meminfo=meminfo)
    with pytest.raises(OSError, match=r"take 11,534,336 bytes of memory, and 9,437,184 are available"):
        check_memory(tmp_path, 3 * SMALL_BYTES, meminfo=meminfo)


def test_a_file_system_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 17 of the fault model: before the data is prepared, and before a GPU is used."""
    monkeypatch.setattr(room, "ANSWER_S", 0.02)
    ends = threading.Event()
    with pytest.raises(NoAnswerError, match="/gone does not answer, 0 s: "):
        answered(lambda: ends.wait(20) and None, "/gone")
    ends.set()

    def refuse() -> None:
        raise OSError("read-only")

    monkeypatch.setattr(room, "ANSWER_S", 20.0)
    with pytest.raises(OSError, match="read-only"):
        answered(refuse, "/gone")
    answered(lambda: None, "/there")
