"""Linear layers."""

from __future__ import annotations

from torch import nn

from jobs.registry import model

TP_DIVIDES = ("hidden",)
"""Options that `parallelism.tp` must divide. A literal, as the check reads it from here."""
UNDIVIDED = ("inplace",)
"""Options that go with neither tp nor pp: what comes from another rank is not overwritten."""
BOUNDS = {"in_features": (1, None), "hidden": (1, None), "layers": (0, None), "classes": (1, None), "dropout": (0, 1)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
MADE_OF = ()
"""Neither blocks nor convolutions: what train.compile, activation_checkpointing and channels_last ask for."""


@model("mlp")
def mlp(
    *,
    in_features: int = 784,
    hidden: int = 128,
    layers: int = 2,
    classes: int = 10,
    dropout: float = 0.0,
    inplace: bool = False,
) -> nn.Module:
    """A multi-layer perceptron over flattened input.

    Args:
        in_features: Numbers per sample (28 x 28 = 784 for mnist).
        hidden: Width of each hidden layer.
        layers: Hidden layers. 0 is a linear classifier.
        classes: Number of classes.
        dropout: Share of the hidden values that is dropped in training.
        inplace: The activations overwrite their input: less memory, the same numbers.
    """
    modules: list[nn.Module] = [nn.Flatten()]
    width = in_features
    for _ in range(layers):
        modules += [nn.Linear(width, hidden), nn.ReLU(inplace), *([nn.Dropout(dropout)] if dropout else [])]
        width = hidden
    return nn.Sequential(*modules, nn.Linear(width, classes))
