from __future__ import annotations

import pytest
import torch

from jobs import registry
from jobs.models.mlp import mlp


def test_names_are_found_by_importing_what_defines_them() -> None:
    assert {"mlp", "convnet"} <= set(registry.names("model"))
    assert {"mnist", "synthetic"} <= set(registry.names("dataset"))
    assert {"single", "ddp"} <= set(registry.names("strategy"))
    assert {"adamw", "sgd"} <= set(registry.names("optimizer"))
    assert {"constant", "linear", "cosine"} <= set(registry.names("schedule"))


def test_a_name_defined_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model 'mlp' is defined twice: jobs.models.mlp.mlp and .*other"):

        @registry.model("mlp")
        def other() -> None: ...

    assert registry.find("model", "mlp") is mlp


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model 'resnet' does not exist; there are: .*convnet, .*mlp"):
        registry.find("model", "resnet")


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {"in_features": 12, "layers": 0, "classes": 3}, (2, 12)),
        ("mlp", {"in_features": 12, "dropout": 0.5, "classes": 3}, (2, 3, 4)),
        ("convnet", {"classes": 3}, (2, 1, 28, 28)),
        ("convnet", {"in_channels": 3, "image_size": 32, "dropout": 0.1, "classes": 3}, (2, 3, 32, 32)),
    ],
)
def test_models_build_from_options(name: str, options: dict[str, object], shape: tuple[int, ...]) -> None:
    assert registry.build("model", name, options)(torch.zeros(shape)).shape == (2, 3)


def test_an_image_too_small_for_the_network_is_refused() -> None:
    with pytest.raises(ValueError, match="image_size"):
        registry.build("model", "convnet", {"image_size": 2})
