"""The attributes of modules, as they were."""

import array
import collections
import random
import types
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_egeria.core.snapshots.module_attributes import CodeValues, ModuleAttributes


class Pair(NamedTuple):
    first: list[int]
    second: int


class Averages:
    """As averages of weights are kept beside a model."""

    def __init__(self, net):
        self.shadow = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        self.updates = 0

    def update(self, net):
        self.updates += 1
        for name, parameter in net.named_parameters():
            self.shadow[name].lerp_(parameter.detach() + 1, 0.5)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.hidden = [nn.BatchNorm1d(2)]  # no submodule
        self.averages = Averages(self.net)
        self.shared = [self.net]
        self.data = TensorDataset(torch.zeros(3))


def test_hidden_modules_and_own_objects_return():
    student = Student()
    teacher, weight = student.hidden[0], student.net.weight.detach().clone()
    before = ModuleAttributes(student)
    for _ in range(2):
        teacher(torch.randn(4, 2))
        with torch.no_grad():
            teacher.weight += 1
            student.net.weight += 1
        student.averages.update(student.net)
        student.data.tensors[0].add_(1)
        before.restore()
        assert student.hidden == [teacher]
        assert teacher.weight.tolist() == [1, 1]
        assert teacher.num_batches_tracked == 0
        assert student.averages.updates == 0
        assert torch.equal(student.averages.shadow["weight"], weight)
    assert torch.equal(student.net.weight, weight + 2)  # parameters are left alone
    assert student.data.tensors[0].tolist() == [2, 2, 2]  # and data


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (1, None),
        ([1, [2]], lambda value: (value[1].append(3), value.append(4))),
        ({"a": [1]}, lambda value: (value["a"].append(2), value.update(b=1))),
        ({1, 2}, lambda value: value.add(3)),
        (collections.deque([1], maxlen=2), lambda value: value.extend([2, 3])),
        (([],), lambda value: value[0].append(1)),
        (Pair([1], 2), lambda value: value.first.append(1)),
        (torch.zeros(2), lambda value: value.add_(1)),
        ([torch.zeros(2)], lambda value: value[0].add_(1)),
    ],
)
def test_a_changed_value_returns(value, change):
    module = nn.Linear(2, 2)
    module.value = value
    before, text = ModuleAttributes(module), repr(value)
    for _ in range(2):
        if change is None:
            module.value += 1
        else:
            change(module.value)
        assert repr(module.value) != text
        before.restore()
        assert repr(module.value) == text
        assert module.value is value


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.default_rng(0), lambda one: one.random()),
        (np.random.RandomState(0), lambda one: one.rand()),
        (random.Random(0), lambda one: one.random()),
        (torch.Generator(), lambda one: torch.rand(1, generator=one).item()),
    ],
)
def test_random_generators_return(generator, draw):
    module = nn.Module()
    module.generator, module.kept = generator, [generator]
    before = ModuleAttributes(module)
    drawn = draw(generator), draw(generator)
    before.restore()
    assert (draw(module.generator), draw(module.kept[0])) == drawn


@pytest.mark.parametrize("value", [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")])
def test_tensors_without_values_stay_as_they_are(value):
    module = nn.Module()
    module.value = value
    ModuleAttributes(module).restore()
    assert module.value is value


def test_new_attributes_go_and_deleted_ones_return():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].kept = 1
    before = ModuleAttributes(module)
    del module[0].kept
    module[0].new = 2
    before.restore()
    assert module[0].kept == 1
    assert not hasattr(module[0], "new")


def test_parameters_and_submodules_are_left_alone():
    module = nn.Sequential(nn.Linear(2, 2))
    module.held = [module[0].weight]
    before = ModuleAttributes(module)
    with torch.no_grad():
        module[0].weight.fill_(7)
    module.append(nn.Linear(2, 2))
    before.restore()
    assert module[0].weight.eq(7).all()
    assert len(module) == 2


def test_running_statistics_and_modes_return():
    module = nn.BatchNorm1d(3)
    before, mean = ModuleAttributes(module), module.running_mean
    module(torch.randn(5, 3))
    module.eval()
    before.restore()
    assert module.running_mean is mean
    assert mean.eq(0).all()
    assert module.num_batches_tracked == 0
    assert module.training


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", [MulticlassAccuracy, MulticlassAUROC])
def test_metrics_return(make, inference):
    module = nn.Module()
    module.metric = make(3)
    with torch.inference_mode(inference):
        module.metric.update(torch.rand(6, 3), torch.arange(6) % 3)
        expected = module.metric.compute()
        before = ModuleAttributes(module)
        module.metric.update(torch.rand(6, 3), torch.zeros(6).long())
    before.restore()
    assert torch.equal(module.metric.compute(), expected)
    assert module.metric.update_count == 1


def test_a_list_that_holds_itself_returns():
    module = nn.Module()
    module.value = []
    module.value.append(module.value)
    before = ModuleAttributes(module)
    module.value.append(1)
    before.restore()
    assert len(module.value) == 1
    assert module.value[0] is module.value


class Holder(nn.Linear):
    """Of the package of what it holds."""


class Slotted:
    """As a counter of a step with slots."""

    __slots__ = ("average", "steps", "unset")

    def __init__(self):
        self.steps, self.average = 0, torch.zeros(2)


def test_arrays_namespaces_and_slots_return():
    module = Holder(2, 2)
    module.array, module.memory, module.numbers = np.zeros(2), bytearray(2), array.array("i", [0, 0])
    module.settings, module.slotted = types.SimpleNamespace(steps=0, seen=[]), Slotted()
    module.hparams = AttributeDict(steps=0)
    held = [module.array, module.memory, module.numbers, module.settings, module.slotted, module.hparams]
    before = ModuleAttributes(module)
    for _ in range(2):
        module.array += 1
        module.memory[0], module.numbers[1] = 1, 1
        module.settings.steps, module.hparams.steps, module.slotted.steps = 1, 1, 1
        module.settings.seen.append(1)
        module.slotted.average += 1
        before.restore()
        assert module.array.tolist() == [0, 0]
        assert (bytes(module.memory), module.numbers.tolist()) == (bytes(2), [0, 0])
        assert (module.settings.steps, module.settings.seen, module.hparams.steps) == (0, [], 0)
        assert (module.slotted.steps, module.slotted.average.tolist()) == (0, [0, 0])
        now = [module.array, module.memory, module.numbers, module.settings, module.slotted, module.hparams]
        assert all(one is other for one, other in zip(held, now, strict=True))


class Picky(dict):
    """Takes no items any more."""

    def clear(self):
        raise TypeError

    update = __setitem__ = clear


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict, Picky])
def test_items_of_dictionaries_return_in_their_order(kind):
    layer = nn.Linear(1, 1)
    layer.queue = kind()
    own = dict if kind is Picky else kind
    own.update(layer.queue, {"a": 1, "b": [2]})
    before = ModuleAttributes(layer)
    own.pop(layer.queue, "a")
    before.restore()
    assert list(layer.queue.items()) == [("a", 1), ("b", [2])]


