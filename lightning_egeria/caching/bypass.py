"""Running a network without its frozen prefix: stand-ins in front of the boundary, the cached activation at it."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_egeria.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.caching.samples import stand_in_tensor
from lightning_egeria.errors import CacheError
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.compilation import hidden_from_compiler
from lightning_egeria.network.forwards import Forward

Entered = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


class BoundaryReachedError(Exception):
    """Ends a forward that was run for its boundary activation only."""


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What a tensor in the output of a unit looked like in one batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stand_in(self, then: _BatchSize, now: _BatchSize) -> Tensor:
        shape = self.shape
        if shape and shape[0] % then.samples == 0:  # windows of an image lie in the batch dimension too
            shape = (shape[0] // then.samples * now.samples, *shape[1:])
        if then.length is not None and now.length is not None:
            shape = (*shape[:1], *(now.length if size == then.length else size for size in shape[1:]))
        return stand_in_tensor(shape, self.dtype, self.device)


class _BatchSize(NamedTuple):
    samples: int
    length: int | None  # that samples are padded to; None: they do not differ in length


class Passage:
    """One forward through the frozen prefix, real or with its front left out.

    Args:
        skip: how many unit calls to leave out; the last of them gives ``activation``. 0 runs all.
        activation: boundary activation for the last unit that is left out, ``[samples, ...]``.
        samples: of the batch; None takes that of the first tensor in the network's arguments.
        length: that the samples are padded to, if they differ in length.
        stop: raise `BoundaryReachedError` at the end of the prefix.
        entered: called when the network is first called, with the path of the entry and the arguments.
        left: called with the boundary activation of the whole prefix as soon as it is there.

    Attributes:
        reached: the boundary activation of the whole prefix, once it is there.
        entry_calls: how often the entries of the network were called until the forward was over, and after that.
        single: whether all of the prefix lies in the first call that the training step makes of the network.
    """

    def __init__(
        self,
        skip: int = 0,
        activation: Tensor | None = None,
        samples: int | None = None,
        length: int | None = None,
        stop: bool = False,
        entered: Entered | None = None,
        left: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.skip = skip
        self.activation = activation
        self.samples = samples
        self.length = length
        self.stop = stop
        self.entered = entered
        self.left = left
        self.reached: Tensor | None = None
        self.entry_calls = 0
        self.single = True
        self.outputs: list[Any] = []
        self.position = 0
        self.in_unit = False
        self.in_entry = 0
        self.unit_changed: Callable[[bool], None] | None = None

    def enter_unit(self, inside: bool) -> None:
        """The forward is inside a unit now, or has left it."""
        self.in_unit = inside
        if self.unit_changed is not None:
            self.unit_changed(inside)


class _Replacement(NamedTuple):
    module: nn.Module
    before: Forward | None  # that stood on the instance
    wrap: Callable[[Forward], Forward]
    forward: Forward


class PrefixBypass:
    """Stands in the way of the modules of a frozen prefix, from `begin` to `end`; lets them run, or leaves them out.

    Args:
        module: the model in training.
        chain: of its layer modules.
        depth: of the prefix.
        compiled: whether any of it is.
    """

    def __init__(self, module: nn.Module, chain: LayerChain, depth: int, compiled: bool) -> None:
        self._hidden = hidden_from_compiler if compiled else _unchanged
        self.depth = depth
        self.chain = chain
        self.units = [unit for layer_module in chain.layer_modules[:depth] for unit in layer_module.units]
        self._short = self._materialise = False
        self._positions = list(itertools.accumulate(len(one.units) for one in chain.layer_modules))
        self._modules = dict(module.named_modules())
        self._passage: Passage | None = None
        self._known: list[Any] = []
        self._known_size = _BatchSize(0, None)
        self._memo: dict[tuple[int, _BatchSize], Any] = {}
        self._in_place = False
        # The same functions each time: compiled code that calls them stays valid.
        wraps: dict[str, Callable[[Forward], Forward]] = {}
        for path in dict.fromkeys(self.units):
            wraps[path] = functools.partial(self._unit, path)
        for path in chain.entries:  # which may be a unit as well
            inner = wraps.get(path)
            outer = functools.partial(self._entry, path)
            wraps[path] = outer if inner is None else functools.partial(_both, inner, outer)
        self._replacements = [self._replacement(self._modules[path], wrap) for path, wrap in wraps.items()]

    def position_of(self, depth: int) -> int:
        """How many unit calls the first ``depth`` layer modules take."""
        return self._positions[depth - 1]

    def depth_at(self, position: int) -> int:
        """How many layer modules are over after so many unit calls."""
        return bisect.bisect_right(self._positions, position)

    def begin(self, passage: Passage) -> None:
        """The network takes this passage from here on, until `end`."""
        self._passage = passage
        if self._in_place:
            return
        self._in_place = True
        for number, replacement in enumerate(self._replacements):
            if vars(replacement.module).get("forward") is not replacement.before:  # somebody else replaced it meanwhile
                replacement = self._replacements[number] = self._replacement(replacement.module, replacement.wrap)
            vars(replacement.module)["forward"] = replacement.forward

    def end(self) -> None:
        """Leave the modules as they were: no copy of them, and no validation, sees any of this. Safe to call twice."""
        self._passage = None
        if not self._in_place:
            return
        self._in_place = False
        for replacement in reversed(self._replacements):
            attributes = vars(replacement.module)
            if attributes.get("forward") is not replacement.forward:
                continue  # replaced after us: theirs wraps ours, and without a passage that does nothing
            if replacement.before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = replacement.before

    def _replacement(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> _Replacement:
        original = module.forward
        forward = functools.wraps(original)(wrap(original))
        return _Replacement(module, vars(module).get("forward"), wrap, forward)

    def learn(self, passage: Passage, length: int | None) -> None:
        """Take the outputs of a passage that ran all units, padded to ``length``, as what stand-ins must look like."""
        if passage.skip or passage.reached is None or passage.samples is None:
            raise RuntimeError("only a whole forward shows what the units give")
        self._known, self._known_size = passage.outputs, _BatchSize(passage.samples, length)
        self._memo.clear()

    def stand_ins(self, short: bool, materialise: bool) -> None:
        """What stand-ins look like from here on.

        Args:
            short: of one sample, whatever the batch.
            materialise: with memory of their own, for networks that change them in place.
        """
        self._short, self._materialise = short, materialise
        self._memo.clear()

    def _entry(self, path: str, original: Forward) -> Forward:
        begin, end = self._hidden(functools.partial(self._begin_entry, path)), self._hidden(_end_entry)

        def forward(*args: Any, **kwargs: Any) -> Any:
            passage = begin(args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                end(passage)

        return self._hidden(forward, recursive=False)

    def _unit(self, path: str, original: Forward) -> Forward:
        begin = self._hidden(functools.partial(self._begin_unit, path))
        end = self._hidden(self._end_unit)

        def forward(*args: Any, **kwargs: Any) -> Any:
            passage, output = begin()
            if output is not None:
                return output
            try:
                output = original(*args, **kwargs)
            finally:
                end(passage, output)
            return output

        return self._hidden(forward, recursive=False)

    def _begin_entry(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passage | None:
        passage = self._passage
        if passage is None:
            return None
        first = passage.entry_calls == 0
        passage.entry_calls += 1
        if first:
            if passage.samples is None:
                leaf = next((t for t in tensor_leaves((args, kwargs)) if t.ndim), None)
                passage.samples = leaf.shape[0] if leaf is not None else None
            if passage.entered is not None:
                # It may run the network itself, for the samples of the batch that are missing.
                self._passage = None
                try:
                    passage.entered(path, args, kwargs)
                finally:
                    self._passage = passage
        passage.in_entry += 1
        return passage

    def _begin_unit(self, path: str) -> tuple[Passage | None, Any]:
        """The passage that takes note of this call, if any does, and what the unit gives; None: it has to run."""
        passage = self._passage
        if passage is None or passage.in_unit or passage.reached is not None:
            return None, None
        position = passage.position
        passage.position += 1
        if self.units[position] != path:
            raise CacheError(
                f"the frozen front of the network called {path!r} where {self.units[position]!r} was expected: its "
                "layers do not run in the same order each time, and a cache cannot stand for them"
            )
        if position < passage.skip:
            output = self._stand_in(position, passage)
            self._leave(passage, output)
            return passage, output
        passage.enter_unit(True)
        return passage, None

    def _end_unit(self, passage: Passage | None, output: Any) -> None:
        if passage is None:
            return
        passage.enter_unit(False)
        if output is None:  # it failed
            return
        if not passage.skip:
            passage.outputs.append(apply_to_collection(output, Tensor, _spec_of))
        self._leave(passage, output)

    def _leave(self, passage: Passage, output: Any) -> None:
        if passage.position < len(self.units):
            return
        passage.reached = list(tensor_leaves(output))[self.chain.layer_modules[self.depth - 1].output_leaf]
        if passage.unit_changed is not None:
            passage.unit_changed(False)
        if passage.left is not None:
            passage.left(passage.reached)
        if passage.stop:
            raise BoundaryReachedError

    def _stand_in(self, position: int, passage: Passage) -> Any:
        if passage.samples is None or passage.activation is None:
            raise RuntimeError("a passage that leaves units out needs its samples and an activation")
        last = position == passage.skip - 1
        key = (position, _BatchSize(passage.samples if last or not self._short else 1, passage.length))
        if key not in self._memo:
            self._memo[key] = apply_to_collection(self._known[position], _Spec, self._make, key[1])
        output = self._memo[key]
        if not last:
            return output
        boundary = self.chain.layer_modules[self._positions.index(passage.skip)]
        count = iter(range(sys.maxsize))
        return apply_to_collection(
            output, Tensor, lambda leaf: passage.activation if next(count) == boundary.output_leaf else leaf
        )

    def _make(self, spec: _Spec, size: _BatchSize) -> Tensor:
        made = spec.stand_in(self._known_size, size)
        return made.clone(memory_format=torch.contiguous_format) if self._materialise else made


def rows_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    samples: int,
    rows: Tensor,
    shorter: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """The arguments of a call for some samples of the batch only: tensors of ``samples`` rows are cut to ``rows``.

    With ``shorter``, a length and a new one, all their other dimensions of that length are cut as well.
    """

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != samples:
            return tensor
        tensor = tensor[rows.to(tensor.device)]
        for dim in range(1, tensor.ndim):
            if shorter is not None and tensor.shape[dim] == shorter[0]:
                tensor = tensor.narrow(dim, 0, shorter[1])
        return tensor

    cut_args, cut_kwargs = change_leaves((args, dict(kwargs)), Tensor, cut)
    return cut_args, cut_kwargs


def _spec_of(tensor: Tensor) -> _Spec:
    return _Spec(tuple(tensor.shape), tensor.dtype, tensor.device)


def _unchanged(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    return function


def _both(inner: Callable[[Forward], Forward], outer: Callable[[Forward], Forward], original: Forward) -> Forward:
    return outer(inner(original))


def _end_entry(passage: Passage | None) -> None:
    if passage is not None:
        passage.in_entry -= 1
        passage.single = passage.single and (passage.reached is not None or passage.in_entry > 0)
