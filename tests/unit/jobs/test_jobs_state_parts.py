"""A state of which ranks hold parts, and optimizers whose groups are of our making: what is saved, and what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.mesh import Grid
from jobs.models.mlp import mlp
from jobs.optim import adamw
from jobs.parallel.pipeline import cut
from jobs.state import DifferenceError, TrainingState, restore_model, together
from jobs.weights import weights_sha256
from jobs.whole import layout_alone, write_whole
from launcher.recipe.degrees import Degrees


def new(*, groups: int = 1) -> TrainingState:
    net = mlp(in_features=6, hidden=5, layers=2, classes=3)
    parameters = list(net.parameters())
    listed: Any = parameters if groups == 1 else [{"params": parameters[k::groups]} for k in range(groups)]
    return TrainingState(net, adamw(listed))


def train(state: TrainingState) -> None:
    state.net(torch.ones(2, 6)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def write(state: TrainingState, folder: Path) -> Path:
    layout = layout_alone(state.tensors(), 0)
    write_whole(folder, "step-1", layout, layout.parts(state.tensors()), state="{}", metrics=None, attempt=1)
    return folder / "step-1"


def stage_of(state: TrainingState, rank: int) -> TrainingState:
    """One of two stages of a network of the same kind."""
    stage = cut(state.net, Grid(degrees=Degrees(pp=2), rank=rank))
    return TrainingState(stage.net, adamw(stage.net.parameters()), elsewhere=stage.elsewhere)


def test_groups_that_are_alike_are_saved_as_one_and_fit_any_number(tmp_path: Path) -> None:
    """How many there are depends on the strategy, and a checkpoint goes from one to another."""
    state = new(groups=3)
    train(state)
    numbers = state.numbers()
    assert numbers["groups"] == [{}]
    for groups in (1, 2):
        other = new(groups=groups)
        other.restore(write(state, tmp_path / str(groups)), numbers, None, alone=True)
        assert weights_sha256(other.net) == weights_sha256(state.net)
        assert len(other.optimizer.state) == len(state.optimizer.state) == 6


def test_groups_that_a_person_made_are_kept_apart() -> None:
    net = mlp(in_features=6, hidden=5, layers=1, classes=3)
    first, *rest = net.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}])
    assert TrainingState(net, optimizer).numbers()["groups"] == [{}, {}]


def test_a_stage_takes_its_part_of_a_whole_checkpoint_and_gives_it_back(tmp_path: Path) -> None:
    state = new()
    train(state)
    folder, stages = write(state, tmp_path), [stage_of(new(), rank) for rank in range(2)]
    for stage in stages:
        stage.restore(folder, state.numbers(), None, alone=True)
        assert not stage.is_whole
    assert together(stage.numbers() for stage in stages) == state.numbers()
    tensors = {name: tensor for stage in stages for name, tensor in stage.tensors().items()}
    assert tensors.keys() == state.tensors().keys()
    assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in tensors.items())


def test_what_no_stage_has_is_still_a_difference(tmp_path: Path) -> None:
    state = new()
    train(state)
    folder = write(state, tmp_path)
    larger = TrainingState(net := mlp(in_features=6, hidden=5, layers=3, classes=3), adamw(net.parameters()))
    with pytest.raises(DifferenceError, match="not in the checkpoint"):
        stage_of(larger, 1).restore(folder, state.numbers(), None, alone=True)
    smaller = mlp(in_features=6, hidden=5, layers=1, classes=3)
    stage = cut(smaller, Grid(degrees=Degrees(pp=2), rank=0))
    with pytest.raises(DifferenceError, match=r"5\.bias: not in the model"):
        restore_model(stage.net, folder, None, stage.elsewhere)


def test_weights_to_start_from_are_read_by_each_stage(tmp_path: Path) -> None:
    state = new()
    folder = write(state, tmp_path)
    for rank in range(2):
        stage = cut(
            nn.Sequential(*mlp(in_features=6, hidden=5, layers=2, classes=3)), Grid(degrees=Degrees(pp=2), rank=rank)
        )
        for parameter in stage.net.parameters():
            nn.init.zeros_(parameter)
        restore_model(stage.net, folder, None, stage.elsewhere)
        whole = state.net.state_dict()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in stage.net.state_dict().items())
