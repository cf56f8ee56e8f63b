from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from jobs import registry
from jobs.data.synthetic import synthetic
from jobs.pace import flops_per_sample, make_pace, pace_text, peak_of
from jobs.parts import Parts
from jobs.tasks.classification import classification
from jobs.tasks.language_modelling import language_modelling
from launcher.recipe.schema import ModelSection

GPT = {"vocabulary": 10, "context": 16, "layers": 3, "heads": 2, "width": 8}


def section(**keys: Any) -> ModelSection:
    return ModelSection.model_validate(keys)


def tokens() -> Any:
    return synthetic(kind="tokens", shape="16", samples=4, eval_samples=0).load().train


def test_language_modelling_counts_tokens_and_nothing_else_on_cpu() -> None:
    pace = make_pace(section(name="gpt", **GPT), nn.Identity(), tokens(), language_modelling(), device_name="", ranks=2)
    assert pace(10.0) == {"tokens_per_s": 160.0}


def test_classes_on_cpu_are_counted_in_samples_alone() -> None:
    samples = synthetic(samples=4, eval_samples=0).load().train
    pace = make_pace(section(name="mlp"), nn.Identity(), samples, classification(), device_name="", ranks=1)
    assert pace(10.0) == {}
    assert Parts.pace(10.0) == {}


def test_the_operations_of_a_gpt_are_those_of_the_formula() -> None:
    """2 per weight of a product and token, and 4 x time x width per token and block for the attention."""
    layers, width, time, vocabulary = GPT["layers"], GPT["width"], GPT["context"], GPT["vocabulary"]
    per_token = layers * (2 * 12 * width**2 + 4 * time * width) + 2 * width * vocabulary
    found = flops_per_sample(section(name="gpt", **GPT), nn.Identity(), torch.zeros(1, time, dtype=torch.long))
    assert found == time * per_token


@pytest.mark.parametrize(
    ("name", "options", "inputs", "flops"),
    [
        ("mlp", {"in_features": 20, "hidden": 8, "layers": 1, "classes": 3}, torch.zeros(1, 20), 2 * (20 * 8 + 8 * 3)),
        ("resnet18", {"classes": 1000, "small_images": False}, torch.zeros(1, 3, 224, 224), 3_628_146_688),
        ("lstm", {"features": 4, "width": 8, "layers": 1}, torch.zeros(1, 5, 4), 5 * 2 * 4 * 8 * (4 + 8) + 2 * 8),
    ],
)
def test_every_model_says_its_operations(name: str, options: dict[str, Any], inputs: torch.Tensor, flops: int) -> None:
    assert flops_per_sample(section(name=name, **options), nn.Identity(), inputs) == flops


def test_mfu_is_the_share_of_what_all_gpus_could_do() -> None:
    model = section(name="gpt", **GPT)
    flops = flops_per_sample(model, nn.Identity(), torch.zeros(1, 16, dtype=torch.long))
    assert flops is not None
    pace = make_pace(model, nn.Identity(), tokens(), language_modelling(), device_name="NVIDIA H200", ranks=2)
    rate = 0.4 * 2 * 989e12 / (3 * flops)
    assert pace(rate)["mfu"] == pytest.approx(0.4, rel=1e-3)
    assert pace(rate)["tokens_per_s"] == pytest.approx(16 * rate, rel=1e-3)
    assert pace_text({"tokens_per_s": 5760.0, "mfu": 0.412}) == "5,760 tokens/s  MFU 41.2 %"
    assert pace_text({}) == ""


def test_a_model_of_the_user_says_its_operations_itself_or_has_no_mfu() -> None:
    net, model = nn.Linear(2, 2), section(target="package.module:function")
    assert flops_per_sample(model, net, torch.zeros(1, 2)) is None
    net.flops_per_sample = 8  # type: ignore[assignment]
    assert flops_per_sample(model, net, torch.zeros(1, 2)) == 8


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, tflops: float) -> None:
    assert peak_of(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce GTX 1080", "NVIDIA A1000"])
def test_an_unknown_gpu_has_no_peak(name: str) -> None:
    assert peak_of(name) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_mfu_of_a_gpt_on_a_gpu_is_a_share() -> None:
    """A forward and backward in bf16 whose time is measured: more than nothing, and less than the peak."""
    name = torch.cuda.get_device_name()
    if peak_of(name) is None:
        pytest.skip(f"the peak of {name} is not known")
    options = {"layers": 4, "heads": 16, "width": 1024, "context": 1024, "vocabulary": 1024}
    net = registry.build("model", "gpt", options).cuda()
    inputs = torch.randint(1024, (16, 1024), device="cuda")
    samples = synthetic(kind="tokens", shape="1024", classes=1024, samples=1, eval_samples=0).load().train
    pace = make_pace(section(name="gpt", **options), net, samples, language_modelling(), device_name=name, ranks=1)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            outputs = net(inputs)
            loss = language_modelling().loss(outputs, inputs)
        torch.autograd.backward(loss)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    mfu = pace(160 / (time.perf_counter() - begin_s))["mfu"]
    assert 0.02 < mfu < 1, mfu
