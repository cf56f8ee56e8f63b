"""Snapshots of a state in memory, and whole checkpoints that one rank writes alone."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs import whole
from jobs.background import Background
from jobs.checkpoint import Checkpoints
from jobs.folders import Progress, complete, progress_of, read_state
from jobs.manifest import verify
from jobs.optim import adamw
from jobs.snapshots import Snapshots
from jobs.state import TrainingState
from jobs.whole import NoRoomError, layout_alone, write_whole


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new_state() -> TrainingState:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return TrainingState(net, adamw(net.parameters()))


def train(state: TrainingState) -> None:
    state.net(torch.randn(8, 4)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def snapshots(folder: Path, written: list[int]) -> Snapshots:
    checkpoints = Checkpoints(folder / "checkpoints", run_id="run-a", attempt=3, keep=1, best=None)
    (folder / "memory").mkdir()
    return Snapshots(
        folder / "memory", checkpoints, rank=2, attempt=3, on_complete=lambda step, *_: written.append(step)
    )


def restored(folder: Path, name: str) -> TrainingState:
    state = new_state()
    checkpoints = Checkpoints(folder, run_id="run-a", attempt=4, keep=1, best=None)
    assert checkpoints._look(name) == ""
    state.restore(folder / name, read_state(folder / name)["optimizer"], None, alone=True)
    return state


def test_a_snapshot_is_a_whole_checkpoint_of_its_step_and_there_are_two_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, written = new_state(), []
    most: list[int] = []
    each = snapshots(tmp_path, written)
    real = whole.seal

    def seal(*args: object) -> None:
        most.append(len(list((tmp_path / "memory").iterdir())))
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(whole, "seal", seal)
    for step in (1, 2, 3, 4):
        train(state)
        before = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
        each.begin(state, Progress(step=step, samples_seen=8 * step, metrics={"eval/loss": 0.5}))
        each.wait_for_copy()
        for tensor in state.tensors().values():
            tensor.detach().add_(1)
    each.finish()
    assert written == [1, 2, 3, 4]
    assert each.count == 4
    assert each.blocked_s > 0
    assert max(most) == 2
    folder = tmp_path / "memory"
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
    verify(folder / "step-4")
    assert progress_of(folder / "step-4") == Progress(step=4, samples_seen=32, metrics={"eval/loss": 0.5})
    after = restored(folder, "step-4").tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_snapshot_that_does_not_fit_is_said_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, written = new_state(), []
    each = snapshots(tmp_path, written)
    monkeypatch.setattr(whole, "free_bytes", lambda folder: 1000)
    each.begin(state, Progress(step=1))
    each.finish()
    assert "step-1 is not in memory: " in capsys.readouterr().out
    assert (written, each.count, list((tmp_path / "memory").iterdir())) == ([], 0, [])
    monkeypatch.undo()
    each.begin(state, Progress(step=2))
    each.finish()
    assert written == [2]


def test_the_update_waits_for_the_copy_of_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = new_state()
    each = snapshots(tmp_path, [])
    opened = threading.Event()
    real = Background._copy

    def copy(*args: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(20)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Background, "_copy", copy)
    train(state)
    before = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    each.begin(state, Progress(step=1))
    assert each.holds_update
    state.net(torch.randn(8, 4))  # which changes the statistics of the batches
    opened.set()
    each.wait_for_copy()
    assert not each.holds_update
    each.finish()
    after = restored(tmp_path / "memory", "step-1").tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_may_not_be_in_the_file_of_the_metrics_goes_with_a_snapshot(tmp_path: Path) -> None:
    each = snapshots(tmp_path, [])
    lines = [{"attempt": 3, "step": 1, "train/loss": 0.5, "time": 1.0}]
    each.begin(new_state(), Progress(step=1), lines)
    each.finish()
    assert read_state(tmp_path / "memory" / "step-1")["lines"] == lines


@pytest.mark.parametrize("number", range(1, 9))
def test_a_whole_checkpoint_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whatever of it cannot be brought to the disk."""
    tensors = new_state().tensors()
    layout = layout_alone(tensors, 5)
    left = [number]
    real = os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    try:
        write_whole(tmp_path, "step-1", layout, layout.parts(tensors), state="{}", metrics=None, attempt=1)
    except OSError:
        assert left[0] == 0
    else:
        assert left[0] > 0
    assert [path.name for path in tmp_path.iterdir()] in ([], ["step-1"])
    for name in complete(tmp_path):
        verify(tmp_path / name)
        assert {path.name for path in (tmp_path / name).iterdir()} >= {"rank-5.safetensors", "tensors.json"}


def test_a_whole_checkpoint_that_does_not_fit_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = new_state().tensors()
    layout = layout_alone(tensors, 0)
    monkeypatch.setattr(whole, "free_bytes", lambda folder: 1000)
    with pytest.raises(NoRoomError, match=rf"has 1,000 bytes free, and it takes {layout.size_bytes + (1 << 20):,}"):
        write_whole(tmp_path, "step-1", layout, layout.parts(tensors), state="{}", metrics=None, attempt=1)
    assert list(tmp_path.iterdir()) == []
