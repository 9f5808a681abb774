"""One numbering of the tensors of a tree, whatever it is made of."""

import collections
import dataclasses
import types

import pytest
import torch
from torch.utils import _pytree as pytree

from lightning_egeria.core.batches.tree import change_leaves, tensor_leaves


@dataclasses.dataclass
class Output:
    first: torch.Tensor
    rest: tuple
    name: str = "text"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: list


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        (torch.zeros(1), [1]),
        ([torch.zeros(1), [torch.zeros(2)]], [1, 2]),
        ((torch.zeros(1), None, 3, "text", b"bytes"), [1]),
        ({"b": torch.zeros(1), "a": {"c": torch.zeros(2)}}, [1, 2]),
        (collections.OrderedDict(x=torch.zeros(3)), [3]),
        (Pair(torch.zeros(1), torch.zeros(2)), [1, 2]),
        (Output(torch.zeros(1), (torch.zeros(2), "x")), [1, 2]),
        (Output, []),
        ({torch.Size([2])}, []),
        (None, []),
        (iter([torch.zeros(1)]), []),
    ],
)
def test_tensor_leaves(value, sizes):
    assert [leaf.shape[0] for leaf in tensor_leaves(value)] == sizes


def t(value):
    return torch.tensor([float(value)])


TREES = {
    "tensor": lambda: t(0),
    "list": lambda: [t(0), [t(1)], "text", None],
    "dict as inserted": lambda: {"b": t(0), "a": {"c": t(1)}, 3: t(2)},
    "OrderedDict": lambda: collections.OrderedDict(x=t(0), a=t(1)),
    "defaultdict": lambda: collections.defaultdict(list, x=t(0), a=t(1)),
    "UserDict": lambda: collections.UserDict(x=t(0), a=[t(1)]),
    "deque": lambda: collections.deque([t(0), t(1)]),
    "namedtuple": lambda: Pair(t(0), (t(1), 3)),
    "dataclass": lambda: Output(t(0), (t(1), "x")),
    "frozen dataclass": lambda: Frozen(t(0), [t(1)]),
    "mixed": lambda: [{"a": Output(t(0), (t(1), {"z": t(2)}))}, Pair(collections.UserDict(q=t(3)), t(4))],
}


@pytest.mark.parametrize("name", list(TREES))
def test_changes_are_made_in_the_order_of_leaves(name):
    tree = TREES[name]()
    numbers = [leaf.item() for leaf in tensor_leaves(tree)]
    assert numbers == list(range(len(numbers)))
    visited = []
    changed = change_leaves(tree, torch.Tensor, lambda leaf: visited.append(leaf.item()) or leaf + 10)
    assert visited == numbers
    assert [leaf.item() for leaf in tensor_leaves(changed)] == [number + 10 for number in numbers]
    assert [leaf.item() for leaf in tensor_leaves(tree)] == numbers  # the tree itself is as before


@pytest.mark.parametrize("name", ["list", "dict as inserted", "OrderedDict", "defaultdict", "deque", "namedtuple"])
def test_the_numbering_is_that_of_pytree(name):
    tree = TREES[name]()
    expected = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = list(tensor_leaves(tree))
    assert len(found) == len(expected)
    assert all(map(lambda a, b: a is b, found, expected))


@pytest.mark.parametrize("name", TREES)
def test_changed_trees_keep_their_types(name):
    tree = TREES[name]()
    changed = change_leaves(tree, torch.Tensor, torch.clone)
    assert type(changed) is type(tree)
    kinds = [type(leaf) for leaf in pytree.tree_leaves(tree)]
    assert [type(leaf) for leaf in pytree.tree_leaves(changed)] == kinds


def test_leaves_of_other_types_stay_the_same_objects():
    text, number = "some text that is not interned", 12345.6
    first, second, third = change_leaves((text, number, t(1)), torch.Tensor, torch.clone)
    assert first is text
    assert second is number
    assert torch.equal(third, t(1))


def test_a_container_of_the_given_type_is_a_leaf():
    assert change_leaves([Pair(1, 2), 3], Pair, sum) == [3, 3]


class Unmakeable(collections.UserList):
    """Cannot be made anew from its parts."""

    def __init__(self, first, second):
        super().__init__([first, second])


def test_a_container_without_tensors_may_be_unmakeable():
    value = Unmakeable(1, "two")
    (kept,) = change_leaves([value], torch.Tensor, torch.clone)
    assert kept is value


def test_an_unmakeable_container_of_tensors_is_an_error():
    with pytest.raises(TypeError, match="second"):
        change_leaves([Unmakeable(t(0), t(1))], torch.Tensor, torch.clone)


@pytest.mark.parametrize("value", [range(3), types.SimpleNamespace(x=t(0)), "text", b"bytes", {1, 2}, torch.Size([2])])
def test_what_holds_no_reachable_tensor_stays(value):
    assert list(tensor_leaves(value)) == []
    assert change_leaves(value, torch.Tensor, torch.clone) == value


@dataclasses.dataclass
class Named(collections.UserDict):
    """A mapping with its items as fields too, as outputs of networks are that pytree was not told of."""

    x: torch.Tensor

    def __post_init__(self):
        self.data = {"x": self.x}

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


def test_items_of_a_dataclass_that_is_a_mapping_change_too():
    value = Named(t(1))
    changed = change_leaves(value, torch.Tensor, lambda leaf: leaf + 1)
    assert changed["x"] is changed.x
    assert changed.x == 2
    assert value["x"] is value.x
    assert value.x == 1
