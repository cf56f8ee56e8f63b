from __future__ import annotations

import enum
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn

from jobs import durable
from jobs.checkpoint import CheckpointError, Checkpoints, SaveError
from jobs.choice import Choice
from jobs.folders import Progress, complete, plain_json, progress_of, read_state, resolve_init
from jobs.manifest import BrokenError, Manifest, read_manifest, seal, verify
from jobs.optim import adamw, sgd
from jobs.state import TrainingState, restore_model
from jobs.weights import weights_sha256
from jobs.world import Meeting, World

EXPLODED = "exploded"


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def new(net: nn.Module | None = None, make: Callable[..., torch.optim.Optimizer] = adamw) -> TrainingState:
    net = net or network()
    return TrainingState(net, make(net.parameters()))


def trained(steps: int = 3) -> TrainingState:
    torch.manual_seed(0)
    state = new()
    for _ in range(steps):
        state.net(torch.randn(8, 4)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


def checkpoints(
    folder: Path, *, attempt: int = 1, keep: int = 3, best: str | None = None, run_id: str = "run-a"
) -> Checkpoints:
    made = Checkpoints(folder / "checkpoints", run_id=run_id, attempt=attempt, keep=keep, best=best)
    made.check_writable(0)
    return made


def resume(store: Checkpoints, state: TrainingState | None = None) -> tuple[Choice, Progress]:
    world = World(rank=0, size=1, local_rank=0, local_size=1)
    return store.resume(Meeting(dist.HashStore(), world), state or new(), None)


def choose(store: Checkpoints) -> Choice:
    return resume(store)[0]


def save(store: Checkpoints, *steps: int, accuracy: dict[int, float] | None = None) -> None:
    state = trained()
    for step in steps:
        metrics = {"eval/accuracy": accuracy[step]} if accuracy and step in accuracy else None
        store.save(state, Progress(step=step, samples_seen=8 * step, metrics=metrics), None)


def reseal(folder: Path) -> None:
    """Make the manifest say what is there: whoever changes a checkpoint can do that too."""
    infos = {
        path.name: durable.FileInfo(size_bytes=path.stat().st_size, xxh3_128=durable.hash_file(path))
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    seal(folder, Manifest(files=infos))


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    state = trained()
    store = checkpoints(tmp_path)
    progress = Progress(step=3, samples_seen=24, metrics={"eval/loss": 0.5})
    saved = store.save(state, progress, None)
    other = new()
    assert resume(store, other) == (Choice(name="step-3"), progress)
    assert saved.name == "step-3"
    assert weights_sha256(other.net) == weights_sha256(state.net)
    for ours, theirs in zip(state.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (store.folder / "latest").read_text() == "step-3\n"
    folder = store.folder / "step-3"
    assert saved.size_bytes == sum(p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json")
    names = {path.name for path in folder.iterdir()}
    assert names == {"rank-0.safetensors", "tensors.json", "state.json", "manifest.json"}


def test_an_optimizer_without_state_is_restored_too(tmp_path: Path) -> None:
    state = new(make=sgd)
    store = checkpoints(tmp_path)
    store.save(state, Progress(), None)
    other = new(make=sgd)
    resume(store, other)
    assert weights_sha256(other.net) == weights_sha256(state.net)


def test_what_an_optimizer_changes_in_its_groups_is_state_and_what_it_was_made_with_is_not(tmp_path: Path) -> None:
    """F010: a schedule-free optimizer counts in its groups; options of the recipe stay the recipe's."""
    store, state = checkpoints(tmp_path), trained()
    state.optimizer.param_groups[0].update(k=7, weight_sum=0.25, lr=0.5)
    state.optimizer.state[next(state.net.parameters())]["seen"] = 3
    store.save(state, Progress(step=1), None)
    assert read_state(store.folder / "step-1")["optimizer"]["groups"] == [{"k": 7, "weight_sum": 0.25}]
    with pytest.raises(CheckpointError, match="optimizer group 0: no option 'k' here"):
        resume(store)
    net = network()
    optimizer = adamw(net.parameters(), weight_decay=0.3)
    optimizer.param_groups[0].update(k=0, weight_sum=0.0)
    other = TrainingState(net, optimizer)
    resume(store, other)
    group = optimizer.param_groups[0]
    assert (group["k"], group["weight_sum"], group["weight_decay"], group["lr"]) == (7, 0.25, 0.3, 1e-3)
    assert optimizer.state[next(net.parameters())]["seen"] == 3
    state.optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match="optimizer group 0/hook is a builtin_function_or_method"):
        store.save(state, Progress(step=2), None)


@pytest.mark.parametrize("gone", ["model/0.weight", "optimizer/0.weight/exp_avg_sq", "optimizer/2.bias/step"])
def test_an_entry_that_is_missing_is_named(tmp_path: Path, gone: str) -> None:
    """F010."""
    store = checkpoints(tmp_path)
    save(store, 1)
    rewrite(store.folder / "step-1" / "tensors.json", lambda content: content["tensors"].pop(gone))
    reseal(store.folder / "step-1")
    with pytest.raises(CheckpointError, match=f"{gone.removeprefix('model/')}: not in the checkpoint"):
        resume(store)


def test_an_entry_too_many_is_named(tmp_path: Path) -> None:
    """F010."""
    store = checkpoints(tmp_path)
    save(store, 1)
    rewrite(store.folder / "step-1" / "state.json", lambda content: content["optimizer"]["state"].pop("0.weight"))
    reseal(store.folder / "step-1")
    with pytest.raises(CheckpointError, match=r"optimizer/0\.weight/exp_avg: not in this training"):
        resume(store)
    rewrite(store.folder / "step-1" / "state.json", lambda content: content.update(scaler={"scale": 1.0}))
    reseal(store.folder / "step-1")
    with pytest.raises(CheckpointError, match="it has a gradient scale"):
        resume(store)


LIES = {
    "a part is missing": lambda entry: entry.update(chunks=[]),
    "another shape": lambda entry: entry["chunks"][0].update(shape=[3, 3]),
    "outside": lambda entry: entry["chunks"][0].update(offsets=[1, 0]),
    "no type": lambda entry: entry.update(dtype="float31"),
    "no code either": lambda entry: entry.update(dtype="save"),
    "no list": lambda entry: entry.update(chunks=None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_list_of_tensors_that_makes_no_sense_is_an_error(tmp_path: Path, lie: str) -> None:
    """F010, F086: torch would leave what is not covered as it was in memory."""
    store = checkpoints(tmp_path)
    save(store, 1)
    rewrite(store.folder / "step-1" / "tensors.json", lambda content: LIES[lie](content["tensors"]["model/0.weight"]))
    reseal(store.folder / "step-1")
    with pytest.raises(CheckpointError, match=r"tensors\.json cannot be read"):
        resume(store)


def test_a_file_that_does_not_hold_what_is_listed_is_named(tmp_path: Path) -> None:
    """F010: the list agrees with the training, and the file with neither."""
    store = checkpoints(tmp_path)
    save(store, 1)
    rewrite(
        store.folder / "step-1" / "tensors.json",
        lambda content: content["tensors"]["optimizer/0.weight/exp_avg"].update(dtype="float16"),
    )
    reseal(store.folder / "step-1")
    with pytest.raises(
        CheckpointError, match=r"rank-0.safetensors: optimizer/0\.weight/exp_avg is .*F32.* not .*float16"
    ):
        resume(store)


def test_a_checkpoint_of_another_step_than_its_name_is_broken(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1)
    (store.folder / "step-1").rename(store.folder / "step-7")
    with pytest.raises(CheckpointError, match=r"step-7 is broken: state\.json says step 1"):
        resume(store)


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    """F010."""
    store = checkpoints(tmp_path)
    save(store, 1)
    other = new(nn.Sequential(*network(width=5), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError) as caught:
        resume(store, other)
    message = str(caught.value)
    assert "0.weight: (3, 4) in the checkpoint, (5, 4) here" in message
    assert "3.weight: not in the checkpoint" in message
    with pytest.raises(CheckpointError, match=r"2\.bias: torch\.float32 in the checkpoint, torch\.bfloat16 here"):
        resume(store, new(network().bfloat16()))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """F010."""
    store = checkpoints(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="optimizer: AdamW in the checkpoint, SGD here"):
        resume(store, new(make=sgd))


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=2, best="eval/accuracy max")
    save(store, 1, 2, 3, 4, 5, accuracy={1: 0.1, 2: 0.9, 3: 0.2})
    assert complete(store.folder) == ["step-2", "step-4", "step-5"]
    assert store.best() == "step-2"
    low = checkpoints(tmp_path / "low", keep=1, best="eval/accuracy min")
    save(low, 1, 2, 3, accuracy={1: 0.1, 2: 0.9, 3: 0.2})
    assert complete(low.folder) == ["step-1", "step-3"]


def test_what_is_no_checkpoint_takes_the_place_of_none(tmp_path: Path) -> None:
    """F009: `keep` counts what was written to its end."""
    store = checkpoints(tmp_path, keep=1)
    save(store, 5)
    (store.folder / "step-900").mkdir()
    save(store, 6)
    assert complete(store.folder) == ["step-6"]
    assert (store.folder / "step-900").exists(), "what is not ours is not removed"


def test_an_evaluation_may_come_after_the_checkpoint(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, best="eval/accuracy max")
    save(store, 4)
    assert store.best() is None
    store.add_metrics(Progress(step=4, samples_seen=32, metrics={"eval/accuracy": 0.5}))
    assert store.best() == "step-4"
    verify(store.folder / "step-4")
    assert progress_of(store.folder / "step-4").metrics == {"eval/accuracy": 0.5}


HARMS = {
    "missing": "rank-0.safetensors is missing",
    "short": r"rank-0.safetensors has [\d,]+ bytes instead of [\d,]+",
    "zeroed": "rank-0.safetensors has the hash .* instead of",
    "flipped": "rank-0.safetensors has the hash .* instead of",
    "state": "state.json has the hash .* instead of",
    "no manifest": "manifest.json is missing",
    "manifest": "manifest.json cannot be read",
    "manifest flipped": "manifest.json has the hash .* instead of",
    "empty": "manifest.json is missing",
}


def harm(folder: Path, how: str) -> None:
    victim, manifest = folder / "rank-0.safetensors", folder / "manifest.json"
    content = bytearray(victim.read_bytes())
    match how:
        case "missing":
            victim.unlink()
        case "short":
            victim.write_bytes(content[:-1])
        case "zeroed":
            victim.write_bytes(bytes(len(content)))
        case "flipped":
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        case "state":
            text = (folder / "state.json").read_text()
            (folder / "state.json").write_text(text.replace('"samples_seen": 16', '"samples_seen": 17'))
        case "no manifest":
            manifest.unlink()
        case "manifest":
            manifest.write_text('{"files": ')
        case "manifest flipped":
            manifest.write_text(manifest.read_text().replace('"metrics": null', '"metrics": {"eval/loss": 0.0}'))
        case "empty":
            for path in folder.iterdir():
                path.unlink()


@pytest.mark.parametrize("how", HARMS)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    """F009. The broken one is kept aside until newer ones have taken its place."""
    store = checkpoints(tmp_path, keep=2)
    save(store, 1, 2)
    harm(store.folder / "step-2", how)
    again = checkpoints(tmp_path, attempt=2, keep=2)
    choice = choose(again)
    assert choice.name == "step-1"
    [rejected] = choice.rejected
    assert choice.sentence() == f"resumes from step-1; step-2 {rejected.problem}"
    with pytest.raises(BrokenError, match=HARMS[how]):
        raise BrokenError(rejected.problem)
    assert (store.folder / "step-2.broken-2").exists()
    save(again, 2)
    assert complete(store.folder) == ["step-1", "step-2"]
    assert (store.folder / "step-2.broken-2").exists()
    save(again, 3, 4)
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-3", "step-4"]


def test_where_all_are_broken_nothing_starts_from_zero(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1, 2)
    for manifest in store.folder.glob("step-*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be used.*step-2 is broken.*step-1 is broken"):
        choose(checkpoints(tmp_path, attempt=2))
    assert sorted(path.name for path in store.folder.glob("step-*")) == ["step-1", "step-2"]


def test_what_dead_attempts_left_half_written_is_removed_and_said(tmp_path: Path) -> None:
    """F009: half renamed: the folder still has its unfinished name, `latest` has the new one."""
    store = checkpoints(tmp_path)
    save(store, 1)
    for name in ("step-2.tmp-1", "step-0.tmp-deleted"):
        (store.folder / name).mkdir()
        (store.folder / name / "rank-0.safetensors").write_text("half")
    (store.folder / "latest").write_text("step-2\n")
    (store.folder / ".latest.tmp").write_text("st")
    choice = choose(checkpoints(tmp_path, attempt=2))
    assert choice.sentence() == (
        "resumes from step-1; step-2.tmp-1 was not finished, and is removed; latest names step-2, which is not there"
    )
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-1"]
    assert (store.folder / "latest").read_text() == "step-1\n"


def test_nothing_to_resume_from_is_none(tmp_path: Path) -> None:
    assert choose(checkpoints(tmp_path)) == Choice(name=None)


def test_the_state_of_another_run_is_never_taken(tmp_path: Path) -> None:
    """F087."""
    save(checkpoints(tmp_path), 1)
    other = checkpoints(tmp_path, run_id="run-b")
    with pytest.raises(CheckpointError, match="step-1 is of another run: run-a, not run-b"):
        choose(other)


class Bomb:
    """What an attacker pickles: it leaves a file when somebody loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


def bomb(tmp_path: Path) -> bytes:
    return pickle.dumps(Bomb(tmp_path / EXPLODED))


def test_the_bomb_of_these_tests_goes_off(tmp_path: Path) -> None:
    os.close(pickle.loads(bomb(tmp_path)))
    assert (tmp_path / EXPLODED).exists()


@pytest.mark.parametrize("name", [".metadata", "extra.pt", "__0_0.distcp", "rank-1.safetensors"])
def test_a_file_that_the_manifest_does_not_name_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """F018: nobody shall ever load a pickle from a checkpoint of ours."""
    store = checkpoints(tmp_path)
    save(store, 1, 2)
    (store.folder / "step-2" / name).write_bytes(bomb(tmp_path))
    choice = choose(checkpoints(tmp_path, attempt=2))
    assert choice.name == "step-1"
    assert choice.rejected[0].problem == f"is broken: {name} is not in manifest.json"
    assert not (tmp_path / EXPLODED).exists()


@pytest.mark.parametrize("name", [".metadata", "model.pt", "../evil", "/etc/passwd", "sub/rank-0.safetensors"])
def test_a_file_that_no_checkpoint_has_is_refused_though_the_manifest_names_it(tmp_path: Path, name: str) -> None:
    """F018, and paths that lead elsewhere."""
    store = checkpoints(tmp_path)
    save(store, 1, 2)
    folder = store.folder / "step-2"
    known = read_manifest(folder)
    info = durable.FileInfo(size_bytes=3, xxh3_128="0")
    seal(folder, Manifest(files={**known.files, name: info}))
    choice = choose(checkpoints(tmp_path, attempt=2))
    assert choice.name == "step-1"
    assert f"manifest.json names {name!r}, which no checkpoint of ours has" in choice.rejected[0].problem


@pytest.mark.parametrize("name", ["state.json", "tensors.json", "rank-0.safetensors", "manifest.json"])
def test_a_pickle_under_a_good_name_is_never_loaded(tmp_path: Path, name: str) -> None:
    """F018: with a manifest that agrees, too."""
    store = checkpoints(tmp_path)
    save(store, 1)
    folder = store.folder / "step-1"
    (folder / name).write_bytes(bomb(tmp_path))
    if name != "manifest.json":
        reseal(folder)
    with pytest.raises(CheckpointError):
        resume(store)
    assert not (tmp_path / EXPLODED).exists()


@pytest.mark.parametrize("file", ["../../../evil.safetensors", "/etc/passwd", "state.json", "rank-0.safetensors/../x"])
def test_a_list_of_tensors_that_leads_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    """F018."""
    store = checkpoints(tmp_path)
    save(store, 1)

    def lead_away(content: Any) -> None:
        content["tensors"]["model/0.weight"]["chunks"][0]["file"] = file

    rewrite(store.folder / "step-1" / "tensors.json", lead_away)
    reseal(store.folder / "step-1")
    with pytest.raises(CheckpointError, match="is not the name of a file of tensors"):
        resume(store)


def test_a_checkpoint_of_version_0_1_is_refused_in_a_sentence(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    folder = store.folder / "step-1"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(bomb(tmp_path))
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    with pytest.raises(CheckpointError, match="it is of format 1, with pickles in it; this version reads format 2"):
        choose(store)
    with pytest.raises(CheckpointError, match="it is of format 1"):
        resolve_init(str(folder))


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", [OmegaConf.create({"a": 1}), np.float32(1.5), Path("x"), Color.RED, torch.ones(1), float("nan"), {1, 2}]
)
def test_only_plain_values_get_into_the_state(value: object) -> None:
    """F018."""
    with pytest.raises(CheckpointError, match=r"state\.json takes plain values only"):
        plain_json({"value": value})


def test_the_state_says_what_it_is_of(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.record["recipe"] = {"name": "t"}
    save(store, 1)
    state = json.loads((store.folder / "step-1" / "state.json").read_text())
    assert (state["format"], state["step"], state["samples_seen"], state["world_size"]) == (2, 1, 8, 1)
    assert (state["run_id"], state["attempt"], state["torch"]) == ("run-a", 1, torch.__version__)
    assert (state["recipe"], state["scaler"], state["optimizer"]["name"]) == ({"name": "t"}, None, "AdamW")


def test_a_save_that_fails_is_loud_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F084. The disk is full when the tensors are on their way, when the manifest is, when `latest` is."""
    store = checkpoints(tmp_path, keep=1)
    save(store, 1)
    real = os.fsync
    for number in range(1, 9):
        left = [number]

        def full(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match=r"step-2 could not be written .*No space left on device"):
            save(store, 2)
        monkeypatch.setattr(os, "fsync", real)
        assert complete(store.folder)[0] == "step-1", number
        assert not list(store.folder.glob("*.tmp-1")), number
        assert str(choose(checkpoints(tmp_path)).name) in ("step-1", "step-2")
        if (store.folder / "step-2").exists():  # it was on the disk; only the pointer was not
            (store.folder / "step-2").rename(tmp_path / f"step-2-{number}")


def test_an_old_checkpoint_that_cannot_be_removed_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a network disk somebody may have a file of it open: the training need not end for that."""
    store = checkpoints(tmp_path, keep=1)
    save(store, 1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        save(store, 2)
        assert "old checkpoints could not be removed, the next save tries again" in capsys.readouterr().out
        (store.folder / "step-9.tmp-1").mkdir()
        assert "step-9.tmp-1 was not finished, and cannot be removed: " in choose(store).sentence()
    assert (store.folder / "step-1.tmp-deleted").exists()
    save(store, 3)
    assert sorted(path.name for path in store.folder.glob("step-*")) == ["step-3", "step-9.tmp-1"]


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    """F084."""
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(SaveError, match="no checkpoint can be written to"):
        checkpoints(tmp_path)


def test_weights_to_start_from_are_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "run")
    save(store, 1, 2)
    assert resolve_init(str(tmp_path / "run")) == store.folder / "step-2"
    assert resolve_init(str(store.folder / "step-1")) == store.folder / "step-1"
    net = network()
    restore_model(net, store.folder / "step-1", None)
    assert weights_sha256(net) == weights_sha256(trained().net)
    (store.folder / "step-2" / "manifest.json").unlink()
    assert resolve_init(str(tmp_path / "run")) == store.folder / "step-1"
    with pytest.raises(CheckpointError, match="init_from"):
        resolve_init(str(tmp_path / "nothing"))


def test_a_missing_folder_is_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match="is missing"):
        verify(tmp_path / "none")


def test_the_ranks_share_the_reading(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store, 1)
    folder = store.folder / "step-1"
    names = sorted(read_manifest(folder).files)
    harm(folder, "flipped")
    part = names.index("rank-0.safetensors")
    for other in set(range(3)) - {part}:
        verify(folder, part=other, parts=3)
    with pytest.raises(BrokenError, match="hash"):
        verify(folder, part=part, parts=3)


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
