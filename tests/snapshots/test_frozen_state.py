"""Whether a frozen front is still the same."""

import copy
import functools
import types
import uuid

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_egeria import FrozenPrefixCache
from lightning_egeria.core.snapshots.contents import Contents
from lightning_egeria.core.snapshots.frozen_state import FrozenState
from lightning_egeria.errors import CacheError
from support.methods import scripted
from support.models import Classifier, ConvNet, fit, loader


def new_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().requires_grad_(False)
    net[2].scale, net[2].array, net[2].function = torch.ones(2), np.arange(3), torch.relu
    net[2].settings, net[2].kept = types.SimpleNamespace(scale=1.0), [torch.ones(3)]
    net[2].options = {"inner": {"rates": [0.1]}}
    net[2].level, net[2].leaky = np.float32(1), functools.partial(F.leaky_relu, negative_slope=0.1)
    net[2].chosen, net[2].range, net[2].slots, net[2].act = {1}, range(2), Slots(1), lambda x: x.relu()
    net[2].own = Own()
    return net


class Slots:
    __slots__ = ("level",)

    def __init__(self, level):
        self.level = level


class Own(nn.Identity):
    """A module of the test's package, so that objects of it are looked at."""


def state_of(net):
    return FrozenState([("net", net)])


def _replace_data(net):
    net[0].weight.data = net[0].weight + 1


def _swap_data(net):
    net[0].weight.data = torch.zeros(4, 1, 3, 3).to(memory_format=torch.channels_last)


def _one_value(net):
    net[0].weight.data.view(-1)[17] += 0.1


def _by_numpy(net):
    net[0].bias.numpy()[1] = 5


def _parameter(net):
    net[0].weight = nn.Parameter(net[0].weight + 1, requires_grad=False)


def _class(net):
    net[0].__class__ = type("Other", (nn.Conv2d,), {})


