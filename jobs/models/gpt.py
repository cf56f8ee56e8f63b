"""A decoder of transformer blocks."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.registry import OptionError, model

TP_DIVIDES = ("heads",)
"""Options that `parallelism.tp` must divide: each rank has whole heads. A literal, as the check reads it from here."""
UNDIVIDED = ("tie_weights",)
"""Options that go with neither tp nor pp, where they are true."""
LAYERS = "layers"
"""The option that says how many blocks there are. The network has as many layers to cut between, and three more."""
BOUNDS = {
    "vocabulary": (1, None),
    "context": (1, None),
    "layers": (1, None),
    "heads": (1, None),
    "width": (1, None),
    "dropout": (0, 1),
}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
DIVIDES = {"heads": "width"}
"""Option -> the one that it must divide."""
MADE_OF = ("blocks",)
"""What train.compile and activation_checkpointing work on; convolutions (train.channels_last) it has none."""
STD = 0.02
"""Of the first weights, as in GPT-2."""


@model("gpt")
def gpt(
    *,
    vocabulary: int = 256,
    context: int = 128,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    tie_weights: bool = False,
) -> nn.Module:
    """A GPT: a decoder that predicts each next token of a sequence.

    Args:
        vocabulary: How many different tokens there are; 256 for bytes.
        context: The longest sequence, in tokens.
        layers: Blocks of attention and perceptron.
        heads: Attention heads of a block; they divide width.
        width: Numbers per token between the blocks.
        dropout: Share of the values that is dropped in training.
        tie_weights: Output and token embedding share one matrix. Not with tp or pp, which cut between them.
    """
    if width % heads:
        raise OptionError(f"model.width: {width} does not divide by model.heads, {heads}")
    blocks = [(f"block{index}", Block(width, heads=heads, dropout=dropout)) for index in range(layers)]
    embed, head = Embed(vocabulary, context=context, width=width, dropout=dropout), nn.Linear(width, vocabulary, False)
    net = nn.Sequential(OrderedDict([("embed", embed), *blocks, ("norm", nn.LayerNorm(width)), ("head", head)]))
    _initialise(net, layers)
    if tie_weights:
        head.weight = embed.token.weight
    return net


class Embed(nn.Module):
    """Tokens (batch, time) to vectors (batch, time, width): what the token is, and where it stands."""

    def __init__(self, vocabulary: int, *, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.drop = _dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Raises OptionError for a sequence that is longer than the context."""
        time, context = tokens.shape[-1], self.position.num_embeddings
        if time > context:
            raise OptionError(f"model.context: {context} tokens, and the data has sequences of {time}")
        places = torch.arange(time, device=tokens.device)
        embedded: Tensor = self.drop(self.token(tokens) + self.position(places))
        return embedded


class Block(nn.Module):
    """Attention, then a perceptron; each sees the normalised input, and adds to it. Shape (batch, time, width)."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads=heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Perceptron(width, dropout=dropout)

    def tp_plan(self) -> dict[str, str]:
        """How tensor parallel shares it out (`jobs.parallel.tensor`)."""
        columns = ("attn.q", "attn.k", "attn.v", "mlp.up")
        return {**dict.fromkeys(columns, "colwise"), "attn.proj": "rowwise", "mlp.down": "rowwise"}

    def forward(self, inputs: Tensor) -> Tensor:
        """The same shape."""
        inputs = inputs + self.attn(self.norm1(inputs))
        outputs: Tensor = inputs + self.mlp(self.norm2(inputs))
        return outputs


class Attention(nn.Module):
    """Causal self-attention: each token sees those before it, and itself.

    The heads that a rank has are as many as its share of q, k and v is wide: tensor parallel cuts these by columns and
    `proj` by rows.
    """

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self._head_width, self._dropout = width // heads, dropout
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.drop = _dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        q, k, v = (
            layer(inputs).unflatten(-1, (-1, self._head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        dropped = self._dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        outputs: Tensor = self.drop(self.proj(seen.transpose(1, 2).flatten(-2)))
        return outputs


class Perceptron(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = _dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        outputs: Tensor = self.drop(self.down(F.gelu(self.up(inputs), approximate="tanh")))
        return outputs


def _dropout(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()


def _initialise(net: nn.Module, layers: int) -> None:
    """As GPT-2: what adds to the residual stream begins smaller, by the number of layers that add to it."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            adds = name.endswith((".proj", ".down"))
            nn.init.normal_(module.weight, std=STD / math.sqrt(2 * layers) if adds else STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
