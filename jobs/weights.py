"""The fingerprint of a model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_sha256(net: nn.Module) -> str:
    """SHA-256 over all tensors of the state, in the order of their names: name, type, shape, bytes."""
    digest = hashlib.sha256()
    state = net.state_dict()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
