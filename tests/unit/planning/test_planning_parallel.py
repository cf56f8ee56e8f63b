"""What a training asks of its ranks, its model and its devices, before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planning_values import env, facts, job, plan

from launcher.errors import Problem, RecipeError
from launcher.planning.render import render_plan
from launcher.recipe.schema import Recipe

GPT: dict[str, Any] = {
    "model": {"name": "gpt", "heads": 6, "layers": 3, "width": 96},
    "data": {"name": "text", "global_batch_size": 240},
}


def problems(recipe: Recipe, executor: str = "local", **on: Any) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        plan(recipe, facts(**on), executor=executor)
    return caught.value.problems


def problem(recipe: Recipe, executor: str = "local", **on: Any) -> tuple[str, str]:
    (found,) = problems(recipe, executor, **on)
    return found.message, found.hint


def train(**keys: Any) -> dict[str, Any]:
    return {"until": "1 epoch", **keys}


def test_degrees_are_held_against_the_world_size() -> None:
    model = {"name": "mlp", "hidden": 120}
    message, hint = problem(job(model=model, resources={"nodes": 2, "nproc_per_node": 2}, parallelism={"tp": 3}))
    assert message == ("parallelism: the world size is 4, which does not divide by tp 3 (nodes 2 x nproc_per_node 2)")
    assert hint == "nodes x nproc_per_node has to be a multiple of 3"
    message, hint = problem(job(parallelism={"dp": 2, "tp": 2}))
    assert message.startswith("parallelism: the world size is 1, which does not divide by tp 2 (nodes 1 x ")
    assert message.endswith("nproc_per_node 1, auto: one on CPU)")


def test_degrees_fit_every_number_of_nodes_that_a_range_may_leave() -> None:
    recipe = job(resources={"nodes": "1:4", "nproc_per_node": 2}, parallelism={"tp": 4}, batch=24)
    message, _ = problem(recipe)
    assert "(nodes 3, of 1:4 x nproc_per_node 2); nor does it fit 1 of 1:4 nodes" in message
    fits = plan(job(resources={"nodes": "1:4", "nproc_per_node": 2}, parallelism={"tp": 2}, batch=24), facts())
    assert fits.is_elastic
    assert "strategy ddp: dp 1 to 4 x tp 2\n" in render_plan(fits)


@pytest.mark.parametrize("strategy", ["single", "data_parallel", "split"])
@pytest.mark.parametrize("resources", [{"nproc_per_node": 2}, {"nodes": 2}])
def test_strategies_of_one_process_have_one_worker(strategy: str, resources: dict[str, int]) -> None:
    message, hint = problem(job(parallelism={"strategy": strategy}, resources=resources))
    assert message.startswith(f"parallelism.strategy: {strategy} is one ")
    assert "the world size is 2 (nodes" in message
    assert hint == "strategy: ddp, or nodes: 1 and nproc_per_node: 1"


def test_the_batch_is_divided_by_the_ranks_that_have_other_samples() -> None:
    recipe = job(resources={"nproc_per_node": 4}, parallelism={"tp": 2}, batch=6)
    assert plan(recipe, facts()).world_size == 4
    message, hint = problem(job(resources={"nproc_per_node": 4}, parallelism={"tp": 2}, batch=7))
    assert message == (
        "data.global_batch_size: 7 does not divide by 2 = 2 data-parallel ranks (world size 4 by tp 2) "
        "(nodes 1 x nproc_per_node 4) x train.accumulate 1"
    )
    assert hint == "the nearest that do: 6 or 8"


def test_tensor_parallel_divides_what_the_model_says() -> None:
    recipe = job(**GPT, resources={"nproc_per_node": 4}, parallelism={"tp": 4})
    message, hint = problem(recipe)
    assert message == "parallelism.tp: 4 does not divide model.heads, which is 6"
    assert hint == "tp: one of 1, 2, 3, 6; or heads: 8"
    default = job(model={"name": "gpt"}, resources={"nproc_per_node": 3}, parallelism={"tp": 3})
    assert "model.heads, which is 4" in problem(default)[0]


def test_models_that_tensor_parallel_cannot_share_out() -> None:
    message, hint = problem(job(model={"name": "resnet18"}, resources={"nproc_per_node": 2}, parallelism={"tp": 2}))
    assert message == "parallelism.tp: 2, and `resnet18` has no layers that several ranks could compute together"
    assert hint == "tp: 1; models that have: convnet, gpt, mlp"
    assert plan(job(model={"name": "resnet18"}), facts()).world_size == 1


def test_options_that_go_with_no_division_of_the_model() -> None:
    recipe = job(
        model={"name": "gpt", "tie_weights": True},
        resources={"nproc_per_node": 4},
        parallelism={"tp": 2, "comm": "fp16", "bucket_cap_mb": 25},
    )
    tied, comm = sorted(problems(recipe), key=lambda each: each.message)
    assert tied.message == "model.tie_weights: true, and parallelism divides the model (tp 2, pp 1)"
    assert comm.message == "parallelism.comm: fp16 is of ddp alone, and parallelism has tp 2"


def test_parts_of_a_state_are_kept_by_nobody() -> None:
    for keys in ({"strategy": "fsdp"}, {"strategy": "hsdp"}, {"tp": 2}, {"pp": 2}):
        recipe = job(parallelism=keys, resources={"nproc_per_node": 2}, train=train(accumulate=2))
        made = plan(recipe, facts())
        assert not made.rescue
        value = next(value for value in made.values if value.key == "faults.rescue")
        assert value.origin == "auto: each rank has a part of the state alone"
    keys = {"faults": {"rescue": True}, "checkpoint": {"memory_every": "5 steps"}}
    rescue, memory = problems(job(parallelism={"strategy": "fsdp"}, **keys))
    assert rescue.message.startswith("faults.rescue: true, and with strategy fsdp no rank has all of the state")
    assert memory.message.startswith("checkpoint.memory_every: 5 steps, and with strategy fsdp no rank has all")
    assert plan(job(resources={"nproc_per_node": 2}, **keys), facts()).rescue


def test_every_stage_has_a_layer_and_a_micro_batch() -> None:
    recipe = job(**GPT, resources={"nproc_per_node": 4}, parallelism={"pp": 4}, train=train(accumulate=2))
    layers, accumulate = sorted(each.message for each in problems(recipe))
    assert layers == "parallelism.pp: 4 stages, and model.layers is 3: a stage has at least one"
    assert accumulate == "train.accumulate: 2 micro-batches for parallelism.pp: 4 stages"
    fits = job(**GPT, resources={"nproc_per_node": 3}, parallelism={"pp": 3}, train=train(accumulate=3))
    assert "strategy ddp: pp 3\n" in render_plan(plan(fits, facts()))


def test_all_of_it_is_said_at_once() -> None:
    recipe = job(
        **{**GPT, "data": {"name": "text", "global_batch_size": 7}},
        resources={"nproc_per_node": 8, "device": "cpu"},
        parallelism={"tp": 4, "pp": 2, "sync_batchnorm": True},
        profiler={"tool": "memory", "steps": "9-3"},
    )
    keys = {each.message.partition(":")[0] for each in problems(recipe)}
    assert keys >= {"parallelism.tp", "train.accumulate", "parallelism.sync_batchnorm", "profiler.tool"}
    assert "profiler.steps" in keys


def test_what_cpus_cannot_do_is_an_error_and_what_is_idle_there_a_remark() -> None:
    message, hint = problem(job(parallelism={"sync_batchnorm": True}))
    assert message.startswith("parallelism.sync_batchnorm: true, and the device is cpu (this machine has no GPU)")
    assert hint == "sync_batchnorm: false, or device: cuda"
    assert plan(job(parallelism={"sync_batchnorm": True}), facts(gpus=1)).device == "cuda"
    idle = job(train=train(precision="fp16", compile=True), resources={"alloc": "expandable_segments"})
    notes = " ".join(plan(idle, facts()).notes)
    assert all(key in notes for key in ("train.precision: fp16", "train.compile", "resources.alloc"))
    assert "train.precision: tf32 is of GPUs" in " ".join(plan(job(train=train(precision="tf32")), facts()).notes)
    assert "train." not in " ".join(plan(idle, facts(gpus=1)).notes)


def test_gradients_in_bf16_need_nccl() -> None:
    message, hint = problem(job(parallelism={"comm": "bf16"}))
    assert message.startswith("parallelism.comm: bf16, and the device is cpu (this machine has no GPU): PyTorch sends")
    assert hint == "comm: fp16 or fp32, or device: cuda"
    assert plan(job(parallelism={"comm": "bf16"}), facts(gpus=1)).device == "cuda"
    assert plan(job(parallelism={"comm": "fp16"}), facts()).device == "cpu"


def test_powersgd_keeps_no_gradient_that_may_not_be_finite() -> None:
    keys: dict[str, Any] = {"train": train(precision="fp16"), "faults": {"on_nan": "rollback"}}
    on_nan, precision = sorted(each.message for each in problems(job(parallelism={"comm": "powersgd"}, **keys)))
    assert on_nan.startswith("faults.on_nan: rollback, and parallelism.comm is powersgd, in whose memory")
    assert precision.startswith("train.precision: fp16, and parallelism.comm is powersgd")
    assert plan(job(parallelism={"comm": "powersgd"}), facts()).world_size == 1
    assert plan(job(parallelism={"comm": "fp16"}, **keys), facts()).world_size == 1


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"bucket_cap_mb": 0}, 1),
        ({"comm": "powersgd", "powersgd_rank": 0}, 1),
        ({"comm": "powersgd", "powersgd_start": 1}, 2),
        ({"strategy": "split", "devices": -1}, 0),
    ],
)
def test_numbers_of_a_strategy_have_a_least_value(options: dict[str, Any], least: int) -> None:
    *_, (name, value) = options.items()
    message, hint = problem(job(parallelism=options))
    assert (message, hint) == (f"parallelism.{name}: {value} is less than {least}", f"{name}: {least} or more")
    assert plan(job(parallelism={**options, name: least}), facts()).world_size == 1


@pytest.mark.parametrize(
    ("resources", "there"),
    [({}, "this machine has 2 GPUs"), ({"device": "cuda:1"}, "resources.device: cuda:1 is 1 GPU")],
)
def test_a_model_is_split_over_gpus_that_are_there(resources: dict[str, Any], there: str) -> None:
    recipe = job(parallelism={"strategy": "split", "devices": 3}, resources=resources)
    assert problem(recipe, gpus=2)[0] == f"parallelism.devices: 3, but {there}"
    two = {"strategy": "split", "devices": 2 if not resources else 1}
    assert plan(job(parallelism=two, resources=resources), facts(gpus=2)).device == "cuda"
    on_slurm = job(parallelism={"strategy": "split", "devices": 3}, slurm={"gpus_per_node": 2})
    assert problem(on_slurm, "slurm")[0] == "parallelism.devices: 3, but the job asks for 2 GPUs"


def test_nsys_has_to_be_there_where_that_is_known() -> None:
    recipe = job(profiler={"tool": "nsys"})
    assert "there is no `nsys` on this machine" in problem(recipe, nsys=False)[0]
    assert plan(recipe, facts(nsys=True)).device == "cpu"
    assert plan(recipe, facts()).device == "cpu"


def test_one_gpu_of_a_machine_is_for_one_worker() -> None:
    made = plan(job(resources={"device": "cuda:1"}), facts(gpus=4))
    assert (made.device, made.nproc_per_node, made.nodes[0].gpus) == ("cuda", 1, (1,))
    assert "CUDA_VISIBLE_DEVICES=1 " in made.torchrun[0]
    assert "resources.device=cuda" in made.torchrun[0].split()
    visible = dataclasses.replace(facts(gpus=4), gpus=facts(gpus=4).gpus[2:])
    assert plan(job(resources={"device": "cuda:1"}), visible).nodes[0].gpus == (3,)


@pytest.mark.parametrize(
    ("resources", "gpus", "message"),
    [
        ({"nproc_per_node": 2}, 4, "resources.nproc_per_node: 2 workers per node, and resources.device is cuda:1"),
        ({"nodes": 2}, 4, "resources.device: cuda:1 is one GPU, and 2 nodes on this machine would share it"),
        ({}, 1, "resources.device: cuda:1 was asked for, but this machine has cuda:0 alone"),
        ({}, 0, "resources.device: cuda:1 was asked for, but this machine has no GPU"),
    ],
)
def test_one_gpu_that_cannot_be_had(resources: dict[str, Any], gpus: int, message: str) -> None:
    assert problem(job(resources={"device": "cuda:1", **resources}), gpus=gpus)[0].startswith(message)


def test_which_gpu_a_job_gets_slurm_decides() -> None:
    recipe = job(resources={"device": "cuda:1"}, slurm={"gpus_per_node": 4})
    message, hint = problem(recipe, "slurm")
    assert message == "resources.device: cuda:1 is one GPU of a machine; which ones a job gets, SLURM decides"
    assert "slurm.gpus_per_node: 1" in hint


def test_one_process_for_several_gpus_sees_them_all() -> None:
    made = plan(job(parallelism={"strategy": "split"}), facts(gpus=4))
    assert (made.nproc_per_node, made.nodes[0].gpus) == (1, (0, 1, 2, 3))
    assert not [note for note in made.notes if "idle" in note]
    value = next(value for value in made.values if value.key == "resources.nproc_per_node")
    assert (value.value, value.origin) == (1, "auto: strategy split is one process")
    alone = plan(job(parallelism={"strategy": "single"}), facts(gpus=4))
    assert alone.nodes[0].gpus == (0,)
    assert "3 of 4 GPUs stay idle: the node gets 1" in alone.notes
    on_slurm = plan(
        job(parallelism={"strategy": "data_parallel"}, slurm={"gpus_per_node": 4}), facts(), executor="slurm"
    )
    assert (on_slurm.nproc_per_node, on_slurm.nodes[0].gpus) == (1, (0, 1, 2, 3))
    assert env(made)["OMP_NUM_THREADS"] == "8"


BOTH = {"activation_checkpointing": True, "compile": True}


def test_what_is_done_to_layers_is_held_against_what_the_model_is_made_of() -> None:
    message, hint = problem(job(train=train(channels_last=True)))
    assert message == "train.channels_last: true, and `mlp` has no convolution over images"
    assert hint == "channels_last: false; models that have: convnet, resnet18"
    plan(job(model={"name": "convnet"}, train=train(channels_last=True)), facts())
    for keys, which in (({"strategy": "fsdp"}, "strategy fsdp"), ({"tp": 2}, "tp 2, pp 1")):
        again = job(parallelism=keys, resources={"nproc_per_node": 2}, train=train(activation_checkpointing=True))
        message, hint = problem(again)
        assert message == (
            "train.activation_checkpointing: true works on blocks, and `mlp` is a plain row of layers, divided by "
            f"{which}"
        )
        assert hint.startswith("activation_checkpointing: false; a model with blocks (gpt, lstm, resnet18); or ddp")
    plan(job(train=train(activation_checkpointing=True)), facts())
    plan(job(model={"name": "gpt"}, parallelism={"strategy": "fsdp"}, train=train(**BOTH)), facts())


def test_a_plain_row_of_layers_is_taken_in_one_way() -> None:
    message, hint = problem(job(train=train(**BOTH)))
    assert message.startswith("train.compile and train.activation_checkpointing: `mlp` is a plain row of layers")
    assert hint == "keep one of the two"


def test_data_parallel_takes_no_layers_apart() -> None:
    found = problems(job(parallelism={"strategy": "data_parallel"}, train=train(**BOTH)))
    assert sorted(each.message for each in found) == [
        f"train.{key}: true does not go with strategy data_parallel" for key in sorted(BOTH)
    ]


def test_activations_in_place_go_with_no_division_of_the_model() -> None:
    model = {"name": "mlp", "inplace": True}
    message, _ = problem(job(model=model, parallelism={"tp": 2}, resources={"nproc_per_node": 2}))
    assert message == "model.inplace: true, and parallelism divides the model (tp 2, pp 1)"


def test_a_strategy_of_one_process_is_told_so_and_nothing_else() -> None:
    faults = {"rescue": True}
    message, _ = problem(job(model={"name": "resnet18"}, parallelism={"strategy": "single", "tp": 2}, faults=faults))
    assert message == "parallelism.tp: 2, and strategy single has no tp"


def test_the_width_of_a_model_divides_by_its_heads() -> None:
    message, hint = problem(job(model={"name": "gpt", "width": 100, "heads": 8}))
    assert message == "model.width: 100 does not divide by model.heads, which is 8"
    assert hint == "the next that does: 104"
