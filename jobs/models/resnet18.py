"""The residual network of 18 layers."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from jobs.registry import model

BOUNDS = {"in_channels": (1, None), "classes": (1, None), "channels": (1, None)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
MADE_OF = ("blocks", "convolutions")
"""What train.compile and activation_checkpointing work on, and train.channels_last."""

STAGES = 4
"""Each begins with half the height and width of the one before (but for the first), and twice its channels."""


@model("resnet18")
def resnet18(
    *,
    in_channels: int = 3,
    classes: int = 10,
    channels: int = 64,
    small_images: bool = True,
    inplace: bool = False,
) -> nn.Module:
    """ResNet-18, with batch norm, for images of any size.

    Args:
        in_channels: Colour channels of an image.
        classes: Number of classes.
        channels: Channels of the first stage; twice as many in each that follows.
        small_images: The first layer is a 3x3 convolution, for images of about 32 x 32 pixels. Without it, as in the
            paper, a 7x7 convolution and a pooling, which leave a quarter of the height and width.
        inplace: The activations overwrite their input: less memory, the same numbers.
    """
    widths = [channels * 2**stage for stage in range(STAGES)]
    blocks: list[tuple[str, nn.Module]] = []
    width = channels
    for stage, wanted in enumerate(widths):
        for index in range(2):
            stride = 2 if stage and not index else 1
            blocks.append((f"block{len(blocks)}", BasicBlock(width, wanted, stride=stride, inplace=inplace)))
            width = wanted
    stem = _stem(in_channels, channels, small_images=small_images, inplace=inplace)
    head = nn.Sequential(
        OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), linear=nn.Linear(width, classes))
    )
    net = nn.Sequential(OrderedDict([("stem", stem), *blocks, ("head", head)]))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to the input; (batch, channels, height, width), smaller by the stride."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=nn.BatchNorm2d(channels)))

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        hidden = self.relu(self.norm1(self.conv1(inputs)))
        outputs: Tensor = self.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))
        return outputs


def _stem(in_channels: int, channels: int, *, small_images: bool, inplace: bool) -> nn.Module:
    size, stride = (3, 1) if small_images else (7, 2)
    conv = nn.Conv2d(in_channels, channels, kernel_size=size, stride=stride, padding=size // 2, bias=False)
    layers = OrderedDict[str, nn.Module](conv=conv, norm=nn.BatchNorm2d(channels), relu=nn.ReLU(inplace=inplace))
    if not small_images:
        layers["pool"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    return nn.Sequential(layers)
