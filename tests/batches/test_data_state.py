"""Digests of what a data set holds."""

import functools
import operator
import random

import numpy as np
import pytest
import torch

from lightning_egeria.batches.data_state import changed, digests_of, moving_of


class Data:
    """Attributes of each kind that data sets have."""

    def __init__(self):
        self.x = torch.zeros(4, 3)
        self.y = [0, 1, 2, 0]
        self.table = np.arange(12).reshape(4, 3)
        self.names = [f"image {number}.png" for number in range(100)]
        self.items = [{"path": "a", "boxes": [torch.zeros(2)]}, {"path": "b", "boxes": []}]
        self.lookup = {"cat": 0, "dog": 1}
        self.epoch = 0
        self.half = torch.zeros(3, dtype=torch.bfloat16)
        self.words = np.array(["a", "b"], dtype=object)
        self.transform = Scale(2)
        self.target_transform = scaled_by(1)
        self.function = torch.tanh
        self.partial = functools.partial(operator.add, 1)
        self.generator = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.python = random.Random(0)
        self.torch = torch.Generator()
        self.inner = Inner()


class Inner:
    def __init__(self):
        self.labels = torch.arange(4)
        self.parent = self


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def scaled_by(number):
    return lambda x: x * number


def _set(name, value):
    return lambda data: setattr(data, name, value)


CHANGES = {
    "tensor": lambda data: data.x[2].add_(1),
    "dtype": _set("x", torch.zeros(4, 3, dtype=torch.int32)),
    "shape": _set("x", torch.zeros(3, 4)),
    "label": lambda data: data.y.__setitem__(2, 1),
    "label appended": lambda data: data.y.append(1),
    "array": lambda data: data.table.__setitem__((3, 2), 5),
    "name of a file": lambda data: data.names.__setitem__(50, "other"),
    "names swapped": lambda data: data.names.reverse(),
    "nested tensor": lambda data: data.items[0]["boxes"][0].add_(1),
    "nested text": lambda data: data.items[1].__setitem__("path", "c"),
    "dict": lambda data: data.lookup.__setitem__("bird", 2),
    "epoch": _set("epoch", 1),
    "number of another type": _set("epoch", 0.0),
    "bfloat16": lambda data: data.half.add_(1),
    "objects in an array": lambda data: data.words.__setitem__(0, "c"),
    "setting of a transform": lambda data: setattr(data.transform, "by", 3),
    "transform": _set("transform", None),
    "cell of a function": _set("target_transform", scaled_by(2)),
    "function": _set("function", torch.sin),
    "partial": _set("partial", functools.partial(operator.add, 2)),
    "generator": lambda data: data.generator.random(),
    "legacy generator": lambda data: data.legacy.rand(),
    "generator of python": lambda data: data.python.random(),
    "generator of torch": lambda data: torch.rand(1, generator=data.torch),
    "inner data set": lambda data: data.inner.labels.add_(1),
    "new attribute": _set("more", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_has_another_digest(change):
    data = Data()
    before = digests_of(data)
    assert changed(before, digests_of(data)) is None
    change(data)
    assert changed(before, digests_of(data)) is not None


def test_name_of_what_changed():
    data = Data()
    before = digests_of(data)
    data.inner.labels[0] = 7
    assert changed(before, digests_of(data)) == "inner.labels"


@pytest.mark.parametrize(
    "name", ["generator", "legacy generator", "generator of python", "generator of torch", "epoch"]
)
def test_moving_parts_are_generators_and_numbers(name):
    data = Data()
    before = moving_of(data)
    CHANGES[name](data)
    assert changed(before, moving_of(data)) is not None


@pytest.mark.parametrize("name", ["tensor", "array", "name of a file"])
def test_data_are_no_moving_parts(name):
    data = Data()
    before = moving_of(data)
    CHANGES[name](data)
    assert changed(before, moving_of(data)) is None


def test_reading_data_changes_no_digest():
    data = Data()
    before = digests_of(data)
    [item["boxes"] for item in data.items]
    data.transform(data.x)
    assert changed(before, digests_of(data)) is None
