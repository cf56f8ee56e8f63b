"""What strategies are made of, without processes: cuts, plans, places, and what is said where they do not fit."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jobs import registry
from jobs.mesh import AXES, Grid, rank_at
from jobs.models.gpt import gpt
from jobs.models.mlp import mlp
from jobs.parallel.balance import balanced
from jobs.parallel.base import Pass, Shared
from jobs.parallel.mixed import layers_of
from jobs.parallel.pipeline import Shapes, cut
from jobs.parallel.split import Split
from jobs.parallel.tensor import check_plan, find_plan
from jobs.registry import OptionError
from jobs.sampler import Sampler
from launcher.recipe.degrees import Degrees

ONE = Grid(degrees=Degrees(), rank=0)
CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 4))
def test_parts_follow_each_other_and_none_could_be_smaller(sizes: list[int], parts: int) -> None:
    if sum(1 for size in sizes if size) < parts:
        with pytest.raises(ValueError, match="layers with parameters"):
            balanced(sizes, parts)
        return
    found = balanced(sizes, parts)
    assert [index for part in found for index in part] == list(range(len(sizes)))
    all_ways = [
        [sum(sizes[start:stop]) for start, stop in pairwise((0, *ends, len(sizes)))]
        for ends in combinations(range(1, len(sizes)), parts - 1)
    ]
    best = min(max(way) for way in all_ways if all(way))
    assert max(sum(sizes[part.start : part.stop]) for part in found) == best


def test_places_and_ranks_are_the_same_thing() -> None:
    degrees = Degrees(pp=2, dp=3, fsdp=2, tp=2)
    grids = [Grid(degrees=degrees, rank=rank) for rank in range(degrees.size)]
    assert [rank_at(degrees, grid.place) for grid in grids] == list(range(24))
    for grid in grids:
        first = grids[grid.data_first]
        assert first.data_rank == 0
        assert all(first.place[axis] == grid.place[axis] for axis in ("pp", "tp"))
    assert set(AXES) == set(grids[0].place)


def test_pairs_of_linear_layers_are_shared_out_and_nothing_else() -> None:
    assert find_plan(mlp(layers=2)) == {"1": "colwise", "3": "rowwise"}
    assert find_plan(mlp(layers=3, dropout=0.1)) == {"1": "colwise", "4": "rowwise", "7": "colwise", "10": "rowwise"}
    mixing = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert find_plan(mixing) == {"2": "colwise", "4": "rowwise"}
    assert find_plan(nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 4))) == {}


def test_a_block_says_itself_how_it_is_shared_out() -> None:
    plan = find_plan(gpt(layers=2, width=8, heads=2))
    assert plan["block1.attn.q"] == "colwise"
    assert plan["block1.attn.proj"] == "rowwise"
    assert len(plan) == 12


def test_sizes_that_do_not_divide_are_all_named() -> None:
    net = mlp(in_features=6, hidden=9, layers=2)
    with pytest.raises(
        OptionError, match=r"tp: 2 does not divide all layers: layer 1 has 9 outputs; layer 3 has 9 inp"
    ):
        check_plan(net, 2)
    check_plan(net, 3)
    with pytest.raises(OptionError, match="no layers that can be shared out"):
        check_plan(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), 2)


@pytest.mark.parametrize("make", [lambda: mlp(layers=3), lambda: gpt(layers=3, width=8, heads=2)])
def test_stages_have_all_layers_once_under_their_names(make: object) -> None:
    net = make()  # type: ignore[operator]
    names = set(net.state_dict())
    stages = [cut(net, Grid(degrees=Degrees(pp=3), rank=rank)) for rank in range(3)]
    held = [set(stage.net.state_dict()) for stage in stages]
    assert set.union(*held) == names
    assert sum(map(len, held)) == len(names)
    for stage, names_here in zip(stages, held, strict=True):
        assert stage.elsewhere == names - names_here


def test_shapes_between_stages_are_known_without_numbers() -> None:
    net = gpt(layers=2, width=8, heads=2, vocabulary=11, context=6)
    assert isinstance(net, nn.Sequential)
    shapes = Shapes(net, [range(2), range(2, 4), range(4, 5)])
    tokens = torch.zeros(5, 6, dtype=torch.int64)
    before, after = shapes.around(1, tokens)
    assert (before.shape, before.dtype) == ((5, 6, 8), torch.float32)
    assert after.device.type == "meta"
    assert shapes.around(0, tokens)[0].dtype == torch.int64
    assert shapes.around(2, tokens)[1].shape == (5, 6, 11)
    assert {each.device.type for each in net.parameters()} == {"cpu"}


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    grid = Grid(degrees=Degrees(pp=2), rank=0)
    with pytest.raises(
        OptionError, match=r"parallelism\.pp: 2 cuts between the layers of an nn\.Sequential, and .* Linear"
    ):
        cut(nn.Linear(2, 2), grid)
    with pytest.raises(OptionError, match=r"parallelism\.pp: 2 parts, and 1 layers with parameters"):
        cut(mlp(layers=0), grid)
    with pytest.raises(OptionError, match="layers embed and head share a parameter"):
        cut(gpt(layers=1, width=8, heads=2, tie_weights=True), grid)


def test_what_is_gathered_at_once_shares_no_parameter_with_another() -> None:
    assert len(layers_of(gpt(layers=3, width=8, heads=2))) == 6
    tied = gpt(layers=3, width=8, heads=2, tie_weights=True)
    assert [type(layer).__name__ for layer in layers_of(tied)] == ["Block", "Block", "Block", "LayerNorm"]

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    assert len(layers_of(Listed())) == 3


def test_between_two_devices_the_activations_move() -> None:
    """The second device is one without numbers: what it computes says where it was."""
    net = mlp(in_features=6, hidden=5, layers=1, classes=3)
    assert isinstance(net, nn.Sequential)
    shared = Split(net, [CPU, torch.device("meta")])
    assert [each.device.type for each in net.parameters()] == ["cpu", "cpu", "meta", "meta"]
    outputs = net(torch.zeros(2, 6))
    assert outputs.device.type == "meta"
    seen: list[str] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(targets.device.type)
        return torch.zeros(())

    work = Pass(
        batches=iter([]),
        count=0,
        counted=0,
        loss=loss,
        scaled=lambda value: value,
        precision=lambda: torch.autocast("cpu", enabled=False),
        before_forward=lambda: None,
        before_last_backward=lambda total: None,
    )
    shared.loss(work, outputs, torch.zeros(2))
    assert seen == ["meta"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ddp", {"sync_batchnorm": True}, r"parallelism\.sync_batchnorm: true, on CPU"),
        ("split", {"devices": 9}, r"parallelism\.devices: 9 parts, and 3 layers with parameters"),
    ],
)
def test_options_that_do_not_go_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        registry.build("strategy", name, options, mlp(), ONE, CPU)


def test_on_cpu_data_parallel_is_single_and_says_so() -> None:
    shared: Shared = registry.build("strategy", "data_parallel", {}, mlp(), ONE, CPU)
    assert "the same as single" in shared.remarks[0]
    assert shared.forward(torch.zeros(2, 784)).shape == (2, 10)


@given(
    st.integers(1, 40), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]),
)  # fmt: skip
def test_all_ranks_make_equally_many_micro_batches(samples: int, world: int, accumulate: int, micro: int) -> None:
    """A forward of sharded layers waits for the other ranks: one that makes fewer would leave them waiting."""
    sizes = {"global_batch_size": world * accumulate * micro, "accumulate": accumulate, "world_size": world}
    samplers = [Sampler(num_samples=samples, seed=3, rank=rank, **sizes) for rank in range(world)]
    seen = 0
    while seen < samples:
        shares = [sampler.share(seen) for sampler in samplers]
        assert len({len(share.micro_batches) for share in shares}) == 1
        counted = [
            index for share in shares for batch in share.micro_batches[: share.counted] for index in batch.tolist()
        ]
        assert sorted(counted) == sorted(samplers[0].batch(seen).tolist())
        assert all(len(batch) for share in shares for batch in share.micro_batches)
        seen += shares[0].global_count


def test_what_comes_from_another_rank_is_not_overwritten() -> None:
    with pytest.raises(OptionError, match=r"parallelism\.tp: 2, and what comes out of 1, 3 is overwritten"):
        check_plan(mlp(inplace=True), 2)
    check_plan(mlp(), 2)
    row = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    grid = Grid(degrees=Degrees(pp=2), rank=0)
    with pytest.raises(OptionError, match=r"parallelism\.pp: 2, and layer 1, with which a stage begins"):
        cut(row, grid)
    cut(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), grid)
