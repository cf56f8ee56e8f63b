from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jobs import registry


def build(name: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    net = registry.build("model", name, options)
    assert isinstance(net, nn.Sequential)
    return net


def tokens(*shape: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


GPT = {"vocabulary": 11, "context": 12, "layers": 3, "heads": 2, "width": 16}
CASES = [
    ("mlp", {"in_features": 12}, torch.ones(2, 3, 4), (2, 10)),
    ("convnet", {}, torch.ones(2, 1, 28, 28), (2, 10)),
    ("resnet18", {"channels": 4}, torch.ones(2, 3, 32, 32), (2, 10)),
    (
        "resnet18",
        {"channels": 4, "small_images": False, "inplace": True, "classes": 7},
        torch.ones(2, 3, 64, 64),
        (2, 7),
    ),
    ("lstm", {"width": 8}, torch.ones(2, 9), (2, 1)),
    ("lstm", {"width": 8, "features": 28, "outputs": 10}, torch.ones(2, 1, 28, 28), (2, 10)),
    ("lstm", {"width": 8, "features": 4, "layers": 3, "dropout": 0.5, "outputs": 3}, torch.ones(2, 9, 4), (2, 3)),
    (
        "lstm",
        {"width": 8, "vocabulary": 11, "each_step": True, "outputs": 11},
        tokens(2, 9, vocabulary=11),
        (2, 9, 11),
    ),
    ("gpt", GPT, tokens(2, 12, vocabulary=11), (2, 12, 11)),
    ("gpt", {**GPT, "tie_weights": True, "dropout": 0.1}, tokens(2, 5, vocabulary=11), (2, 5, 11)),
]


@pytest.mark.parametrize(("name", "options", "inputs", "shape"), CASES)
def test_a_model_is_a_row_of_layers_that_can_be_cut_anywhere(
    name: str, options: dict[str, Any], inputs: Tensor, shape: tuple[int, ...]
) -> None:
    net = build(name, **options).eval()
    outputs = net(inputs)
    assert outputs.shape == shape
    for cut in range(1, len(net)):
        assert torch.equal(net[cut:](net[:cut](inputs)), outputs)


def test_the_names_of_parameters_are_those_of_old_checkpoints() -> None:
    assert [name for name, _ in build("mlp").named_parameters()] == [
        f"{layer}.{kind}" for layer in (1, 3, 5) for kind in ("weight", "bias")
    ]
    assert [name for name, _ in build("convnet", dropout=0.3).named_parameters()] == [
        f"{layer}.{kind}" for layer in (0, 2, 6, 9) for kind in ("weight", "bias")
    ]


def test_layers_of_the_larger_models_have_names() -> None:
    assert [name for name, _ in build("gpt", **GPT).named_children()] == [
        *("embed", "block0", "block1", "block2", "norm", "head")
    ]
    assert [name for name, _ in build("lstm").named_children()] == ["embed", "layer0", "layer1", "head"]
    assert [name for name, _ in build("resnet18").named_children()] == [
        *("stem", *(f"block{index}" for index in range(8)), "head")
    ]


def test_a_gpt_sees_no_token_that_comes_later() -> None:
    net = build("gpt", **GPT)
    before = tokens(2, 12, vocabulary=11)
    after = before.clone()
    after[:, 7:] = (after[:, 7:] + 1) % 11
    assert torch.equal(net(before)[:, :7], net(after)[:, :7])
    assert not torch.equal(net(before)[:, 7:], net(after)[:, 7:])


def test_a_gpt_begins_with_the_loss_of_a_guess() -> None:
    """As GPT-2 begins: all tokens are about as likely, and the residual stream does not grow with the layers."""
    inputs = tokens(4, 12, vocabulary=11)
    net = build("gpt", **{**GPT, "layers": 8})
    assert F.cross_entropy(net(inputs).flatten(0, 1), inputs.flatten()).item() == pytest.approx(math.log(11), abs=0.1)
    adds = [parameter.std().item() for name, parameter in net.named_parameters() if name.endswith("proj.weight")]
    assert adds == pytest.approx([0.02 / 4] * 8, rel=0.2)


def test_tied_weights_are_one_matrix() -> None:
    net = build("gpt", **GPT, tie_weights=True)
    assert net.get_parameter("head.weight") is net.get_parameter("embed.token.weight")
    assert (
        sum(p.numel() for p in build("gpt", **GPT).parameters()) - sum(p.numel() for p in net.parameters()) == 11 * 16
    )


def test_resnet18_is_the_one_of_the_paper() -> None:
    """Its number of parameters with 1,000 classes, and the usual one for small images."""
    with torch.device("meta"):
        paper = registry.build("model", "resnet18", {"classes": 1000, "small_images": False})
        small = registry.build("model", "resnet18", {})
    assert sum(p.numel() for p in paper.parameters()) == 11_689_512
    assert sum(p.numel() for p in small.parameters()) == 11_173_962


def test_inplace_activations_change_no_number() -> None:
    inputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    gradients = []
    for inplace in (False, True):
        net = build("resnet18", channels=4, inplace=inplace)
        net(inputs).square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "options", "inputs", "targets"),
    [
        ("gpt", GPT, tokens(8, 12, vocabulary=11), tokens(8, 12, vocabulary=11)),
        ("lstm", {"width": 16, "outputs": 11}, tokens(8, 12, vocabulary=11).float(), tokens(8, vocabulary=11)),
        (
            "resnet18",
            {"channels": 4},
            torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
            tokens(8, vocabulary=10),
        ),
    ],
)
def test_a_model_learns(name: str, options: dict[str, Any], inputs: Tensor, targets: Tensor) -> None:
    net = build(name, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs).flatten(0, targets.dim() - 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "options", "inputs", "message"),
    [
        ("gpt", {"width": 30, "heads": 4}, None, r"model.width: 30 does not divide by model.heads, 4"),
        ("gpt", GPT, torch.zeros(1, 13, dtype=torch.long), r"model.context: 12 tokens, and the data has .* of 13"),
        ("lstm", {"features": 4}, torch.zeros(1, 9, 3), r"model.features: 4 numbers per step, .* is \(9, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, options: dict[str, Any], inputs: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)(inputs)
