"""Saves behind the training's back, on one rank: what is saved, who waits for what, and what a failed one leads to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs import durable, saving
from jobs.agreement import Agreement
from jobs.background import Background
from jobs.checkpoint import Checkpoints, Saved, SaveError
from jobs.folders import Progress, complete, read_state
from jobs.manifest import verify
from jobs.optim import adamw
from jobs.saving import Saving, Voice
from jobs.state import TrainingState, open_tensors, read_tensors
from jobs.stop import StopRequest

WAIT_S = 20.0


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A small training that saves."""

    def __init__(self, folder: Path, *, asynchronous: bool = True, max_failed: int = 0, keep: int = 100) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.state = TrainingState(net, adamw(net.parameters()))
        self.checkpoints = Checkpoints(folder / "checkpoints", run_id="run-a", attempt=1, keep=keep, best=None)
        self.checkpoints.check_writable(0)
        self.saved: list[tuple[int, str]] = []
        self.blocked_s: list[float] = []
        self.failed: list[tuple[int, str, int]] = []
        self.said: list[str] = []
        voice = Voice(complete=self._complete, failed=self._fail, say=self.said.append)
        self.saving = Saving(self.checkpoints, None, voice, asynchronous=asynchronous, max_failed=max_failed)
        self.agreement = Agreement(StopRequest(), has_trouble=lambda: self.saving.has_trouble)
        self.step = 0

    def _complete(self, saved: Saved, step: int, time_s: float, blocked_s: float) -> None:
        self.saved.append((step, saved.name))
        self.blocked_s.append(blocked_s)

    def _fail(self, step: int, reason: str, in_a_row: int) -> None:
        self.failed.append((step, reason, in_a_row))

    def train(self) -> None:
        self.state.net(torch.randn(8, 4)).square().sum().backward()
        self.saving.wait_for_copy()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.step += 1

    def save(self, *, last: bool = False) -> bool:
        return self.saving.begin(self.state, Progress(step=self.step), self.agreement, last=last)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state.tensors().items()}

    def wait(self) -> None:
        work = self.saving._work
        assert work is not None
        assert work.done.wait(WAIT_S)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Gate:
    """Holds up what the thread of a save does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.open = threading.Event()
        real = getattr(owner, name)

        def held(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert self.open.wait(WAIT_S)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, held)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_the_state_of_the_step_whatever_changes_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Weights, optimizer, its numbers, statistics of batches: all are changed while nothing is on the disk yet."""
    run = Run(tmp_path, asynchronous=asynchronous)
    gate = Gate(monkeypatch, Checkpoints, "write")
    if not asynchronous:
        gate.open.set()
    run.train()
    run.state.optimizer.param_groups[0]["seen"] = 1
    before = run.tensors()
    run.save()
    run.saving.wait_for_copy()
    with torch.no_grad():
        for tensor in run.state.tensors().values():
            tensor.add_(1)
    run.state.optimizer.param_groups[0]["seen"] = 2
    gate.open.set()
    assert run.saving.finish(run.agreement) is None
    assert read_state(run.checkpoints.folder / "step-1")["optimizer"]["groups"] == [{"seen": 1}]
    assert same(saved_tensors(run.checkpoints.folder / "step-1"), before)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Of a checkpoint that is verified first."""
    verify(folder)
    reader = open_tensors(folder)
    into = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in reader.tensors.items()}
    read_tensors(reader, folder, into, None)
    return into


def test_only_the_update_waits_for_the_copy_and_a_forward_may_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward changes the statistics of the batches: those are copied before `begin` returns."""
    run = Run(tmp_path)
    run.train()
    before = run.tensors()
    gate = Gate(monkeypatch, Background, "_copy")
    run.save()
    assert run.saving.holds_update
    run.state.net(torch.randn(8, 4))
    assert not same(run.tensors(), before)
    threading.Timer(0.05, gate.open.set).start()
    run.saving.wait_for_copy()
    assert not run.saving.holds_update
    with torch.no_grad():
        run.state.net[0].weight.add_(1)  # type: ignore[operator, union-attr]
    run.saving.finish(run.agreement)
    assert same(saved_tensors(run.checkpoints.folder / "step-1"), before)
    assert run.blocked_s[0] >= 0.04


def test_the_memory_of_the_copies_is_kept_and_a_save_that_nothing_follows_makes_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    run.save(last=True)
    assert run.saving._background._kept == {}
    run.saving.finish(run.agreement)
    places = []
    for _ in range(2):
        run.train()
        run.save()
        run.saving.finish(run.agreement)
        places.append({name: tensor.data_ptr() for name, tensor in run.saving._background._kept.items()})
    assert places[0] == places[1]
    assert places[0].keys() == run.state.tensors().keys()


def test_fifty_saves_one_after_the_other_are_all_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F083."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk of a test need not be waited for
    run = Run(tmp_path, keep=5)
    for _ in range(50):
        run.train()
        assert run.save()
    run.saving.finish(run.agreement)
    assert run.saved == [(step, f"step-{step}") for step in range(1, 51)]
    assert complete(run.checkpoints.folder) == [f"step-{step}" for step in range(46, 51)]
    for name in complete(run.checkpoints.folder):
        verify(run.checkpoints.folder / name)


