import pytest
import torch
import torch.nn.functional as F

from lightning_egeria.demos.resnet import BasicBlock, CifarResNet
from lightning_egeria.errors import ArgumentError


@pytest.mark.parametrize(("depth", "blocks", "parameters"), [(20, 3, 269_722), (56, 9, 853_018)])
def test_names_and_size_are_those_of_the_public_checkpoints(depth, blocks, parameters):
    net = CifarResNet(depth)

    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    block = ["conv1.weight", "conv2.weight", *(f"bn{i}.{name}" for i in (1, 2) for name in norm)]
    expected = {"conv1.weight", "linear.weight", "linear.bias", *(f"bn1.{name}" for name in norm)}
    expected |= {f"layer{stage}.{i}.{name}" for stage in (1, 2, 3) for i in range(blocks) for name in block}
    assert set(net.state_dict()) == expected


@pytest.mark.parametrize("depth", [2, 18, 21, -4])
def test_a_depth_that_is_not_6n_plus_2_is_refused(depth):
    with pytest.raises(ArgumentError, match="depth must be 6n"):
        CifarResNet(depth)


def test_the_shortcut_subsamples_and_pads_channels_on_both_sides():
    block = BasicBlock(16, 32, stride=2).eval()
    torch.nn.init.zeros_(block.bn2.weight)  # silences the convolutions: the shortcut alone is left
    x = torch.rand(2, 16, 8, 8)

    out = block(x)

    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_one_channel_images_and_any_number_of_classes():
    net = CifarResNet(8, num_classes=7, in_channels=1)
    logits = net(torch.rand(4, 1, 32, 32))
    assert logits.shape == (4, 7)
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
