"""A small convolutional network."""

from __future__ import annotations

from torch import nn

from jobs.registry import OptionError, model

TP_DIVIDES = ("hidden",)
"""Options that `parallelism.tp` must divide. A literal, as the check reads it from here."""
UNDIVIDED = ("inplace",)
"""Options that go with neither tp nor pp: what comes from another rank is not overwritten."""
BOUNDS = {
    "in_channels": (1, None),
    "image_size": (11, None),
    "channels": (1, None),
    "hidden": (1, None),
    "classes": (1, None),
    "dropout": (0, 1),
}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
MADE_OF = ("convolutions",)
"""What train.channels_last asks for; blocks (train.compile, activation_checkpointing) it has none."""


@model("convnet")
def convnet(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    channels: int = 24,
    hidden: int = 128,
    classes: int = 10,
    dropout: float = 0.0,
    inplace: bool = False,
) -> nn.Module:
    """Two convolutions, a pooling and two linear layers, for small square images.

    Args:
        in_channels: Colour channels of an image.
        image_size: Height and width of an image in pixels.
        channels: Channels after the first convolution; twice as many after the second.
        hidden: Width of the linear layer before the last.
        classes: Number of classes.
        dropout: Share of the hidden values that is dropped in training.
        inplace: The activations overwrite their input: less memory, the same numbers.
    """
    side = ((image_size - 5) // 2 + 1 - 2) // 2
    if side < 1:
        raise OptionError(
            f"model.image_size: {image_size} pixels are too few for a 5x5 and a 3x3 convolution with pooling"
        )
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel_size=5, stride=2),
        nn.ReLU(inplace),
        nn.Conv2d(channels, 2 * channels, kernel_size=3),
        nn.ReLU(inplace),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * side * side, hidden),
        nn.ReLU(inplace),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(hidden, classes),
    )
