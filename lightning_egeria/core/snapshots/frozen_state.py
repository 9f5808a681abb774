"""What the output of frozen layers depends on beside their input: weights, buffers, modes and plain attributes."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import operator
import time
import types
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_egeria.core.network.forwards import users_forward
from lightning_egeria.core.snapshots.contents import PLAIN, Contents, code_of, digests_of
from lightning_egeria.core.snapshots.digests import Copies, bytes_of, checksums, digest, divided, is_dense
from lightning_egeria.core.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.errors import CacheError


class FrozenState:
    """Remembers the state of frozen layers, and compares it later.

    All bits are compared on request. On the CPU it keeps checksums; on a GPU a copy, in the memory of the gradients
    that frozen weights have no longer. Otherwise it compares objects, plain attributes, modes, memory and version
    counters, and a piece of all weights, another one each time: version counters do not count writes through
    ``tensor.data``, and a change of all weights changes each piece. Containers and settings that modules hold are
    compared if that is quick.

    Args:
        units: the layers, by path; their submodules count too.

    Raises:
        CacheError: an attribute cannot be read.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        with _readable():
            self._remember(list(units))

    def _remember(self, units: list[tuple[str, nn.Module]]) -> None:
        self._units = [unit for _, unit in units]
        self._modules = list({id(m): m for unit in self._units for m in unit.modules()}.values())
        # A module that trains may change its mode between training and validation; the mode is part of the key then.
        self._evaluating = [module for module in self._modules if not module.training]
        self._attributes = [
            (vars(m), name, list(value) if isinstance(value, list) else value)
            for m in self._modules
            for name, value in vars(m).items()
            if _is_attribute(name, value)
        ]
        # A tensor with a history follows from weights, as with weight normalisation: each forward pass sets it again.
        self._others = [
            (vars(m), name) for m in self._modules for name, value in vars(m).items() if _is_other(name, value)
        ]
        self._packages = {type(m).__module__.partition(".")[0] for m in self._modules} - {"torch"}
        self._kinds = [*map(type, self._modules)]
        self._forwards = [(m, users_forward(m)) for m in self._modules]
        self._vars = [*map(vars, self._modules)]
        self._seen_forwards = [held.get("forward") for held in self._vars]
        self._sizes: list[tuple[dict[str, Any], int]] = [
            (held, len(held)) for m in self._modules for held in (m._modules, m._parameters, m._buffers)
        ]
        self._children = [(m._modules, name, child) for m in self._modules for name, child in m._modules.items()]
        # A look at the objects alone is quick; only where one is another one, values are compared.
        self._dicts = [held for held, _ in self._sizes]
        self._lists = [(held[name], value) for held, name, value in self._attributes if isinstance(value, list)]
        self._getters = []
        for module in self._modules:
            names = [name for name, value in vars(module).items() if _is_attribute(name, value)]
            names += ["_modules", "_parameters", "_buffers"]
            names += ["training"] if "training" in vars(module) else []  # a compiled module delegates it
            self._getters.append((operator.itemgetter(*names), vars(module)))
        self._note()
        self._values = self._digest_of(self._held)

    def _note(self) -> None:
        self._held = self._current()
        self._at = self._found()
        self._contents = Contents(self._at, self._is_own, _MOST, strict=True)
        started = time.perf_counter()
        self._contents.are_same()
        self._contents_s = time.perf_counter() - started
        self._tensors = [tensor for _, _, tensor in self._held]
        self._elsewhere = Copies([tensor for tensor in self._tensors if tensor.device.type != "cpu"])
        self._objects: list[Any] = []  # so that values are compared first
        self._plain: list[Any] | None = None
        here = [tensor for tensor in self._tensors if tensor.device.type == "cpu" and tensor.numel()]
        memory = [
            torch.as_strided(one.detach(), (one.numel(),), (1,)).view(torch.uint8).numpy().data
            for one in here
            if is_dense(one)
        ]
        self._shares = divided(memory, torch.get_num_threads())
        size = max(PIECE_BYTES, sum(part.nbytes for part in memory) // MOST_PIECES)
        pieces = [part[start : start + size] for part in memory for start in range(0, part.nbytes, size)]
        self._pieces = [(piece, xxhash.xxh3_64_intdigest(piece)) for piece in pieces]
        self._on_device = [
            (flat, flat.clone())
            for one in self._tensors
            if one.device.type != "cpu" and one.numel() and is_dense(one)
            for flat in [one.detach().as_strided((min(one.numel(), PIECE_VALUES),), (1,))]
        ]
        self._turn = 0
        self._counting: list[Tensor] = [
            tensor for tensor in self._tensors if not tensor.is_inference()
        ]  # others have no counter
        self._versions = [*map(_counter, self._counting)]
        self._scattered = [tensor for tensor in here if not is_dense(tensor)]
        self._marked = self._mark()

    def is_unchanged(self) -> bool:
        """Whether everything is the same, in the same tensors."""
        try:
            return self._is_unchanged()
        except Exception:  # of an attribute that cannot be read or compared
            return False

    def _is_unchanged(self) -> bool:
        if not self._has_same_contents():
            return False
        if not self._has_same_objects():
            if not self._has_equal_objects():
                return False
            self._note_objects()
        return self._mark() == self._marked and self._elsewhere.agree()

    def _has_same_contents(self) -> bool:
        """Whether attributes hold the same containers, settings, arrays and functions."""
        if not self._others:
            return True
        found = self._found()
        if all(map(operator.is_, found, self._at)) and self._contents.are_same():
            return True
        now = Contents(found, self._is_own, _MOST, strict=True)
        if now.digests != self._contents.digests:
            return False
        self._at, self._contents = found, now
        return True

    def _found(self) -> list[Any]:
        """What attributes hold that are no plain values."""
        return [held.get(name, _MISSING) for held, name in self._others]

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return False
        return isinstance(value, _SETTINGS) or type(value).__module__.partition(".")[0] in self._packages

    def _has_same_objects(self) -> bool:
        found = chain.from_iterable(map(dict.values, filter(None, self._dicts)))
        try:
            return (
                sum(map(len, self._dicts)) == len(self._objects)
                and all(map(operator.is_, found, self._objects))
                and [get(held) for get, held in self._getters] == self._plain
                and all(map(operator.is_, map(type, self._modules), self._kinds))
                and all(now == before for now, before in self._lists)
                and self._has_same_forwards()
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or became a tensor or an array
            return False

    def _has_same_forwards(self) -> bool:
        """Whether other code has replaced no ``forward``."""
        now = [*map(dict.get, self._vars, repeat("forward"))]
        if all(map(operator.is_, now, self._seen_forwards)):
            return True
        if any(users_forward(module) is not forward for module, forward in self._forwards):
            return False
        self._seen_forwards = now
        return True

    def _has_equal_objects(self) -> bool:
        """The same tensors, modules and classes, and attributes of the same values."""
        return not (
            any(held.get(name) is not tensor for held, name, tensor in self._held)
            or any(len(held) != size for held, size in self._sizes)
            or not self._has_same_forwards()
            or any(held.get(name) is not child for held, name, child in self._children)
            or not all(map(operator.is_, map(type, self._modules), self._kinds))
            or any(held.get(name, _MISSING) != value for held, name, value in self._attributes)
            or any(module.training for module in self._evaluating)
        )

    def is_same(self, all_bits: bool = True, share: float = 1.0) -> bool:
        """Whether everything is the same, value by value, though perhaps in other tensors; remembers these.

        Args:
            all_bits: compare all bits, even where no version counter has risen.
            share: of the bytes that are compared otherwise, if there are more modules to compare.
        """
        try:
            quick = not all_bits and self._has_same_objects() and self._has_same_piece(share)
            if quick and (self._contents_s > QUICK_S * share or self._has_same_contents()):
                return True
        except Exception:  # as in `is_unchanged`
            return False
        if self.is_unchanged():
            self._versions = [*map(_counter, self._counting)]
            return True
        try:
            if self._digest_of(self._current()) != self._values:
                return False
            self._note()
        except Exception:  # as in `is_unchanged`
            return False
        return self.is_unchanged()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and attributes on exit, for runs that the program did not ask for.

        Raises:
            CacheError: an attribute cannot be read, or restored.
        """
        with _readable():
            before = [ModuleAttributes(unit) for unit in self._units]
        try:
            yield
        finally:
            with _readable():
                for attributes in before:
                    attributes.restore()

    @property
    def digest(self) -> bytes:
        """Digest of all weights, buffers, attributes and classes with their code.

        Raises:
            CacheError: an attribute cannot be read.
        """
        state = hashlib.blake2b(self._values, digest_size=16)
        kinds = self._kinds
        with _readable():
            state.update(repr([kind.__qualname__ for kind in kinds]).encode())
            state.update(repr([_methods_of(kind) for kind in dict.fromkeys(kinds)]).encode())
            state.update(repr([(name, value) for _, name, value in self._attributes]).encode())
        return state.digest()

    def _has_same_piece(self, share: float) -> bool:
        """Whether no tensor has other memory, mode or version, and a piece of the values is the same."""
        self._turn += 1
        if self._scattered or [*map(_counter, self._counting)] != self._versions:
            return False
        if [*map(Tensor.data_ptr, self._tensors)] != self._marked[0]:
            return False
        room = PIECE_BYTES * share
        for at in range(len(self._pieces)):
            piece, checksum = self._pieces[(self._turn + at) % len(self._pieces)]
            if xxhash.xxh3_64_intdigest(piece) != checksum:
                return False
            room -= piece.nbytes
            if room <= 0:
                self._turn += at
                break
        if self._on_device:
            now, before = self._on_device[self._turn % len(self._on_device)]
            return torch.equal(now, before)
        return True

    def _note_objects(self) -> None:
        self._objects = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._plain = [get(held) for get, held in self._getters]

    def _mark(self) -> tuple[list[int], list[int]]:
        """Something that differs once a tensor has other memory, or a value on the CPU changed."""
        sums = [*checksums(self._shares), *(xxhash.xxh3_64_intdigest(bytes_of(one)) for one in self._scattered)]
        return [*map(Tensor.data_ptr, self._tensors)], sums

    def _digest_of(self, held: list[tuple[dict[str, Any], str, Tensor]]) -> bytes:
        """Digest of these tensors, and of what attributes hold."""
        tensors = {f"{at} {name}": tensor for at, (_, name, tensor) in enumerate(held)}
        state = hashlib.blake2b(digest(tensors), digest_size=16)
        contents = digests_of(self._found(), self._is_own, _MOST, across_runs=True, strict=True)
        state.update(repr(sorted(contents.items())).encode())
        return state.digest()

    def _current(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Weights and buffers by name, as they are now."""
        return [
            (held, name, tensor)
            for module in self._modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of an object in an attribute, whatever that is
        raise CacheError(
            f"the attributes of the frozen layers cannot be read ({type(error).__name__}: {error}). Keep the layer out "
            "with freeze_until"
        ) from error


_MISSING = object()
_counter = operator.attrgetter("_version")
_OF_TORCH = frozenset([*vars(nn.Module()), "forward"])
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)
_MOST = 2000  # objects within reach
PIECE_BYTES = 2**16  # of weights that are compared in each step, at least
MOST_PIECES = 1024  # of all weights
QUICK_S = 0.0005  # a look at containers and settings of the modules that takes less is taken each time
PIECE_VALUES = 4096  # of a tensor on a GPU


def _methods_of(kind: type) -> list[str]:
    """The code of a class of modules, of its own and of its bases outside torch."""
    own = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    return [code_of(one) for base in own for one in vars(base).values() if isinstance(one, types.FunctionType)]


def _is_attribute(name: str, value: Any) -> bool:
    """Whether it is a number or text that a module holds, such as ``eps`` and ``padding_mode``."""
    if name == "training":
        return False
    if isinstance(value, (tuple, list)):
        return all(isinstance(one, PLAIN) for one in value)
    return isinstance(value, PLAIN)


def _is_other(name: str, value: Any) -> bool:
    """Whether it is a tensor, a container or an object among the attributes of a module, and not one of ours."""
    if name in _OF_TORCH or _is_attribute(name, value) or type(value).__module__.startswith("lightning_egeria."):
        return False
    return not isinstance(value, Tensor) or value.grad_fn is None
