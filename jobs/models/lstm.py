"""Recurrent layers."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from jobs.registry import OptionError, model

LAYERS = "layers"
"""The option that says how many recurrent layers there are. The network has two more layers to cut between."""
BOUNDS = {
    "features": (1, None),
    "vocabulary": (0, None),
    "width": (1, None),
    "layers": (1, None),
    "outputs": (1, None),
    "dropout": (0, 1),
}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
MADE_OF = ("blocks",)
"""What train.compile and activation_checkpointing work on; convolutions (train.channels_last) it has none."""


@model("lstm")
def lstm(
    *,
    features: int = 1,
    vocabulary: int = 0,
    width: int = 128,
    layers: int = 2,
    outputs: int = 1,
    each_step: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """Long short-term memory, over sequences of numbers or of tokens.

    Numbers come as (time, features), (time) where features is 1, or as an image, whose rows are the steps. Tokens come
    as (time).

    Args:
        features: Numbers per step of the sequence.
        vocabulary: How many different tokens there are. 0 = the data is numbers.
        width: Numbers that each layer remembers.
        layers: Recurrent layers.
        outputs: Numbers that come out: classes, values, or the vocabulary.
        each_step: They come out at each step (as for language modelling), not at the last alone.
        dropout: Share of the values between the layers that is dropped in training.
    """
    embed: nn.Module = nn.Embedding(vocabulary, width) if vocabulary else Steps(features)
    widths = [width if vocabulary else features, *[width] * layers]
    recurrent = [
        (f"layer{index}", Recurrent(widths[index], width, dropout=dropout if index < layers - 1 else 0.0))
        for index in range(layers)
    ]
    head = Head(widths[-1], outputs, each_step=each_step)
    return nn.Sequential(OrderedDict([("embed", embed), *recurrent, ("head", head)]))


class Steps(nn.Module):
    """Any shape of numbers to (batch, time, features)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self._features = features

    def forward(self, inputs: Tensor) -> Tensor:
        """Raises OptionError where a step has another number of features."""
        if inputs.dim() == 2 and self._features == 1:
            return inputs.unsqueeze(-1)
        if inputs.dim() < 3 or inputs.shape[-1] != self._features:
            shape = tuple(inputs.shape[1:])
            raise OptionError(f"model.features: {self._features} numbers per step, and a sample of the data is {shape}")
        return inputs.flatten(1, -2)


class Recurrent(nn.Module):
    """One layer: (batch, time, features) to (batch, time, width). Each sequence begins without memory."""

    def __init__(self, features: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        bias = self.lstm.get_parameter("bias_ih_l0")  # of the gates: input, forget, cell, output
        with torch.no_grad():
            bias[width : 2 * width].fill_(1.0)  # it remembers, until it has learned what to forget

    def forward(self, inputs: Tensor) -> Tensor:
        """What it remembers at each step."""
        remembered: Tensor = self.drop(self.lstm(inputs)[0])
        return remembered


class Head(nn.Module):
    """(batch, time, width) to (batch, outputs), from the last step; or to (batch, time, outputs)."""

    def __init__(self, width: int, outputs: int, *, each_step: bool) -> None:
        super().__init__()
        self._each_step = each_step
        self.linear = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        outputs: Tensor = self.linear(inputs if self._each_step else inputs[:, -1])
        return outputs
