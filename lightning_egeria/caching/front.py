"""The frozen front of a network: its layer modules are recorded on tapes, and left out where their output is known."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_egeria.caching.units import Batch, FrontUnit, Seen
from lightning_egeria.errors import CacheError
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.lazy.tensors import LazyTensor, plain
from lightning_egeria.lazy.units import Context
from lightning_egeria.network.compilation import eager
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.snapshots.frozen_state import FrozenState


class FrontSequence(FrontUnit):
    """Stands in for the ``forward`` of an `nn.Sequential` that begins with units, and records their calls as one.

    Such a module gives what one layer returns to the next, and nobody else sees it: unless there are hooks, or entries
    of a boundary between them, for which the layers are called one by one. So they are before each of them has been
    recorded.

    Args:
        units: of its first layers, in order, with the layers of inner sequences.
        members: what stands in for the ``forward`` of each of these layers.
    """

    def __init__(
        self, front: Front, path: str, module: nn.Sequential, units: Sequence[FrontUnit], members: Sequence[FrontUnit]
    ) -> None:
        last = units[-1]
        self._layers, self._others = list(module)[: len(members)], list(module)[len(members) :]
        super().__init__(front, last.number, path, module, last.depth, last.output_leaf, self._layers)
        self.units, self._members = units, members
        self._ids = [*map(id, module)]
        self._inside = frozenset(unit.depth for unit in units[:-1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or call the layers."""
        if len(args) == 1 and not kwargs and type(args[0]) is LazyTensor and self.is_whole():
            owner = args[0].node.tape.owner
            if owner is not None and not any(read.level.depth in self._inside for read in owner.reads):
                recorded = self.recorded_before(args[0])
                if recorded is not None:
                    value = self.hand_on(owner, list(args), *recorded)
                    for layer in self._others:
                        value = layer(value)
                    return value
        forward: Any = type(self.module).forward
        return forward(self.module, *args, **kwargs)

    def is_whole(self) -> bool:
        """Whether calls of the module begin with calls of its units, one behind the other."""
        children = self.module._modules
        return (
            type(self.module) is nn.Sequential
            and [*map(id, children.values())] == self._ids
            and all(vars(layer).get("forward") is own for layer, own in zip(self._layers, self._members, strict=True))
            and not any(vars(layer).get("_compiled_call_impl") for layer in self._layers)
            and all(own.is_whole() for own in self._members if isinstance(own, FrontSequence))
        )

    @property
    def mode(self) -> tuple[bool, ...]:
        """Whether the layers are in training mode."""
        return tuple(mode for unit in self.units for mode in unit.mode)

    def seen(self, keys: Keys, key: int, meta: Meta, context: Context) -> Seen | None:
        """What a call was recorded as: the layers' own calls, one behind the other."""
        call = keys, key, meta, self.mode, context
        if call not in self._seen:
            form = None
            for unit in self.units:
                found = unit.seen(keys, key, meta, context)
                if found is None or len(found[0]) != 1 or not found[2].structure.is_leaf():
                    return None
                (key,), _, form = found
                (meta,) = form.metas
            assert form is not None
            self._seen[call] = (key,), self.call_in(context), form
        return self._seen[call]

    def now(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        (value,) = args
        for unit in self.units:
            value = unit.now(value)
        return value


class FrontEncoder(FrontUnit):
    """Stands in for the ``forward`` of an `nn.TransformerEncoder` that has units inside.

    In evaluation, and with padding masked, torch computes such a module on nested tensors, which leaves zeros at padded
    positions. It does not do so for lazy tensors, so the module gets true ones.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module: Any = self.module
        masks = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None
        if masks and module.use_nested_tensor and not module.layers[0].training and not torch.is_autocast_enabled():
            args, kwargs = pytree.tree_map(
                lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            self.refuse(
                "computes on nested tensors in evaluation; nn.TransformerEncoder(enable_nested_tensor=False) does not"
            )
        return nn.TransformerEncoder.forward(module, *args, **kwargs)


class Front:
    """The first ``depth`` layer modules of a frozen prefix, with other boundaries inside.

    Between batches the network is as without the cache. While a batch runs, compiled modules run uncompiled: what a
    compiler has made of frozen layers cannot be recorded.

    Args:
        prefix: the frozen prefix.
        depth: number of layer modules to leave out.

    Attributes:
        depth: number of layer modules to leave out.
        batch: the batch in training or validation; None between batches.
        thread: the thread that trains on it.
        state: weights, buffers and modes of the layer modules.
        renewals: how often another state was taken for the one that entries stand for.
        refused: which layer module could not be recorded first, and why; None if all could.
        ran: numbers of the units that ran, for the owner of the batch to read and clear.
        first: paths of the units of the first layer module, and of layers in front of it that the user has frozen.
        devices: device types whose autocast modes matter.
        folds: in training or not, whether linear layers are fast: see `folded`; empty until that is known.
    """

    def __init__(self, prefix: FrozenPrefix, depth: int) -> None:
        self.depth, self.prefix = depth, prefix
        self.batch: Batch | None = None
        self.thread = get_ident()
        self.folds: dict[bool, bool] = {}
        self.device = next((p.device for p in prefix.module.parameters()), torch.device("cpu"))
        self.devices: tuple[str, ...] = ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)
        modules = dict(prefix.module.named_modules())
        layers = prefix.chain.layer_modules[:depth]
        ends = {layer.units[-1]: (at + 1, layer.output_leaf) for at, layer in enumerate(layers)}
        paths = list(dict.fromkeys(path for layer in layers for path in layer.units))
        self.state = FrozenState([(path, modules[path]) for path in paths])
        self.first = frozenset(layers[0].units)
        self.ran: set[int] = set()
        self.refused: str | None = None
        self.renewals = 0
        self._paths = paths
        self.units = [
            FrontUnit(self, number, path, modules[path], *ends.get(path, (0, 0))) for number, path in enumerate(paths)
        ]
        self._placed = (*self.units, *_sequences_of(self, prefix.module), *_encoders_of(self, prefix.module))
        self._uncompiled = contextlib.ExitStack()

    def begin(self, batch: Batch) -> None:
        """Have a batch go through the front; the one before it has ended."""
        for unit in self._placed:
            unit.put()
        self._uncompiled.enter_context(eager())
        self.batch, self.thread = batch, get_ident()

    def end(self) -> None:
        """Leave the network as it was. Safe to call twice."""
        for unit in reversed(self._placed):
            unit.restore()
        self._uncompiled.close()
        self.batch = None

    def missing(self) -> str | None:
        """Return the path of a module that other code has replaced, or its ``forward``; None if there is none."""
        return next((unit.path for unit in self.units if not unit.is_in_place(self.prefix.module)), None)

    def renew(self) -> None:
        """Take the weights as they are now for those of the front."""
        modules = dict(self.prefix.module.named_modules())
        with contextlib.suppress(CacheError):  # it cannot be read; then it goes on changing
            self.state = FrozenState([(path, modules[path]) for path in self._paths if path in modules])
        self.renewals += 1


def _encoders_of(front: Front, module: nn.Module) -> list[FrontEncoder]:
    """Return what stands in for the ``forward`` of encoders in a network that have units of a front inside."""
    own = {unit.module for unit in front.units}
    encoders = [(path, one) for path, one in module.named_modules() if isinstance(one, nn.TransformerEncoder)]
    return [
        FrontEncoder(front, 0, path, encoder, 0, 0)
        for path, encoder in encoders
        if type(encoder).forward is nn.TransformerEncoder.forward and not own.isdisjoint(encoder.modules())
        if encoder not in own and "forward" not in vars(encoder)
    ]


def _sequences_of(front: Front, module: nn.Module) -> list[FrontSequence]:
    """Return what stands in for the ``forward`` of sequences in a network that begin with units of a front."""
    known: dict[int, FrontUnit] = {id(unit.module): unit for unit in front.units}
    found: list[FrontSequence] = []
    for path, container in reversed(list(module.named_modules())):  # those inside others first
        if type(container) is not nn.Sequential or "forward" in vars(container):
            continue
        layers = itertools.takewhile(
            lambda one: id(one) in known and type(one).__call__ is nn.Module.__call__, container._modules.values()
        )
        members = [known[id(layer)] for layer in layers]
        inside = [unit for one in members for unit in (one.units if isinstance(one, FrontSequence) else [one])]
        numbers = [unit.number for unit in inside]
        if len(members) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            found.append(FrontSequence(front, path, container, inside, members))
            if len(members) == len(container):
                known[id(container)] = found[-1]
    return found
