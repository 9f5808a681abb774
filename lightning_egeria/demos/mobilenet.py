"""MobileNetV2 (Sandler et al., CVPR 2018) for 32 x 32 images."""

from torch import nn
from torchvision.models import MobileNetV2

# Expansion, channels, blocks and stride of each stage, as in the paper, except for one stride of 1 instead of 2.
_STAGES = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]


def cifar_mobilenet_v2(num_classes: int = 10, width_mult: float = 1.0) -> nn.Module:
    """Return torchvision's network with a stride of 1 in the stem and in the second stage, without dropout.

    Args:
        num_classes: length of the output.
        width_mult: factor for all numbers of channels.

    >>> import torch
    >>> net = cifar_mobilenet_v2(num_classes=7, width_mult=0.25)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 7])
    """
    net: nn.Module = MobileNetV2(num_classes, width_mult, inverted_residual_setting=_STAGES, dropout=0.0)
    stem = net.get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (1, 1)
    return net
