from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs.checkpoint import CheckpointError, Checkpoints, Progress, complete, read_progress, resolve_init
from jobs.manifest import BrokenError, verify
from jobs.optim import adamw, sgd
from jobs.weights import weights_sha256


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = network()
    optimizer = adamw(net.parameters())
    for _ in range(steps):
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def checkpoints(folder: Path, *, attempt: int = 1, keep: int = 3, best: str | None = None) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", attempt=attempt, keep=keep, best=best, record={"recipe": {"name": "t"}})


def save(store: Checkpoints, *steps: int, accuracy: dict[int, float] | None = None) -> None:
    net, optimizer = trained()
    for step in steps:
        metrics = {"eval/accuracy": accuracy[step]} if accuracy and step in accuracy else None
        store.save(net, optimizer, Progress(step=step, samples_seen=8 * step, metrics=metrics), None)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    net, optimizer = trained()
    store = checkpoints(tmp_path)
    progress = Progress(step=3, samples_seen=24, metrics={"eval/loss": 0.5})
    saved = store.save(net, optimizer, progress, None)
    other = network()
    other_optimizer = adamw(other.parameters())
    assert store.choose() == saved.name == "step-3"
    assert store.load("step-3", other, other_optimizer, None) == progress
    assert weights_sha256(other) == weights_sha256(net)
    for ours, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (store.folder / "latest").read_text() == "step-3\n"
    verify(store.folder / "step-3")
    assert saved.size_bytes == sum(
        p.stat().st_size for p in (store.folder / "step-3").iterdir() if "mani" not in p.name
    )


def test_an_optimizer_without_state_is_restored_too(tmp_path: Path) -> None:
    net = network()
    store = checkpoints(tmp_path)
    store.save(net, sgd(net.parameters()), Progress(), None)
    other = network()
    store.load("step-0", other, sgd(other.parameters()), None)
    assert weights_sha256(other) == weights_sha256(net)


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=2, best="eval/accuracy max")
    save(store, 1, 2, 3, 4, 5, accuracy={1: 0.1, 2: 0.9, 3: 0.2})
    assert complete(store.folder) == ["step-2", "step-4", "step-5"]
    assert store.best() == "step-2"
    low = checkpoints(tmp_path / "low", keep=1, best="eval/accuracy min")
    save(low, 1, 2, 3, accuracy={1: 0.1, 2: 0.9, 3: 0.2})
    assert complete(low.folder) == ["step-1", "step-3"]


def test_an_evaluation_may_come_after_the_checkpoint(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, best="eval/accuracy max")
    save(store, 4)
    assert store.best() is None
    store.add_metrics(Progress(step=4, samples_seen=32, metrics={"eval/accuracy": 0.5}))
    assert store.best() == "step-4"
    verify(store.folder / "step-4")
    assert read_progress(store.folder / "step-4").metrics == {"eval/accuracy": 0.5}


@pytest.mark.parametrize("harm", ["missing", "short", "flipped", "no manifest", "manifest"])
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    store = checkpoints(tmp_path)
    save(store, 1, 2)
    victim = next((store.folder / "step-2").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    if harm == "missing":
        victim.unlink()
    elif harm == "short":
        victim.write_bytes(content[:-1])
    elif harm == "flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif harm == "no manifest":
        (store.folder / "step-2" / "manifest.json").unlink()
    else:
        (store.folder / "step-2" / "manifest.json").write_text('{"files": ')
    again = checkpoints(tmp_path, attempt=2)
    assert again.choose() == "step-1"
    assert "checkpoint step-2 is broken: " in capsys.readouterr().out
    assert (store.folder / "step-2.broken-2").exists()
    save(again, 2)
    assert complete(store.folder) == ["step-1", "step-2"]
    assert not list(store.folder.glob("*.broken-*"))


def test_where_all_are_broken_nothing_starts_from_zero(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1, 2)
    for manifest in store.folder.glob("step-*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint is broken \(step-2, step-1\)"):
        checkpoints(tmp_path, attempt=2).choose()


def test_what_dead_attempts_left_half_written_is_removed(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1)
    for name in ("step-2.tmp-1", "step-0.tmp-deleted"):
        (store.folder / name).mkdir()
        (store.folder / name / "__0_0.distcp").write_text("half")
    assert checkpoints(tmp_path, attempt=2).choose() == "step-1"
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-1"]


def test_nothing_to_resume_from_is_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).choose() is None


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1)
    other = nn.Sequential(*network(width=5), nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as caught:
        store.load("step-1", other, adamw(other.parameters()), None)
    message = str(caught.value)
    assert "0.weight: (3, 4) in the checkpoint, (5, 4) here" in message
    assert "3.weight: not in the checkpoint" in message


def test_weights_to_start_from_are_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "run")
    save(store, 1, 2)
    assert resolve_init(str(tmp_path / "run")) == store.folder / "step-2"
    assert resolve_init(str(store.folder / "step-1")) == store.folder / "step-1"
    (store.folder / "step-2" / "manifest.json").unlink()
    assert resolve_init(str(tmp_path / "run")) == store.folder / "step-1"
    with pytest.raises(CheckpointError, match="init_from"):
        resolve_init(str(tmp_path / "nothing"))


def test_no_pickle_in_what_is_ours(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1)
    state = json.loads((store.folder / "step-1" / "state.json").read_text())
    assert state["step"] == 1
    assert state["samples_seen"] == 8
    assert state["world_size"] == 1
    assert state["torch"] == torch.__version__
    assert state["recipe"] == {"name": "t"}


def test_a_missing_folder_is_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match="is missing"):
        verify(tmp_path / "none")


def test_the_fingerprint_sees_names_types_shapes_and_bytes() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3).bfloat16(), nn.Sequential(nn.Linear(2, 3))]
    for net in nets:
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
    assert len({weights_sha256(net) for net in nets}) == len(nets)
    assert weights_sha256(nets[0]) == weights_sha256(nn.Linear(2, 3).requires_grad_(False).apply(zero))


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()
