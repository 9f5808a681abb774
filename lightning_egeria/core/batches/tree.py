"""Batches, samples and outputs as trees of leaves, numbered by `torch.utils._pytree`.

The number of a tensor is its place among all tensors of the tree. Containers that pytree does not know (other mappings
and sequences, dataclasses) count as part of the tree too.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        elif (parts := parts_of(leaf)) is not None:
            for _, part in parts:
                yield from tensor_leaves(part)
        elif isinstance(leaf, Sequence) and not isinstance(leaf, (str, bytes, range)):
            yield from tensor_leaves(list(leaf))


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a mapping, a list, a tuple or a dataclass, each with its key in words; None of all else.

    >>> parts_of({"a": 1, 2: "b"}), parts_of((3, 4)), parts_of("text")
    ([("'a'", 1), ('2', 'b')], [('0', 3), ('1', 4)], None)
    """
    if isinstance(value, Mapping):
        return [(repr(key), part) for key, part in value.items()]
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return [(str(at), part) for at, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def with_parts(value: Any, parts: Iterable[Any]) -> Any:
    """Return a container like ``value``, with other parts in the order of `parts_of`.

    >>> with_parts({"a": 1, 2: "b"}, [3, 4])
    {'a': 3, 2: 4}
    """
    if _is_named_tuple(value):
        return type(value)(*parts)
    if type(value) in (list, tuple):
        return type(value)(parts)
    if type(value) is dict:
        return dict(zip(value, parts, strict=True))
    copied = copy.copy(value)
    if isinstance(value, Mapping):
        for key, part in zip(value, parts, strict=True):
            copied[key] = part
    else:  # a dataclass, frozen or not
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            object.__setattr__(copied, field.name, part)
    return copied


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


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
            before = [part for _, part in parts_of(leaf) or ()]
            after = [change_leaves(part, kinds, change) for part in before]
            return leaf if all(map(operator.is_, after, before)) else with_parts(leaf, after)
        try:
            return apply_to_collection(leaf, kinds, change, allow_frozen=True)
        except Exception:  # the user's classes may raise anything
            if next(tensor_leaves(leaf), None) is not None:
                raise
            return leaf

    return pytree.tree_map(changed, value, is_leaf=lambda leaf: isinstance(leaf, kinds))
