"""The networks of `throughput.py`, as a user would write them: the same for all manners, ours by `model.target`."""

from torch import nn


def convnet() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
