"""Initial values of normalisation layers are told from trained ones."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.normalisation import looks_trained, normalisation_layers
from support.models import Classifier, ConvNet, Transformer, fit


class RootMeanSquare(nn.Module):
    """As in T5: a class of its own, whose name alone tells."""


class ScaleNorm(RootMeanSquare):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class FrozenBatchNorm(nn.Module):
    """As in torchvision: buffers only."""

    def __init__(self):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((4,), value))


KINDS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without affine": lambda: nn.BatchNorm1d(4, affine=False),
    "batch without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "frozen": FrozenBatchNorm,
    "layer": lambda: nn.LayerNorm(4),
    "layer without bias": lambda: nn.LayerNorm(4, bias=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "own class": ScaleNorm,
}


def values(layer):
    return [tensor for tensor in (*layer.parameters(), *layer.buffers()) if tensor.is_floating_point()]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_told(kind):
    net = nn.Sequential(nn.Linear(4, 4), KINDS[kind]())
    assert normalisation_layers(net) == {"1": False}
    for tensor in values(net[1]):
        nn.init.normal_(tensor)
    assert normalisation_layers(net) == {"1": True}


@pytest.mark.parametrize("untouched", range(4))
def test_one_value_that_is_still_initial_is_enough(untouched):
    layer = nn.BatchNorm2d(4)
    for index, tensor in enumerate(values(layer)):
        if index != untouched:
            nn.init.normal_(tensor)
    assert list(normalisation_layers(layer).values()) == [False]


def test_initial_constants_of_other_kinds_are_initial():
    layer = nn.BatchNorm2d(4)
    nn.init.zeros_(layer.weight)  # the last of a residual block
    assert list(normalisation_layers(layer).values()) == [False]


def test_a_forward_in_training_mode_is_not_training():
    net = ConvNet()
    net(torch.randn(8, 1, 8, 8))
    assert not any(normalisation_layers(net).values())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_without_values_nothing_is_found():
    assert normalisation_layers(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False))) == {}
    assert normalisation_layers(nn.LazyBatchNorm1d()) == {"": False}
    assert normalisation_layers(nn.LayerNorm(4, device="meta")) == {"": False}
    assert not looks_trained([])


@pytest.mark.parametrize("kind", [ConvNet, Transformer])
def test_networks_begin_with_initial_values(kind):
    assert not any(normalisation_layers(kind()).values())


def test_training_leaves_them_all():
    module = Classifier()
    fit(module, epochs=1)
    assert all(normalisation_layers(module).values())


def test_only_the_values_are_read():
    net = ConvNet()
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in net.state_dict().items()}
    normalisation_layers(net)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
