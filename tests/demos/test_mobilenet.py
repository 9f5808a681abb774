"""MobileNetV2 for small images."""

import torch
from torch import nn
from torchvision.models import mobilenet_v2

from lightning_egeria.demos.mobilenet import cifar_mobilenet_v2


def test_weights_are_those_of_torchvision():
    ours, theirs = cifar_mobilenet_v2(num_classes=1000), mobilenet_v2()
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }


def test_it_halves_an_image_three_times_and_drops_nothing():
    net = cifar_mobilenet_v2(width_mult=0.25)
    assert net.features(torch.rand(2, 3, 32, 32)).shape[2:] == (4, 4)
    assert [part.p for part in net.modules() if isinstance(part, nn.Dropout)] == [0.0]
