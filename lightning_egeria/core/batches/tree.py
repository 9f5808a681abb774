"""Batches, samples and outputs as trees of leaves, numbered by `torch.utils._pytree`.

The number of a tensor is its place among all tensors of the tree. Containers that pytree does not know (other mappings
and sequences, dataclasses) count as part of the tree too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils import _pytree as pytree


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree, in order.

    >>> [t.shape[0] for t in tensor_leaves({"a": Tensor([0]), "b": (Tensor([0, 0]), "text", None)})]
    [1, 2]
    """
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensor_leaves(list(leaf.values()))
        elif isinstance(leaf, Sequence) and not isinstance(leaf, (str, bytes, range)):
            yield from tensor_leaves(list(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensor_leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def change_leaves(value: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return the tree with each leaf of the given types changed. A part without such a leaf stays the same object.

    Args:
        value: any tree.
        kinds: types of the leaves to change; a container of one of these types counts as a leaf.
        change: maps a leaf to its replacement.

    >>> change_leaves(([1.0, 2], range(3)), float, int)
    ([1, 2], range(0, 3))
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, kinds):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _with_changed_fields(leaf, kinds, change)
        try:
            return apply_to_collection(leaf, kinds, change, allow_frozen=True)
        except Exception:  # the user's classes may raise anything
            if next(tensor_leaves(leaf), None) is not None:
                raise
            return leaf

    return pytree.tree_map(changed, value, is_leaf=lambda leaf: isinstance(leaf, kinds))


def _with_changed_fields(value: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a dataclass instance, frozen or not; the instance itself if no field changes."""
    before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    after = {name: change_leaves(field, kinds, change) for name, field in before.items()}
    if all(after[name] is field for name, field in before.items()):
        return value
    copied = copy.copy(value)
    for name, field in after.items():
        object.__setattr__(copied, name, field)
    return copied
