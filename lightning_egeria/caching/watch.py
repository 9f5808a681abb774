"""What one training step does with its batch and with the inside of the frozen prefix, seen operation by operation."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.bypass import Passage

_PREFIX = -1  # marks what was computed inside the prefix; leaves of the batch have their own number
# What may be done with an input on its way to the network: the network is then checked to get the values of the batch.
_HANDS_ON = ("aten::detach", "aten::alias", "aten::_to_copy", "aten::clone", "aten::copy_", "aten::empty_like")
# What turns a tensor into something that is no tensor, where its traces are lost.
_READS_OUT = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero")
_LEAVES_TORCH = ("tolist", "numpy", "__array__", "__dlpack__")  # methods that do so without an operation


class StepWatch(TorchDispatchMode):
    """Follows the tensors of a batch, and all that is made of them, through one forward of the training step.

    A cached step leaves the units of the prefix out: it is the same step only if nothing that they compute, except the
    boundary activation, is used behind the boundary. It need not even load an input if nothing behind the boundary, and
    nothing outside the network, uses that or what was made of it.

    Args:
        batch: as the training step gets it.
        passage: tells where in the network the step is.

    Attributes:
        prefix_used: the first operation that used the inside of the prefix behind the boundary; None: there was none.
        input_used: by leaf of the batch, the first operation that needs its values apart from the prefix.
        read_in_front: numbers of all that is followed and was read in front of the boundary, and of each how many units
            were over by then.
        read_behind: and of what was read behind it.
    """

    def __init__(self, batch: Any, passage: Passage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix_used: str | None = None
        self.input_used: dict[int, str] = {}
        self.read_in_front: dict[int, int] = {}
        self.read_behind: set[int] = set()
        self._passage = passage
        self._marks: dict[int, set[int]] = {}
        self._alive: list[torch.UntypedStorage] = []  # or another tensor could take over an address
        for number, leaf in enumerate(tensor_leaves(batch)):
            self.follow(leaf, number)
        passage.unit_changed = self._unit_changed

    @property
    def only_behind(self) -> set[int]:
        """Numbers of what was read behind the boundary, and not in front of it."""
        return self.read_behind - self.read_in_front.keys()

    def follow(self, tensor: Tensor, number: int) -> None:
        """See what is done with one more tensor; those of the batch have the first numbers."""
        self._add(tensor, {number})

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and mark its results with what they were made of."""
        read = set()
        given = set()
        for tensor in tensor_leaves((args, dict(kwargs or {}))):
            given.add(_address(tensor))
            read |= self._marks_of(tensor)
        result = func(*args, **(kwargs or {}))
        if self._passage.in_unit:
            self._reads_in_front(read, self._passage.position - 1)
            read = {_PREFIX}
        elif read:
            self._judge(func._schema.name, read)
        if read:
            for tensor in tensor_leaves((result,)):
                if func._schema.is_mutable or _address(tensor) not in given:  # a view is what it is a view of
                    self._add(tensor, read)
        return result

    def leaves_torch(self, tensor: Tensor, name: str) -> None:
        """Something read the values of a tensor by a method of that name."""
        read = self._marks_of(tensor)
        if self._passage.in_unit:
            self._reads_in_front(read, self._passage.position - 1)
        elif read:
            self._judge(name, read)

    def _judge(self, name: str, read: set[int]) -> None:
        behind = self._passage.reached is not None
        read_out = name in _READS_OUT or name in _LEAVES_TORCH
        if behind:
            self.read_behind |= read
        elif read_out:
            self._reads_in_front(read, self._passage.position)
        if _PREFIX in read and (behind or read_out):
            self.prefix_used = self.prefix_used or name
        beside = not self._passage.in_entry and name not in _HANDS_ON and not _is_view(name)
        if behind or beside or read_out:
            for number in read - {_PREFIX}:
                self.input_used.setdefault(number, name)

    def _reads_in_front(self, read: set[int], units: int) -> None:
        for number in read:
            self.read_in_front.setdefault(number, units)

    def _unit_changed(self, inside: bool) -> None:
        if not inside and self._passage.reached is not None:
            self._marks.pop(_address(self._passage.reached), None)

    def _marks_of(self, tensor: Tensor) -> set[int]:
        return self._marks.get(_address(tensor), set())

    def _add(self, tensor: Tensor, marks: set[int]) -> None:
        address = _address(tensor)
        if address not in self._marks:
            self._marks[address] = set()
            self._alive.append(tensor.untyped_storage())
        self._marks[address] |= marks


@contextlib.contextmanager
def methods_seen(watch: StepWatch) -> Iterator[None]:
    """Tell ``watch`` of methods that give the values of a tensor without an operation, in this thread.

    A `TorchFunctionMode` would see them too, but under one some layers compute otherwise than without it.
    """
    thread = threading.get_ident()
    own = {name: vars(Tensor).get(name) for name in _LEAVES_TORCH}

    def seen(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def tell(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                watch.leaves_torch(tensor, name)
            return method(tensor, *args, **kwargs)

        return tell

    for name in _LEAVES_TORCH:
        setattr(Tensor, name, seen(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:  # it is inherited
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _address(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _is_view(name: str) -> bool:
    return name.removeprefix("aten::") in {
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "permute",
        "transpose",
        "t",
        "squeeze",
        "unsqueeze",
        "select",
        "slice",
        "as_strided",
    }