def test_what_did_not_change_may_be_gone_through():
    layer = nn.Linear(1, 1)
    layer.queue, layer.names = collections.OrderedDict({torch.ones(2): 1, torch.zeros(2): 2}), ["a", "b"]
    layer.register_forward_hook(print)
    before = ModuleAttributes(layer)
    for _ in zip(layer.queue.items(), layer.names, layer._forward_hooks.items(), strict=False):
        before.restore()


class Settings(dict):
    """Its items are attributes, as those of an EasyDict."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Ordered(collections.OrderedDict):
    """Of a class of the user's."""


class History(list):
    """Knows how often it was added to."""

    added = 0

    def append(self, value):
        self.added += 1
        super().append(value)


CONTAINERS = {
    "settings": (Settings(seen=[0]), lambda one: (one.seen.append(1), setattr(one, "more", 2))),
    "ordered": (Ordered(a=1, b=2), lambda one: one.move_to_end("a")),
    "history": (History([1]), lambda one: one.append(2)),
    "user's dictionary": (collections.UserDict(a=1), lambda one: one.update(a=2, b=3)),
    "user's list": (collections.UserList([1]), lambda one: one.append(2)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_other_classes_return(name):
    value, change = CONTAINERS[name]
    net = nn.Linear(2, 2)
    net.held = value
    expected = repr(value), vars(value).get("added")
    before = ModuleAttributes(_Holder(net))
    for _ in range(2):
        change(value)
        assert repr(value) != expected[0]
        before.restore()
        assert net.held is value
        assert (repr(value), vars(value).get("added")) == expected


class _Holder(nn.Module):
    """Makes this file one of the user's packages."""

    def __init__(self, net):
        super().__init__()
        self.net = net


SEEN: list[int] = []
STEP = 0


class _Counter:
    made = 0

    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        _Counter.made += 1


COUNTER = _Counter()


def _advance(x, seen=[0]):  # noqa: B006  # as users do
    global STEP
    STEP += len(x)
    seen[0] += 1
    return seen[0]


class _ChangesWhatItDoesNotOwn(nn.Module):
    calls = 0
    tables: ClassVar[dict[str, int]] = {}

    def __init__(self):
        super().__init__()
        total = 0

        def sum_up(x):
            nonlocal total
            total += 1
            return total

        self.sum_up = sum_up

    def forward(self, x):
        return self._inner(x) + self.total

    def _inner(self, x):
        SEEN.append(len(x))
        type(self).calls += 1
        self.tables["one"] = self.calls
        COUNTER.add()
        return _advance(x)

    @property
    def total(self):
        return self.sum_up(None)


def test_values_of_the_code_of_a_module_return():
    net = _ChangesWhatItDoesNotOwn()
    net(torch.ones(3))
    before = CodeValues([nn.Sequential(net)])
    state = [*SEEN], STEP, net.calls, {**net.tables}, COUNTER.count, _Counter.made, _advance(torch.ones(0))
    _advance.__defaults__[0][0] -= 1
    seen, counter, forward = SEEN, COUNTER, _ChangesWhatItDoesNotOwn.forward
    for _ in range(2):
        net(torch.ones(3))
        before.restore()
        after = [*SEEN], STEP, net.calls, {**net.tables}, COUNTER.count, _Counter.made, _advance(torch.ones(0))
        _advance.__defaults__[0][0] -= 1
        assert after == state
    assert (SEEN, COUNTER, _ChangesWhatItDoesNotOwn.forward) == (seen, counter, forward)
    assert SEEN is seen