CHANGES = {
    "in place": lambda net: net[0].weight.mul_(2),
    "of one value": _one_value,
    "of the data": _replace_data,
    "of the strides": _swap_data,
    "by numpy": _by_numpy,
    "parameter": _parameter,
    "state dict": lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
    "running statistics": lambda net: net[1].running_var.add_(1),
    "epsilon": lambda net: setattr(net[1], "eps", 0.1),
    "padding": lambda net: setattr(net[0], "padding", (1, 1)),
    "layer": lambda net: setattr(net, "2", nn.Tanh()),
    "another layer": lambda net: net.append(nn.Tanh()),
    "forward of a part": lambda net: setattr(net[0], "forward", lambda x: 0 * x),
    "new buffer": lambda net: net[0].register_buffer("scale", torch.ones(2)),
    "class": _class,
    "mode": lambda net: net[1].train(),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "held tensor": lambda net: net[2].scale.add_(1),
    "held array": lambda net: net[2].array.__setitem__(1, 3),
    "held function": lambda net: setattr(net[2], "function", torch.sigmoid),
    "setting": lambda net: setattr(net[2].settings, "scale", 2.0),
    "nested setting": lambda net: net[2].options["inner"]["rates"].append(0.5),
    "tensor in a list": lambda net: net[2].kept[0].mul_(2),
    "another tensor in a list": lambda net: net[2].kept.__setitem__(0, torch.zeros(3)),
    "number of numpy": lambda net: setattr(net[2], "level", np.float32(2)),
    "keyword of a function": lambda net: setattr(net[2], "leaky", functools.partial(F.leaky_relu, negative_slope=0.5)),
    "set": lambda net: net[2].chosen.add(2),
    "range": lambda net: setattr(net[2], "range", range(3)),
    "slot": lambda net: setattr(net[2].slots, "level", 2),
    "lambda": lambda net: setattr(net[2], "act", lambda x: x.abs()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_is_seen(change):
    net = new_net()
    state = state_of(net)
    assert state.is_unchanged()
    change(net)
    assert not state.is_unchanged()


OF_ATTRIBUTES = list(CHANGES)[list(CHANGES).index("held tensor") :]
NO_EQUAL_STATE = ["in place", "of one value", "parameter", "running statistics", "mode", "epsilon", *OF_ATTRIBUTES]


@pytest.mark.parametrize("name", NO_EQUAL_STATE)
def test_change_is_no_equal_state(name):
    net = new_net()
    state = state_of(net)
    CHANGES[name](net)
    assert not state.is_same()


def test_equal_weights_in_other_tensors_are_the_same():
    net = new_net()
    state = state_of(net)
    net[0].weight.data = net[0].weight.clone()
    assert not state.is_unchanged()
    assert state.is_same()
    assert state.is_unchanged()


def test_weight_that_comes_back_is_the_same():
    net = new_net()
    state, before = state_of(net), net[0].weight.clone()
    net[0].weight.mul_(3)
    assert not state.is_unchanged()
    net[0].weight.copy_(before)
    assert state.is_unchanged()


def test_training_mode_of_others_may_change():
    """It is part of the key."""
    net = new_net().train()
    state = state_of(net)
    net.eval()
    assert state.is_unchanged()


def test_digest_names_weights_classes_and_attributes():
    first, second = new_net(), new_net()
    assert state_of(first).digest == state_of(second).digest
    others = [first]
    for name in ("of one value", "running statistics", "epsilon", "class", "layer", *OF_ATTRIBUTES):
        others.append(copy.deepcopy(second))
        CHANGES[name](others[-1])
    assert len({state_of(net).digest for net in others}) == len(others)


def test_digest_names_the_members_of_enumerations_of_other_packages():
    """Such as an interpolation of torchvision: another run with another one has other outputs."""
    digests = set()
    for member in (uuid.SafeUUID.safe, uuid.SafeUUID.unsafe):
        net = new_net()
        net[0].mode = member
        digests |= {state_of(net).digest, state_of(copy.deepcopy(net)).digest}
    assert len(digests) == 2


@pytest.mark.parametrize("kind", ["forward", "helper", "base"])
def test_digest_names_the_code_of_modules(kind):
    """Of a run before the code was edited, say."""

    def digest_of(word):
        parts = {"forward": "relu", "helper": "relu", "base": "relu"} | {kind: word}
        made = {"nn": nn, "F": F}
        exec(
            "class Base(nn.Module):\n"
            f"    def last(self, x): return F.{parts['base']}(x)\n"
            "class Net(Base):\n"
            f"    def help(self, x): return F.{parts['helper']}(x)\n"
            f"    def forward(self, x): return self.help(self.last(F.{parts['forward']}(x)))\n",
            made,
        )
        return state_of(made["Net"]()).digest

    assert digest_of("relu") == digest_of("relu") != digest_of("gelu")


class Strict(dict):
    """A dictionary with keys as attributes, which knows no others."""

    __getattr__ = dict.__getitem__


def test_object_that_refuses_questions_can_be_read():
    net = new_net()
    net[2].config = Strict(scale=1)
    state = state_of(net)
    assert state.is_unchanged()
    assert state.digest
    with state.preserved():
        net[2].config["scale"] = 2
        assert not state.is_unchanged()


@pytest.mark.parametrize("value", [10**5000, torch.zeros(2).to_sparse()], ids=["huge", "sparse"])
def test_what_cannot_be_read_is_told(value):
    net = new_net()
    if isinstance(value, torch.Tensor):
        net[0].register_buffer("odd", value)
    else:
        net[0].odd = value
    with pytest.raises(CacheError, match="attributes of the frozen layers cannot be read"):
        assert state_of(net).digest is None


def test_preserved_restores_buffers_and_attributes():
    net = new_net()
    state = state_of(net)
    with state.preserved():
        net[1].running_mean.add_(1)
        net[1].num_batches_tracked += 1
        net[1].eps = 7.0
        net[1].train()
        net[1](torch.randn(2, 4, 3, 3))
        net[1].eval()
        net[2].scale, net[2].new = torch.zeros(2), 1
        net[2].kept.append(net[2].scale)
    assert state.is_unchanged()
    assert not hasattr(net[2], "new")


def test_preserved_writes_only_what_has_changed():
    """Autograd refuses a backward pass through tensors that were written since."""
    net = new_net()
    before = [buffer._version for buffer in net.buffers()]
    with state_of(net).preserved():
        net(torch.zeros(2, 1, 3, 3))
    assert [buffer._version for buffer in net.buffers()] == before


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_change_is_seen_in_each_part_of_large_weights(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        net = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 3)).eval().requires_grad_(False)
        state = state_of(net)
    finally:
        torch.set_num_threads(before)
    for values in (net[0].weight.data.view(-1), net[1].weight.data.view(-1)):
        for place in range(0, len(values), len(values) // 7):
            value = values[place].clone()
            values[place] += 1
            assert not state.is_unchanged()
            values[place] = value
            assert state.is_unchanged()


def test_what_a_freeze_sets_costs_no_look(monkeypatch):
    looked = []

    class Counted(Contents):
        def __init__(self, found, *arguments, **options):
            looked.append(len(found))
            super().__init__(found, *arguments, **options)

    monkeypatch.setattr("lightning_egeria.core.snapshots.frozen_state.Contents", Counted)
    fit(Classifier(ConvNet()), scripted({3: 1}), data=FrozenPrefixCache(loader()))
    assert looked
    assert not any(looked)


def test_a_compiled_module_is_unchanged():
    """Its mode is not among its own attributes."""
    state = state_of(torch.compile(new_net(), backend="eager"))
    assert state.is_unchanged()
    assert state.is_same()


@pytest.mark.parametrize("name", NO_EQUAL_STATE)
def test_a_quick_look_sees_what_changes_a_small_network(name, monkeypatch):
    """Objects, plain attributes, modes, memory, version counters, all bits; quick looks at containers."""
    monkeypatch.setattr("lightning_egeria.core.snapshots.frozen_state.QUICK_S", 60.0)
    net = new_net()
    state = state_of(net)
    assert state.is_same(all_bits=False)
    assert state.is_same(all_bits=False)
    CHANGES[name](net)
    assert not state.is_same(all_bits=False)


def big_net(layers=8):
    """Weights of 33 times as many bytes as a quick look compares."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))).requires_grad_(False).eval()


@pytest.mark.parametrize("change", [lambda one: one.data.mul_(2), lambda one: np.multiply(one.numpy(), 2, one.numpy())])
def test_a_quick_look_sees_a_change_of_all_weights_that_torch_does_not_count(change):
    for looks in range(40):  # whatever piece comes next
        net = big_net()
        state = state_of(net)
        assert all(state.is_same(all_bits=False) for _ in range(looks + 1))
        for weight in net.parameters():
            change(weight)
        assert not state.is_same(all_bits=False), looks


def test_one_value_is_seen_when_its_piece_comes_or_all_bits_are_compared():
    net = big_net()
    state = state_of(net)
    assert state.is_same(all_bits=False)
    net[5].weight.data[0, 0] += 1
    looks = [state.is_same(all_bits=False) for _ in range(40)]
    assert any(looks)
    assert not all(looks)
    assert not state.is_same()


def test_a_quick_look_takes_equal_weights_in_other_memory():
    net = new_net()
    state = state_of(net)
    assert state.is_same(all_bits=False)
    net[0].weight.data = net[0].weight.clone()
    assert state.is_same(all_bits=False)
    assert state.is_same(all_bits=False)
    net[0].weight.data.add_(1)
    assert not state.is_same()


def test_a_weight_that_came_back_is_compared_once(monkeypatch):
    """Its counter is another one, and then known."""
    net = big_net()
    state, before = state_of(net), net[0].weight.clone()
    net[0].weight.mul_(3)
    net[0].weight.copy_(before)
    assert state.is_same(all_bits=False)
    compared = []
    monkeypatch.setattr(state, "_mark", lambda: compared.append(1))
    assert state.is_same(all_bits=False)
    assert compared == []


def test_containers_that_take_long_are_compared_with_all_bits(monkeypatch):
    monkeypatch.setattr("lightning_egeria.core.snapshots.frozen_state.QUICK_S", -1.0)
    net = new_net()
    state = state_of(net)
    assert state.is_same(all_bits=False)
    net[2].settings.scale = 2.0
    assert state.is_same(all_bits=False)
    assert not state.is_same()
