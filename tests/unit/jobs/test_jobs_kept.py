"""The state of a rank at a step boundary, written alone: to memory, or to the disk where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs import durable, memory
from jobs.checkpoint import Checkpoints
from jobs.folders import Progress, named, progress_of, read_state
from jobs.kept import KeptState
from jobs.manifest import verify
from jobs.memory import InMemory, Memory, of_no_use, spread
from jobs.optim import adamw
from jobs.parts import Calendar
from jobs.precision import make_precision
from jobs.report import Reporter
from jobs.state import DifferenceError, TrainingState
from jobs.weights import weights_sha256
from jobs.world import Meeting, World
from launcher.runs.rundir import RunDir


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new() -> TrainingState:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return TrainingState(net, adamw(net.parameters()))


class Training:
    """One rank, and what is kept of it."""

    def __init__(self, folder: Path, *, rank: int = 2) -> None:
        self.folder, self.memory = folder / "run", folder / "memory"
        self.memory.mkdir()
        self.state = new()
        self.checkpoints = Checkpoints(self.folder / "checkpoints", run_id="run-a", attempt=1, keep=3, best=None)
        self.checkpoints.check_writable(0)
        self.report = Reporter(RunDir(self.folder), rank=rank, attempt=1, resumed_from=0)
        self.progress = Progress()
        world = World(rank=rank, size=3, local_rank=0, local_size=1, node=1)
        parts: Any = SimpleNamespace(state=self.state, checkpoints=self.checkpoints, report=self.report, world=world)
        self.kept = KeptState(parts, lambda: self.progress, attempt=1)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.state.net(torch.randn(8, 4))
        return out

    def step(self) -> None:
        self.forward().square().sum().backward()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        step = self.progress.step + 1
        self.progress = Progress(step=step, samples_seen=8 * step)
        self.report.metrics(step, {"train/loss": 1.0 / step})
        self.kept.note()

    def read(self, folder: Path) -> TrainingState:
        state = new()
        state.restore(folder, read_state(folder)["optimizer"], None)
        return state


def test_the_buffers_are_those_of_the_boundary(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(3):
        training.step()
    at_boundary = weights_sha256(training.state.net)
    training.forward()
    assert weights_sha256(training.state.net) != at_boundary, "the batch norm has moved on"
    assert training.kept.write(training.memory) == "step-3"
    verify(training.memory / "step-3")
    assert weights_sha256(training.read(training.memory / "step-3").net) == at_boundary
    assert progress_of(training.memory / "step-3") == Progress(step=3, samples_seen=24)


def test_a_buffer_that_a_forward_puts_another_in_the_place_of_is_kept_too(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    norm = training.state.net[1]
    before = norm.running_mean.clone()
    norm.running_mean = norm.running_mean + 1
    training.kept.write(training.memory)
    assert torch.equal(training.read(training.memory / "step-1").net[1].running_mean, before)
    training.kept.note()
    training.kept.write(training.memory)
    assert torch.equal(training.read(training.memory / "step-1").net[1].running_mean, before + 1)


def test_what_rank_0_may_not_have_written_goes_with_the_state(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(4):
        training.step()
    training.report.forget(2)
    training.kept.write(training.memory)
    state = read_state(training.memory / "step-4")
    assert state["kept"] == {"rank": 2, "node": 1}
    assert [(line["attempt"], line["step"], line["train/loss"]) for line in state["lines"]] == [
        (1, 3, 1 / 3),
        (1, 4, 0.25),
    ]


def test_of_a_folder_in_memory_only_the_newest_stays(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.kept.write(training.memory)
    training.step()
    training.kept.write(training.memory)
    training.kept.write(training.memory)
    assert [path.name for path in training.memory.iterdir()] == ["step-2"]


def test_what_does_not_fit_into_memory_goes_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path)
    training.step()
    inside = durable.free_bytes
    monkeypatch.setattr(
        "jobs.whole.free_bytes", lambda folder: 10 if folder.is_relative_to(training.memory) else inside(folder)
    )
    assert training.kept.write(training.memory) == "step-1"
    assert not list(training.memory.iterdir())
    assert "step-1 is not kept in memory but in " in capsys.readouterr().out
    verify(training.checkpoints.folder / "step-1")
    assert (training.checkpoints.folder / "latest").read_text() == "step-1\n"


def test_the_agent_may_ask_for_the_disk(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    assert training.kept.write(training.checkpoints.folder) == "step-1"
    assert named(training.checkpoints.folder) == ["step-1"]


# ---------------------------------------------------------------- what is found


def resume(training: Training, attempt: int = 2, run_id: str = "run-a") -> tuple[TrainingState, str, int]:
    """The state that a new attempt of one rank goes on from, what it says, and from which step."""
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=1)
    memory = Memory(training.memory, world, run_id=run_id)
    store = Checkpoints(training.checkpoints.folder, run_id=run_id, attempt=attempt, keep=3, best=None, memory=memory)
    state = new()
    choice, progress = store.resume(Meeting(dist.HashStore(), world), state, None)
    return state, choice.sentence(), progress.step


def test_the_newest_of_memory_and_disk_is_gone_on_from(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.checkpoints.save(training.state, training.progress, None)
    training.step()
    training.kept.write(training.memory)
    newest = weights_sha256(training.state.net)
    state, said, step = resume(training)
    assert (said, step) == ("resumes from step-2, kept in the memory of node 1 (rank 2)", 2)
    assert weights_sha256(state.net) == newest
    training.step()
    training.checkpoints.save(training.state, training.progress, None)
    _, said, step = resume(training)
    assert (said, step) == ("resumes from step-3", 3)
    assert not list(training.memory.iterdir())


def test_the_scale_of_fp16_is_kept_and_gone_on_from_and_so_are_the_steps_that_it_cost(tmp_path: Path) -> None:
    """A run in another precision does not take it, from memory either."""
    training, world = Training(tmp_path), World(rank=0, size=1, local_rank=0, local_size=1, node=1)
    training.state.precision = precision = make_precision("fp16", torch.device("cpu"))
    for overflow in (True, False, True):
        precision.scaled(training.forward().square().mean()).backward()  # type: ignore[no-untyped-call]
        precision.unscale(training.state.optimizer)
        precision.update(training.state.optimizer, overflow=overflow)
    training.progress = Progress(step=3, samples_seen=24, overflows=2)
    training.kept.note()
    training.kept.write(training.memory)
    found = Memory(training.memory, world, run_id="run-a")
    store = Checkpoints(tmp_path / "checkpoints", run_id="run-a", attempt=2, keep=3, best=None, memory=found)
    with pytest.raises(DifferenceError, match="it has a gradient scale, and this training has none"):
        store.resume(Meeting(dist.HashStore(), world), new(), None)
    training.kept.write(training.memory)
    state = new()
    state.precision = make_precision("fp16", torch.device("cpu"))
    _, progress = store.resume(Meeting(dist.HashStore(), world), state, None)
    assert (progress.step, progress.overflows) == (3, 2)
    assert state.precision.scale == 65536 / 4
    assert state.precision.to_record() == precision.to_record()


def test_what_the_disk_has_is_known_where_memory_has_more(tmp_path: Path) -> None:
    """A save that was due and is not there is made up for."""
    training = Training(tmp_path)
    training.step()
    training.checkpoints.save(training.state, training.progress, None)
    training.step()
    training.kept.write(training.memory)
    world = World(rank=0, size=1, local_rank=0, local_size=1)
    store = Checkpoints(
        training.checkpoints.folder,
        run_id="run-a",
        attempt=2,
        keep=3,
        best=None,
        memory=Memory(training.memory, world, run_id="run-a"),
    )
    choice, _ = store.resume(Meeting(dist.HashStore(), world), new(), None)
    assert (choice.name, choice.newest_on_disk) == ("step-2", 1)
    calendar = Calendar(total_steps=9, steps_per_epoch=3, log_every=1, eval_every=None, save_every=2)
    assert [calendar.last_due(calendar.save_every, step) for step in range(6)] == [0, 0, 2, 2, 4, 4]
    assert calendar.last_due(None, 5) == 0


def test_of_the_same_step_the_disk_has_it(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.kept.write(training.memory)
    training.checkpoints.save(training.state, training.progress, None)
    assert resume(training)[1:] == ("resumes from step-1", 1)


@pytest.mark.parametrize("file", ["rank-2.safetensors", "state.json", "tensors.json", "manifest.json"])
def test_one_flipped_bit_in_memory_is_found(tmp_path: Path, file: str) -> None:
    training = Training(tmp_path)
    training.step()
    training.checkpoints.save(training.state, training.progress, None)
    training.step()
    training.kept.write(training.memory)
    path = training.memory / "step-2" / file
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    _, said, step = resume(training)
    assert step == 1
    assert said.startswith(f"resumes from step-1; step-2 in the memory of node 1 is broken: {file} ")
    assert not list(training.memory.iterdir())


def test_a_state_of_another_run_is_not_taken(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.kept.write(training.memory)
    assert resume(training, run_id="run-b")[1:] == (
        "there is no checkpoint to resume from; step-1 in the memory of node 1 is of another run: run-a, not run-b",
        0,
    )


def test_ranks_that_share_the_model_out_go_on_from_the_disk(tmp_path: Path) -> None:
    """An elastic run may have had one rank, which kept its state whole, and have two now."""
    training = Training(tmp_path)
    training.step()
    training.checkpoints.save(training.state, training.progress, None)
    training.step()
    training.kept.write(training.memory)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=1)
    memory = Memory(training.memory, world, run_id="run-a")
    store = Checkpoints(training.checkpoints.folder, run_id="run-a", attempt=2, keep=3, best=None, memory=memory)
    state = new()
    state.elsewhere = frozenset({"of another stage"})
    choice, progress = store.resume(Meeting(dist.HashStore(), world), state, None)
    assert progress.step == 1
    assert "step-2 in the memory of node 1 is of no use to ranks that share the model out" in choice.sentence()


def test_a_state_under_the_name_of_another_step_is_not_taken(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.kept.write(training.memory)
    (training.memory / "step-1").rename(training.memory / "step-9")
    assert resume(training)[1:] == (
        "there is no checkpoint to resume from; step-9 in the memory of node 1 is broken: state.json says step 1",
        0,
    )


def test_half_a_state_in_memory_is_removed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (training.memory / "step-7.tmp-kept-1-2").mkdir()
    assert resume(training)[2] == 0
    assert not list(training.memory.iterdir())


def test_a_checkpoint_on_disk_makes_older_ones_in_memory_useless(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(2):
        training.step()
    training.kept.write(training.memory)
    for local_rank, left in ((1, ["step-2"]), (0, [])):
        world = World(rank=local_rank, size=2, local_rank=local_rank, local_size=2)
        memory = Memory(training.memory, world, run_id="run-a")
        memory.saved(1)
        assert named(training.memory) == ["step-2"]
        memory.saved(2)
        assert named(training.memory) == left, "one rank of a node looks after it"


def test_what_can_go_once_it_is_known_from_where() -> None:
    def at(step: int, reader: int) -> InMemory:
        return InMemory(name=f"step-{step}", problem="", reader=reader, node=reader, kept_by=None)

    states = [at(9, 0), at(7, 0), at(7, 1), at(5, 1)]
    assert of_no_use(states, "step-7", []) == states
    assert of_no_use(states, states[1], [states[0].full_name]) == [states[0], states[3]]
    assert of_no_use(states, states[2], [states[0].full_name, states[1].full_name]) == [states[0], states[1], states[3]]


@pytest.mark.parametrize("block_bytes", [7, 32 << 20])
def test_tensors_of_any_kind_travel(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """From one rank to another, each in its turn: what the first sends the second receives."""
    tensors = {
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "count": torch.tensor(2**40),
    }
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(memory, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(dist, "broadcast", lambda block, src, group: sent.append(block.clone()))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    spread(tensors, 0, None)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert max(map(len, sent)) <= block_bytes
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast", lambda block, src, group: block.copy_(sent.pop(0)))
    received = {name: torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t() if tensor.dim() == 2
                else torch.zeros_like(tensor) for name, tensor in tensors.items()}  # fmt: skip
    spread(received, 0, None)
    assert sent == []
    assert all(torch.equal(received[name], before[name]) for name in tensors)
