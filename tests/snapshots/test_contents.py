"""Digests of what a data set holds."""

import array
import collections
import datetime
import functools
import itertools
import multiprocessing
import operator
import os
import pathlib
import random
import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch

from lightning_egeria.core.snapshots.contents import Contents, changed, digests_of


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
        self.level, self.folder, self.day = np.float32(1), pathlib.Path("a"), datetime.date(2020, 1, 1)
        self.range, self.slice, self.chosen = range(3), slice(1), {1, 2}
        self.last, self.raw, self.numbers = collections.deque([0], 3), bytearray(1), array.array("d", [0])
        self.shared, self.slots, self.function_of_epoch = multiprocessing.Value("i", 0), Slots(1), scaled_by(1)
        self.kind, self.count = Scale, itertools.count()
        self.ordered, self.counter = collections.OrderedDict(a=1, b=2), collections.Counter("ab")
        self.point, self.pair = Point([1], 2), ([1], {2: [3]})
        self.method, self.frozen = Scale(3).__call__, frozenset({1})


Point = collections.namedtuple("Point", "x y")


class Slots:
    __slots__ = ("level",)

    def __init__(self, level):
        self.level = level


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


def scaled_and_more(number):
    return lambda x: x * number + number


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
    "number of numpy": _set("level", np.float32(2)),
    "path": _set("folder", pathlib.Path("b")),
    "date": _set("day", datetime.date(2020, 1, 2)),
    "range": _set("range", range(4)),
    "slice": _set("slice", slice(2)),
    "set": lambda data: data.chosen.add(3),
    "deque": lambda data: data.last.append(1),
    "bytearray": lambda data: data.raw.__setitem__(0, 1),
    "array of python": lambda data: data.numbers.__setitem__(0, 1),
    "value shared with workers": lambda data: setattr(data.shared, "value", 1),
    "slot": lambda data: setattr(data.slots, "level", 2),
    "attribute of a function": lambda data: setattr(data.function_of_epoch, "epoch", 1),
    "class": _set("kind", Inner),
    "iterator that counts": lambda data: next(data.count),
    "key of the same value": lambda data: data.lookup.update(horse=data.lookup.pop("dog")),
    "order of keys": lambda data: data.lookup.update(cat=data.lookup.pop("cat")),
    "ordered dictionary": lambda data: data.ordered.move_to_end("a"),
    "counter": lambda data: data.counter.update("a"),
    "list in a named tuple": lambda data: data.point.x.append(1),
    "list in a tuple": lambda data: data.pair[1][2].append(1),
    "bound object of a method": lambda data: setattr(data.method.__self__, "by", 4),
    "frozen set": _set("frozen", frozenset({2})),
    "class of an object": lambda data: setattr(data.transform, "__class__", Inner),
    "dictionary of an object": lambda data: setattr(data.transform, "__dict__", {"by": 5}),
    "code of a function": lambda data: setattr(data.target_transform, "__code__", scaled_and_more(1).__code__),
    "defaults of a function": lambda data: setattr(data.target_transform, "__defaults__", (1,)),
    "content of a cell": lambda data: setattr(data.target_transform.__closure__[0], "cell_contents", 5),
    "empty cell": lambda data: delattr(data.target_transform.__closure__[0], "cell_contents"),
    "list by an equal one, then changed": lambda data: (_set("y", [*data.y])(data), data.y.append(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_has_another_digest(change):
    data = Data()
    before = digests_of(data)
    assert changed(before, digests_of(data)) is None
    change(data)
    assert changed(before, digests_of(data)) is not None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_quick_look_sees_each_change(change):
    data = Data()
    contents = Contents(data)
    assert contents.digests == digests_of(data)
    assert contents.are_same()
    change(data)
    assert not contents.are_same()


def test_a_quick_look_takes_an_equal_object_for_another():
    data = Data()
    contents = Contents(data)
    data.y = [*data.y]
    assert not contents.are_same()
    assert contents.digests == digests_of(data)


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
    before = Contents(data, moving=True)
    assert before.are_same()
    CHANGES[name](data)
    assert not before.are_same()
    assert changed(before.digests, Contents(data, moving=True).digests) is not None


@pytest.mark.parametrize("name", ["tensor", "array", "name of a file"])
def test_data_are_no_moving_parts(name):
    data = Data()
    before = Contents(data, moving=True)
    CHANGES[name](data)
    assert changed(before.digests, Contents(data, moving=True).digests) is None


def test_reading_data_changes_no_digest():
    data = Data()
    before = digests_of(data)
    [item["boxes"] for item in data.items]
    data.transform(data.x)
    assert changed(before, digests_of(data)) is None


def test_of_the_trainer_of_a_model_only_the_epoch_is_looked_at():
    """A data set that holds the model reaches it, and everything in it moves."""
    data = Data()
    data.inner.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    found = {path for path in digests_of(data) if path.startswith("inner.trainer.")}
    assert found == {"inner.trainer.__class__", "inner.trainer.current_epoch"}


def test_what_cannot_be_shown_is_told_by_identity():
    data = Data()
    data.huge = 10**5000
    before = digests_of(data)
    assert changed(before, digests_of(data)) is None
    data.huge = 10**5000 + 1
    assert changed(before, digests_of(data)) == "huge"


class Shy:
    """Cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no")


class Closed:
    """Its attribute cannot be read."""

    __slots__ = ("inner",)

    def __getattribute__(self, name):
        if name == "inner":
            raise RuntimeError("no")
        return super().__getattribute__(name)


@pytest.mark.parametrize("held", [{Shy(), Shy()}, np.array([Shy()], dtype=object), Closed()])
def test_what_cannot_be_read_raises_on_request_only(held):
    data = Data()
    data.held, data.eighth = held, torch.zeros(2, dtype=torch.float8_e4m3fn)
    before = digests_of(data)
    assert changed(before, digests_of(data)) is None
    assert changed(Contents(data, moving=True).digests, Contents(data, moving=True).digests) is None
    contents = Contents(data)
    data.eighth[0] = 1
    assert changed(before, digests_of(data)) == "eighth"
    assert not contents.are_same()
    with pytest.raises(RuntimeError, match="no"):
        digests_of(data, strict=True)


def test_another_run_has_the_same_digests():
    """Of sets of texts, builtin functions and objects that are not looked at, too."""
    script = (
        "import torch, types\n"
        "from lightning_egeria.core.snapshots.contents import digests_of\n"
        "def act(x): return x in {'a', 'b', 'c'}\n"
        "class Net(torch.nn.Module): pass\n"
        "holder = [{'x', 'y', 'z'}, torch.relu, act, Net(), Net, types.SimpleNamespace(a=1)]\n"
        "print(digests_of(holder, lambda one: not isinstance(one, torch.nn.Module), across_runs=True))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert b"[5].a" in found.pop()


def test_depth_and_order_count():
    deep = {"a": 1}
    for _ in range(30):
        deep = {"inner": deep, "other": [1, 2]}
    before, inner = digests_of(deep), deep
    while "inner" in inner:
        inner = inner["inner"]
    inner["a"] = 2
    assert changed(before, digests_of(deep)).endswith("['a']")
    pair = {"one": 1, "two": 2}
    before = digests_of(pair)
    pair["one"] = pair.pop("one")
    assert changed(before, digests_of(pair)) == "keys()"


def test_more_objects_than_it_looks_at_are_an_error_if_strict():
    many = [[number] for number in range(100)]
    assert len(digests_of(many, most=50)) < 200
    with pytest.raises(ValueError, match="more than 50 objects"):
        digests_of(many, most=50, strict=True)
