"""Layers that are computed again, compiled, or lie in another order: the same numbers under the same names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs import registry
from jobs.layers import blocks_of, check_compiler, lay_channels_last, prepare_layers, recompute_layers
from jobs.registry import OptionError
from launcher.recipe.catalog import catalog
from launcher.recipe.schema import TrainSection

CPU = torch.device("cpu")

IMAGES: Callable[[], Tensor] = lambda: torch.randn(4, 3, 32, 32)  # noqa: E731
MODELS: list[tuple[str, dict[str, Any], Callable[[], Tensor]]] = [
    ("mlp", {"in_features": 20, "hidden": 64, "layers": 8, "dropout": 0.1}, lambda: torch.randn(32, 20)),
    ("convnet", {"dropout": 0.1}, lambda: torch.randn(8, 1, 28, 28)),
    ("resnet18", {"channels": 8}, IMAGES),
    ("gpt", {"dropout": 0.1}, lambda: torch.randint(0, 256, (2, 64))),
]


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = registry.build("model", name, options)
    return net


def train(**keys: Any) -> TrainSection:
    return TrainSection.model_validate({"until": "1 steps", **keys})


def prepare(net: nn.Module, *, strategy: str = "ddp", is_cut: bool = False, **keys: Any) -> None:
    prepare_layers(net, train(**keys), strategy=strategy, is_cut=is_cut, device=CPU)


def trained(net: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], int]:
    """Outputs, gradients and buffers of one forward and backward; and the bytes that were kept in between."""
    kept: dict[int, int] = {}
    parameters = {each.untyped_storage().data_ptr() for each in net.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs: Tensor = net(inputs)
    outputs.square().mean().backward()  # type: ignore[no-untyped-call]
    grads = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
    return outputs.detach(), grads, dict(net.named_buffers()), sum(kept.values())


@pytest.mark.parametrize(("name", "options", "inputs"), MODELS)
def test_what_is_computed_again_has_the_same_bits_and_keeps_less(
    name: str, options: dict[str, Any], inputs: Callable[[], Tensor]
) -> None:
    """The statistics of a batch norm count each batch once."""
    net, again = build(name, **options), build(name, **options)
    prepare(again, activation_checkpointing=True)
    assert list(again.state_dict()) == list(net.state_dict())
    batch = inputs()
    outputs, grads, buffers, kept = trained(net, batch)
    same_outputs, same_grads, same_buffers, kept_less = trained(again, batch)
    assert torch.equal(same_outputs, outputs)
    assert all(torch.equal(same_grads[key], grad) for key, grad in grads.items())
    assert all(torch.equal(same_buffers[key], buffer) for key, buffer in buffers.items())
    assert kept_less < 0.6 * kept


def test_an_evaluation_computes_nothing_again_and_a_copy_is_its_own() -> None:
    net = build("gpt")
    prepare(net, activation_checkpointing=True)
    other = copy.deepcopy(net)
    nn.init.zeros_(other.get_parameter("head.weight"))
    net.eval(), other.eval()
    with torch.inference_mode():
        assert net(torch.zeros(1, 8, dtype=torch.long)).abs().max() > 0
        assert other(torch.zeros(1, 8, dtype=torch.long)).abs().max() == 0
    assert isinstance(other.get_submodule("block0"), type(build("gpt").get_submodule("block0")))


@pytest.mark.parametrize(("name", "options", "inputs"), MODELS[:3])
def test_activations_in_place_have_the_same_bits_also_where_they_are_computed_again(
    name: str, options: dict[str, Any], inputs: Callable[[], Tensor]
) -> None:
    batch = inputs()
    outputs, grads, _, kept = trained(build(name, **options), batch)
    for again in (False, True):
        net = build(name, **options, inplace=True)
        prepare(net, activation_checkpointing=again)
        same_outputs, same_grads, _, kept_less = trained(net, batch)
        assert torch.equal(same_outputs, outputs)
        assert all(torch.equal(same_grads[key], grad) for key, grad in grads.items())
        assert kept_less <= kept


def test_images_and_convolutions_lie_channels_last_with_the_same_numbers() -> None:
    net, other = build("convnet"), build("convnet")
    lay_channels_last(other)
    assert other.get_parameter("2.weight").is_contiguous(memory_format=torch.channels_last)
    seen = []
    other.get_submodule("0").register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0], outputs)))
    batch = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(other(batch), net(batch))
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in seen[0])
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in other.state_dict().items())


def test_where_layers_are_shared_out_weights_stay_and_images_lie_channels_last() -> None:
    """FSDP2 takes no parameter that lies in another order; in stages, each convolution brings its input in order."""
    net, other = build("convnet"), build("convnet")
    prepare(other, strategy="fsdp", is_cut=True, channels_last=True)
    assert all(each.is_contiguous() for each in other.parameters())
    seen = []
    other.get_submodule("2").register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    batch = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(other(batch), net(batch))
    other.get_submodule("2")(torch.randn(4, 24, 12, 12))
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in seen)


@pytest.mark.parametrize("name", catalog("models"))
def test_the_file_of_a_model_says_what_it_is_made_of(name: str) -> None:
    net, said = build(name), catalog("models")[name].made_of
    assert said is not None
    assert ("blocks" in said) == bool(blocks_of(net))
    assert ("convolutions" in said) == any(each.dim() == 4 for each in net.parameters())


def test_a_model_without_convolutions_has_no_channels() -> None:
    with pytest.raises(OptionError, match=r"train\.channels_last: true, and this model has no convolution"):
        prepare(build("mlp"), channels_last=True)


@pytest.mark.parametrize("key", ["compile", "activation_checkpointing"])
def test_a_plain_row_of_layers_is_taken_as_a_whole_or_not_at_all(key: str) -> None:
    assert blocks_of(build("mlp")) == []
    assert len(blocks_of(build("gpt", layers=3))) == 4, "the embedding too"
    for strategy in ("fsdp", "split"):
        with pytest.raises(OptionError, match=rf"train\.{key}: true works on blocks, .* strategy {strategy} "):
            prepare(build("mlp"), strategy=strategy, is_cut=True, **{key: True})
    with pytest.raises(OptionError, match=rf"train\.{key}: true does not go with strategy data_parallel; use ddp"):
        prepare(build("gpt"), strategy="data_parallel", **{key: True})


def test_a_plain_row_is_not_taken_in_two_ways_at_once() -> None:
    with pytest.raises(OptionError, match=r"keep one of the two"):
        prepare(build("mlp"), compile=True, activation_checkpointing=True)


def test_a_model_that_is_neither_blocks_nor_a_row_says_so() -> None:
    with pytest.raises(OptionError, match=r"neither blocks nor a row of layers"):
        recompute_layers(nn.Linear(2, 2))


def test_each_block_is_compiled_for_each_shape_anew_and_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each shape alone: so what is computed does not depend on the shapes that came before."""
    made, called = [], []

    def compile_it(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        made.append(options)

        def compiled(*args: Any) -> Any:
            called.append(type(args[0]).__name__)
            return function(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_it)
    monkeypatch.setattr("jobs.layers._MADE", {})
    plain, batch = build("gpt", layers=3), torch.zeros(1, 8, dtype=torch.long)
    net, outputs = copy.deepcopy(plain), plain(batch)
    prepare(net, strategy="fsdp", is_cut=True, compile=True, activation_checkpointing=True)
    assert torch.equal(net(batch), outputs)
    assert called == ["Embed", "Block", "Block", "Block"]
    assert made == [{"dynamic": False}] * 2, "one for all blocks"
    assert list(net.state_dict()) == list(plain.state_dict())


def test_without_a_compiler_it_is_said_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OptionError, match=r"train\.compile: true, and there is no C\+\+ compiler \(no-such-compiler\)"):
        check_compiler(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_computed_again_takes_less_memory_of_a_gpu() -> None:
    peaks = {}
    for again in (False, True):
        net = build("gpt", layers=8, width=512, context=512)
        prepare(net, activation_checkpointing=again)
        net.cuda()
        torch.cuda.reset_peak_memory_stats()
        net(torch.randint(0, 256, (16, 512), device="cuda")).sum().backward()
        peaks[again] = torch.cuda.max_memory_allocated()
    assert peaks[True] < 0.6 * peaks[False]