def test_a_save_waits_for_the_one_before_which_is_said_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WORTH_SAYING_S", 0.0)
    run = Run(tmp_path)
    gate = Gate(monkeypatch, Checkpoints, "write")
    run.train()
    run.save()
    run.train()
    threading.Timer(0.05, gate.open.set).start()
    run.save()
    run.saving.finish(run.agreement)
    assert [step for step, _ in run.saved] == [1, 2]
    assert run.saving.counts.waited == 1
    assert run.said[0].startswith("the save of step 2 waited ")
    assert run.blocked_s[1] >= 0.04


def test_the_ranks_agree_anew_on_who_writes_what_when_the_state_has_other_tensors(tmp_path: Path) -> None:
    """An optimizer makes its state at its first step."""
    run = Run(tmp_path)
    run.save()
    run.saving.finish(run.agreement)
    run.train()
    assert run.checkpoints.needs_plan(run.state)
    run.save()
    run.saving.finish(run.agreement)
    assert not run.checkpoints.needs_plan(run.state)
    assert same(saved_tensors(run.checkpoints.folder / "step-1"), run.tensors())


class FullDisk:
    """The next so many times that something is brought to the disk, it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if self.times and threading.current_thread() is not threading.main_thread():
                self.times -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


def test_a_failed_save_is_noticed_with_the_next_step_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F083, F084: the second one fails; what was there before is still there."""
    disk, run = FullDisk(monkeypatch), Run(tmp_path)
    run.train()
    run.save()
    run.train()
    run.saving.finish(run.agreement)
    disk.times = 1
    run.save()
    run.wait()
    assert not run.agreement.trouble
    run.agreement.now()  # of the next step
    assert run.agreement.trouble
    with pytest.raises(SaveError, match=r"^step-2 could not be written to .*checkpoints: rank 0: .*No space left"):
        run.saving.settle(run.agreement)
    [(step, reason, in_a_row)] = run.failed
    assert (step, in_a_row) == (2, 1)
    assert reason.startswith("rank 0: ")
    assert complete(run.checkpoints.folder) == ["step-1"]
    assert not list(run.checkpoints.folder.glob("*.tmp-*"))


def test_as_many_failed_saves_in_a_row_as_the_recipe_allows_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, run = FullDisk(monkeypatch), Run(tmp_path, max_failed=1)
    outcomes = []
    for fails in (True, False, True, False):
        run.train()
        disk.times = int(fails)
        run.save()
        outcomes.append(run.saving.finish(run.agreement))
    assert outcomes == [1, None, 3, None]
    assert [(step, in_a_row) for step, _, in_a_row in run.failed] == [(1, 1), (3, 1)]
    assert complete(run.checkpoints.folder) == ["step-2", "step-4"]
    run.train()
    disk.times = 2
    run.save()
    assert run.saving.finish(run.agreement) == 5
    run.train()
    run.save()
    with pytest.raises(SaveError, match=r"step-6 could not be .*\(2 in a row, checkpoint.max_failed_saves: 1\)"):
        run.saving.finish(run.agreement)
    assert run.saving.counts.failed == 4


def test_a_save_that_hangs_counts_as_failed_and_the_next_one_begins_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 17 of the fault model: the file system is gone, and comes back."""
    run = Run(tmp_path, max_failed=2)
    gate = Gate(monkeypatch, Checkpoints, "write")
    monkeypatch.setattr(saving, "SETTLE_S", 0.0)
    run.train()
    run.save()
    run.agreement.now()
    assert not run.agreement.trouble
    monkeypatch.setattr(saving, "LIMIT_S", 0.0)
    run.agreement.now()
    assert run.agreement.trouble
    assert run.saving.settle(run.agreement) == 1
    assert "it has not ended after 0 s (limit 0 s)" in run.failed[0][1]
    run.train()
    assert not run.save()  # at once: there is nothing to wait for
    assert run.failed[1][1:] == ("the save of step 1 has not ended yet", 2)
    assert run.saving.finish(run.agreement) is None
    monkeypatch.setattr(saving, "LIMIT_S", WAIT_S)
    gate.open.set()
    run.wait()
    run.train()
    assert run.save()
    assert run.saving.finish(run.agreement) is None
    assert [step for step, _ in run.saved] == [1, 3]


def test_a_fault_of_the_program_in_a_save_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, max_failed=5)
    monkeypatch.setattr(durable.HashedFile, "write", lambda *_: 1 / 0)
    run.save()
    run.wait()
    run.agreement.now()
    with pytest.raises(ZeroDivisionError):
        run.saving.settle(run.agreement)


def test_what_cannot_be_a_number_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    """F018: rank 0 alone finds it."""
    run = Run(tmp_path)
    run.state.optimizer.param_groups[0]["hook"] = print
    run.save(last=True)
    with pytest.raises(SaveError, match="optimizer group 0/hook is a builtin_function_or_method"):
        run.saving.finish(run.agreement)


def test_an_error_of_the_training_waits_for_the_save_that_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F083: what is being saved is not cut off."""
    run = Run(tmp_path)
    gate = Gate(monkeypatch, Checkpoints, "write")
    run.train()
    run.save()
    threading.Timer(0.05, gate.open.set).start()
    run.saving.let_end()
    assert complete(run.checkpoints.folder) == ["step-1"]
    assert "the save of step 1 is awaited" in capsys.readouterr().out
    run.saving.let_end()
    assert capsys.readouterr().out == ""
