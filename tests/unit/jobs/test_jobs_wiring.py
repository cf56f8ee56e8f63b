"""What a recipe says reaches torch: options whose effect is on a GPU, or in the time and memory of many ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import jobs.layers
import jobs.making
import jobs.profiling
from jobs import registry
from jobs.data.base import TensorSamples
from jobs.feed import SideStream, beside
from jobs.layers import compiled_record
from jobs.loader import Loader
from jobs.making import make_loader, place_on_mesh
from jobs.memory_use import Use, measure_use
from jobs.mesh import Grid
from jobs.models.gpt import gpt
from jobs.models.mlp import mlp
from jobs.parallel.base import Pass, Shared
from jobs.parallel.pipeline import Pipeline, cut
from jobs.parallel.split import split
from jobs.sampler import Sampler
from jobs.world import World, pick_device
from launcher.recipe.catalog import catalog
from launcher.recipe.degrees import Degrees
from launcher.recipe.schema import Recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
TWO = Grid(degrees=Degrees(dp=2), rank=0)


class FakeDDP(nn.Module):
    """Notes what DistributedDataParallel would get."""

    made: dict[str, Any]
    hook: tuple[Any, Any] | None = None

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.made = module, options

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = state, hook


@pytest.fixture
def fake_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.parallel.ddp.DistributedDataParallel", FakeDDP)
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)


def ddp(device: torch.device, net: nn.Module | None = None, **options: Any) -> FakeDDP:
    shared: Shared = registry.build("strategy", "ddp", options, net or mlp(), TWO, device)
    assert isinstance(shared.forward, FakeDDP)
    return shared.forward


@pytest.mark.usefixtures("fake_ddp")
def test_options_of_ddp_are_those_of_torch() -> None:
    given = {"bucket_cap_mb": 7, "static_graph": True, "find_unused_parameters": True}
    made = ddp(CPU, **given).made
    assert made == {**given, "device_ids": None, "gradient_as_bucket_view": True, "forward_sync_buffers": False}
    made = ddp(GPU).made
    assert (made["device_ids"], made["bucket_cap_mb"]) == ([1], 25)
    assert not made["static_graph"]
    assert not made["find_unused_parameters"]


@pytest.mark.usefixtures("fake_ddp")
def test_gradients_travel_as_the_recipe_says() -> None:
    assert ddp(GPU).hook is None
    assert ddp(CPU, comm="fp16").hook == (None, default_hooks.fp16_compress_hook)
    assert ddp(GPU, comm="bf16").hook == (None, default_hooks.bf16_compress_hook)
    found = ddp(GPU, comm="powersgd", powersgd_rank=3, powersgd_start=5).hook
    assert found is not None
    state, hook = found
    assert hook is powerSGD_hook.powerSGD_hook
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (3, 5)


@pytest.mark.usefixtures("fake_ddp")
def test_batch_norm_over_all_ranks_is_that_of_torch() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    wrapped = ddp(GPU, net, sync_batchnorm=True)
    assert isinstance(wrapped.module, nn.Sequential)
    assert isinstance(wrapped.module[1], nn.SyncBatchNorm)
    assert isinstance(wrapped.module[0], nn.Conv2d)


class Mesh:
    """Stands for a device mesh: an axis is its name."""

    def __getitem__(self, names: Any) -> Any:
        return names


def sharded(name: str, degrees: Degrees, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Shared, list[Any]]:
    calls: list[Any] = []
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, **how: calls.append((module, how)))
    grid = Grid(degrees=degrees, rank=0, mesh=Mesh())  # type: ignore[arg-type]
    net = gpt(layers=2, width=8, heads=2)
    shared: Shared = registry.build("strategy", name, options, net, grid, CPU)
    assert calls[-1][0] is net
    return shared, calls


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_layers_are_sharded_one_by_one_as_the_recipe_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    degrees, mesh = (Degrees(fsdp=2), "fsdp") if name == "fsdp" else (Degrees(dp=2, fsdp=2), ("dp", "fsdp"))
    _, calls = sharded(name, degrees, monkeypatch)
    assert [type(module).__name__ for module, _ in calls[:-1]] == ["Embed", "Block", "Block", "LayerNorm", "Linear"]
    assert {how["mesh"] for _, how in calls} == {mesh}
    assert {how.get("reshard_after_forward") for _, how in calls[:-1]} == {True}
    assert {how["mp_policy"].param_dtype for _, how in calls} == {None}
    _, calls = sharded(name, degrees, monkeypatch, reshard_after_forward=False, gather="bf16")
    assert {how.get("reshard_after_forward") for _, how in calls[:-1]} == {False}
    assert {(how["mp_policy"].param_dtype, how["mp_policy"].reduce_dtype) for _, how in calls} == {
        (torch.bfloat16, torch.float32)
    }


def test_gradients_of_shards_travel_with_the_last_micro_batch_or_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr("jobs.parallel.mixed.set_gradient_sync", lambda _net, wanted: told.append(wanted))
    for options, expected in (({}, [False, True]), ({"sync_each_batch": True}, [True, True])):
        shared, _ = sharded("fsdp", Degrees(fsdp=2), monkeypatch, **options)
        told.clear()
        for is_last in (False, True):
            with shared.sync(is_last):
                pass
        assert told == expected


def test_gradients_of_replicas_travel_with_the_last_micro_batch_alone() -> None:
    """`accumulate` costs no message: DistributedDataParallel is told so around forward and backward."""
    story: list[str] = []

    class Told(nn.Linear):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            story.append("keep")
            yield
            story.append("kept")

        def forward(self, inputs: Tensor) -> Tensor:
            story.append("forward")
            return super().forward(inputs)

    batch = (torch.ones(2, 3), torch.zeros(2, 1))
    Shared(net := Told(3, 1), net).run(
        Pass(
            batches=iter([batch] * 3),
            count=3,
            counted=3,
            loss=lambda outputs, targets: (outputs - targets).square().sum(),
            scaled=lambda loss: loss,
            precision=nullcontext,
            before_forward=lambda: None,
            before_last_backward=lambda total: story.append("loss"),
        )
    )
    assert story == ["keep", "forward", "kept"] * 2 + ["forward", "loss"]


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_the_order_of_a_pipeline_is_that_of_the_recipe(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for name in ("Schedule1F1B", "ScheduleGPipe"):
        monkeypatch.setattr(
            f"torch.distributed.pipelining.{name}", lambda *_, name=name, **how: made.append((name, how))
        )
    monkeypatch.setattr("torch.distributed.pipelining.PipelineStage", lambda *_, **__: "stage")
    degrees = Degrees(pp=2)
    grid = SimpleNamespace(axis=lambda _: SimpleNamespace(get_group=lambda: None), pipeline=order)
    stage = cut(gpt(layers=2, width=8, heads=2), Grid(degrees=degrees, rank=0))
    pipeline = Pipeline(stage, grid, CPU)  # type: ignore[arg-type]
    pipeline._plan(4, torch.zeros(2, 6, dtype=torch.long))
    ((name, how),) = made
    assert name == {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}[order]
    assert how["n_microbatches"] == 4


def job(**sections: Any) -> Any:
    document = {"name": "x", "model": {"name": "mlp"}, "train": {"until": "1 step", "accumulate": 2}}
    data = {"name": "mnist", "global_batch_size": 8, **sections.pop("data", {})}
    recipe = Recipe.model_validate({**document, "data": data, **sections})
    return SimpleNamespace(recipe=recipe, data=recipe.data, train=recipe.train)


def test_degrees_and_the_order_of_a_pipeline_come_to_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.making, "make_grid", lambda degrees, *_, **how: (degrees, how["pipeline"]))
    world = World(rank=0, size=4, local_rank=0, local_size=4)
    found = place_on_mesh(job(parallelism={"pp": 2, "dp": 2, "pipeline": "gpipe"}), world, CPU)
    assert found == (Degrees(pp=2, dp=2), "gpipe")  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("device", "wanted", "pins"),
    [(GPU, "auto", True), (GPU, True, True), (GPU, False, False), (CPU, "auto", False), (CPU, True, False)],
)
def test_the_loader_is_that_of_the_recipe(
    device: torch.device, wanted: Any, *, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.making, "Loader", lambda *_, **how: how)
    made: Any = make_loader(
        job(data={"loader_workers": 3, "prefetch": 5, "pin_memory": wanted}),
        SimpleNamespace(train=None),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        samples_seen=24,
        device=device,
    )
    assert made == {"samples_seen": 24, "loader_workers": 3, "prefetch": 5, "pin_memory": pins}


def test_loader_processes_live_as_long_as_the_training() -> None:
    class Asked(TensorSamples):
        def __getitems__(self, indices: Tensor | list[int]) -> tuple[Tensor, Tensor]:
            return torch.full((len(indices),), os.getpid()), torch.zeros(len(indices))

    samples = Asked(torch.zeros(6), torch.zeros(6))
    loader = Loader(samples, Sampler(num_samples=6, global_batch_size=3, seed=0), loader_workers=1)
    pids = {int(pid) for inputs, _ in loader.take(8) for pid in inputs}  # four epochs
    loader.close()
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_batches_are_copied_beside_the_computing_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    assert isinstance(beside(GPU), SideStream)
    assert beside(CPU) is None


def test_what_was_copied_beside_may_be_read_after_the_copy_and_is_not_given_away_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[Any] = []
    computing = SimpleNamespace(wait_stream=lambda stream: story.append(("waits for", stream)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    batch = tuple(SimpleNamespace(record_stream=lambda s, n=n: story.append((n, s is computing))) for n in range(2))
    SideStream(GPU).hand_over(batch)  # type: ignore[arg-type]
    assert story == [("waits for", "side"), (0, True), (1, True)]


def test_each_rank_of_a_node_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    worlds = [World(rank=4 + rank, size=8, local_rank=rank, local_size=4) for rank in range(4)]
    assert [pick_device("auto", world).index for world in worlds] == [0, 1, 2, 3]
    assert [device.index for device in current] == [0, 1, 2, 3]


def test_copies_in_one_process_are_on_all_gpus_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(nn, "DataParallel", lambda net, device_ids: SimpleNamespace(ids=device_ids))
    for device, expected in ((torch.device("cuda", 0), [0, 1, 2]), (GPU, [1, 0, 2]), (CPU, None)):
        shared: Shared = registry.build("strategy", "data_parallel", {}, mlp(), TWO, device)
        assert shared.forward == SimpleNamespace(ids=expected)


def test_a_model_is_split_over_as_many_gpus_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("jobs.parallel.split.Split", lambda _, devices: found.append([each.index for each in devices]))
    for devices in (0, 1, 2):
        split(mlp(), TWO, GPU, devices=devices)
    assert found == [[1, 0, 2], [1], [1, 0]]
    with pytest.raises(registry.OptionError, match=r"parallelism\.devices: 4; CUDA devices here: 3"):
        split(mlp(), TWO, GPU, devices=4)


@pytest.mark.parametrize(
    "name", [name for name, entry in catalog("models").items() if entry.option("inplace") is not None]
)
def test_activations_overwrite_their_input_where_the_recipe_says_so(name: str) -> None:
    for inplace in (False, True):
        net: nn.Module = registry.build("model", name, {"inplace": inplace})
        assert {each.inplace for each in net.modules() if isinstance(each, nn.ReLU)} == {inplace}


def test_what_comes_after_the_first_step_is_a_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.layers, "counters", {"stats": {"unique_graphs": 9}, "graph_break": {"a": 1, "b": 1}})
    monkeypatch.setattr(jobs.layers, "calculate_time_spent", lambda: {"total_wall_time": 4.25})
    assert compiled_record(6) == {"graphs": 9, "recompiles": 3, "graph_breaks": 2, "time_s": 4.2}
    monkeypatch.setattr(jobs.layers, "counters", {"stats": {"unique_graphs": 0}, "graph_break": {}})
    assert compiled_record(0) is None


def test_the_memory_of_a_gpu_is_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.current": 1, "allocated_bytes.all.peak": 2, "reserved_bytes.all.peak": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert measure_use(GPU) == Use(now=1, peak=2, reserved=3)
    assert measure_use(GPU).to_record() == {"used_bytes": 1, "peak_bytes": 2, "reserved_bytes": 3}


def test_the_history_of_the_memory_of_a_gpu_is_recorded_for_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: story.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(jobs.profiling, "record_memory_history", lambda: story.append("record"))
    monkeypatch.setattr(jobs.profiling, "dump_memory_history", story.append)
    tool = jobs.profiling._make_tool("memory", tmp_path / "attempt-1-rank-0", GPU)
    assert tool is not None
    tool.warm_up()
    tool.begin()
    assert tool.end() == {"peak_bytes": 7, "files": {"snapshot": "attempt-1-rank-0.memory.pickle"}}
    assert story == ["reset", "record", tmp_path / "attempt-1-rank-0.memory.pickle"]
