"""The residual networks for 32 x 32 images of He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_egeria.errors import ArgumentError


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters (option A of section 3.3).

    Where the block widens or halves the resolution, the shortcut takes every `stride`-th pixel and pads the channels
    with zeros, half of them on each side.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        added = channels - in_channels
        self.channel_padding = (added // 2, added - added // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, in_channels, H, W]` to `[B, channels, H / stride, W / stride]`."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, *self.channel_padding)))


class CifarResNet(nn.Module):
    """ResNet of section 4.2: three stages of `n` blocks with 16, 32 and 64 channels, `depth = 6n + 2`.

    Args:
        depth: number of layers with weights: 20, 32, 44, 56, 110 in the paper.
        num_classes: length of the output.
        in_channels: channels of the images.

    Raises:
        ArgumentError: if `depth` is not 6n + 2 with n of at least 1.

    >>> import torch
    >>> net = CifarResNet(depth=20)
    >>> sum(p.numel() for p in net.parameters())
    269722
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ArgumentError(f"depth must be 6n + 2 with n >= 1 (20, 32, 44, 56, 110, ...), got {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[B, in_channels, H, W]` to logits `[B, num_classes]`."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        logits: Tensor = self.linear(out.mean(dim=(2, 3)))
        return logits


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, stride=1) for _ in range(blocks - 1)))
