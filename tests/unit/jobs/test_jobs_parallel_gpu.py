"""What one GPU is enough for: where layers and copies of them lie, and that the numbers are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs import registry
from jobs.mesh import Grid, make_grid
from jobs.models.gpt import gpt
from jobs.models.mlp import mlp
from jobs.parallel.base import Pass, Shared
from jobs.parallel.mixed import shard_layers
from jobs.parallel.split import Split
from jobs.parallel.tensor import share_layers
from jobs.world import World
from launcher.recipe.degrees import Degrees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONE = Grid(degrees=Degrees(), rank=0)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank=0, size=1, local_rank=0, local_size=1)
    dist.destroy_process_group()


def gradients(shared: Shared, inputs: torch.Tensor) -> list[torch.Tensor]:
    shared.forward(inputs).float().square().mean().backward()
    return [each.grad.cpu() for each in shared.net.parameters() if each.grad is not None]


def test_between_a_gpu_and_the_host_the_activations_move() -> None:
    torch.manual_seed(0)
    net, inputs = mlp(in_features=6, hidden=5, layers=1, classes=3), torch.randn(4, 6)
    expected = gradients(Shared(net), inputs)
    net.zero_grad()
    assert isinstance(net, nn.Sequential)
    shared = Split(net, [torch.device("cuda", 0), torch.device("cpu")])
    assert [each.device.type for each in net.parameters()] == ["cuda", "cuda", "cpu", "cpu"]
    assert shared.evaluate(inputs.cuda()).device.type == "cuda"
    for one, other in zip(gradients(shared, inputs.cuda()), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    net.zero_grad()
    batch = (inputs.cuda(), torch.zeros(4, 3, device="cuda"))
    told: list[torch.Tensor] = []
    work = Pass(
        batches=iter([batch]),
        count=1,
        counted=1,
        loss=lambda outputs, targets: (outputs - targets).square().mean(),
        scaled=lambda loss: loss,
        precision=nullcontext,
        before_forward=lambda: None,
        before_last_backward=told.append,
        loss_gradient=torch.ones((), device="cuda"),
    )
    shared.run(work)
    assert told[0].device.type == "cuda"


def test_copies_in_one_process_have_the_gradients_of_one() -> None:
    torch.manual_seed(0)
    net, inputs = mlp(in_features=6, hidden=5, classes=3), torch.randn(4, 6)
    expected = gradients(Shared(net), inputs)
    net.zero_grad()
    shared: Shared = registry.build("strategy", "data_parallel", {}, net, ONE, torch.device("cuda", 0))
    assert shared.remarks == ()
    for one, other in zip(gradients(shared, inputs.cuda()), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("comm", ["fp16", "bf16"])
def test_gradients_travel_in_16_bits(world: World, comm: str) -> None:
    """One rank is enough to see that they were rounded."""
    torch.manual_seed(0)
    net = mlp(in_features=6, hidden=5, classes=3)
    shared: Shared = registry.build("strategy", "ddp", {"comm": comm}, net, ONE, torch.device("cuda", 0))
    dtype = torch.float16 if comm == "fp16" else torch.bfloat16
    found = gradients(shared, torch.randn(4, 6, device="cuda"))
    assert all(torch.equal(each, each.to(dtype).float()) for each in found)


def test_batch_norm_is_that_of_all_ranks(world: World) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    shared: Shared = registry.build("strategy", "ddp", {"sync_batchnorm": True}, net, ONE, torch.device("cuda", 0))
    assert isinstance(shared.net[1], nn.SyncBatchNorm)  # type: ignore[index]
    gradients(shared, torch.randn(4, 6, device="cuda"))


def test_layers_come_to_the_gpu_as_they_are_divided(world: World) -> None:
    torch.manual_seed(0)
    net, tokens = gpt(layers=2, width=8, heads=2, vocabulary=9, context=6), torch.randint(9, (3, 6))
    expected = gradients(Shared(net), tokens)
    net.zero_grad()
    whole = make_grid(Degrees(fsdp=1, tp=1), world, "cuda")
    assert whole.mesh is None
    mesh = dist.init_device_mesh("cuda", (1, 1, 1, 1), mesh_dim_names=("pp", "dp", "fsdp", "tp"))
    grid = Grid(degrees=Degrees(), rank=0, mesh=mesh)
    share_layers(net, grid)
    shard_layers(net, grid)
    net.to("cuda")
    assert {each.device.type for each in net.parameters()} == {"cuda"}
    found = [
        each.full_tensor().cpu() if hasattr(each, "full_tensor") else each
        for each in gradients(Shared(net), tokens.cuda())
    ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
