"""Frozen modules, wherever they stand in a network: recorded instead of run while a batch is in progress.

A module is frozen if no parameter inside it trains and its output is a function of its input: no dropout is on, and no
normalisation uses the statistics of the batch. While a batch is in progress, the ``forward`` of each such module is
replaced. The largest one that is called records its call and returns lazy tensors; the modules inside it do not run.
Where a call cannot be recorded (hooks inside, an output that is no tree of tensors), the module runs its own
``forward`` on lazy tensors, and the frozen modules inside it record themselves.

A module with parameters and no frozen module inside gets true tensors: its code may go by the type of a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from lightning_egeria.caching import policy
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta, version_of
from lightning_egeria.caching.record.outside import has_samples
from lightning_egeria.caching.record.tape import UNKNOWN, Call, Node, Tape
from lightning_egeria.caching.record.tensors import LazyTensor, node_of, plain, show
from lightning_egeria.caching.record.units import Context, UnitCall, are_fixed, is_plain
from lightning_egeria.core.batches.onlookers import unwatched
from lightning_egeria.core.network.compilation import eager
from lightning_egeria.core.network.forwards import ReplacedForward, restore_forward, users_forward
from lightning_egeria.core.network.prefix import FrozenPrefix
from lightning_egeria.core.profiling.clock import mark, wait_for
from lightning_egeria.core.snapshots.digests import overlap
from lightning_egeria.core.snapshots.frozen_state import FrozenState
from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.core.training.isolation import is_outside_batch
from lightning_egeria.errors import CacheError
from lightning_egeria.upstream.torch import needs_gradient

if TYPE_CHECKING:
    from lightning_egeria.caching.serve import CachedBatch

_GLOBAL_HOOKS = (_hooks._global_forward_hooks, _hooks._global_forward_pre_hooks)
_requires_grad, _mode = operator.attrgetter("requires_grad"), operator.attrgetter("training")
_ONE = pytree.tree_flatten(((0,), {}))[1]  # structure of a call with one positional argument
Seen: TypeAlias = "tuple[tuple[int, ...], UnitCall, Form]"  # keys of the results, how they are computed, their form


class Form(NamedTuple):
    """What a call of a frozen module returns."""

    metas: tuple[Meta, ...]  # of the tensors, those of changed arguments last
    structure: pytree.TreeSpec
    written: tuple[int, ...]  # places of the arguments that it changes
    constants: tuple[tuple[int, Any], ...]  # places and values of what is no tensor


def _is_of_a_batch(lazy: LazyTensor) -> bool:
    """Whether it is known how it follows from a batch; one inside an object of the user's own class never got there."""
    return lazy.node.name != UNKNOWN and lazy.node.tape.owner is not None


def _follows_outside(tensor: Tensor) -> bool:
    """Whether tensors that the program made of each sample are behind a tensor, or it is one."""
    if not isinstance(tensor, LazyTensor):
        return True
    return any(leaf.row is None and has_samples(leaf) for leaf in tensor.node.leaves())


class Replacement(ReplacedForward):
    """Stands in for the ``forward`` of a module with parameters and no frozen module inside: it gets true tensors.

    It does so between `put` and `restore`.
    """

    def __init__(self, owner: FrozenModules, path: str, module: nn.Module) -> None:
        super().__init__(module)
        self.owner, self.path = owner, path
        self.before = self._users = users_forward(module)

    @property
    def original(self) -> Callable[..., Any]:
        """The module's ``forward`` without this one, with the kernels of a plain step.

        While a batch runs, it may be one that observes the step.
        """
        own = self.before if self.before is not None else functools.partial(type(self.module).forward, self.module)
        return functools.partial(unwatched, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with true tensors."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            if args[0].requires_grad:
                self.owner.behind_training.add(self.path)
            return self.original(*args)
        self.note_gradients([leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)])
        if not all(type(one) is Tensor for one in args) or kwargs:
            given = tuple(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor))
            if given:
                args, kwargs = pytree.tree_map_only(LazyTensor, plain, (args, kwargs))
                before = [version_of(plain(lazy)) for lazy in given]
                output = self.original(*args, **kwargs)
                for lazy, version in zip(given, before, strict=True):
                    value = plain(lazy)
                    if version_of(value) != version and not value.requires_grad:
                        lazy.node.tape.was_changed(lazy.node)
                    elif value.requires_grad:
                        raise CacheError(
                            f"the module {self.path!r} adds what it trains to its input in place, and that is the "
                            "output of frozen modules. Leave out FrozenPrefixCache, or clone the input"
                        )
                return output
        return self.original(*args, **kwargs)

    def note_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Remember whether the module is given what follows from what trains: in validation no gradient shows it."""
        if any(map(needs_gradient, tensors)):
            self.owner.behind_training.add(self.path)

    def put(self) -> None:
        """Replace the module's ``forward``, unless other code has replaced it for good."""
        if users_forward(self.module) is self._users:
            self.before = vars(self.module).get("forward")
            vars(self.module)["forward"] = self

    def restore(self) -> None:
        """Give the module its ``forward`` back, unless other code has replaced it since."""
        restore_forward(self.module, self, self.before)
        self.before = self._users

    def is_in_place(self, model: nn.Module) -> bool:
        """Whether the module is where it was, with its own ``forward`` or this one."""
        found: Any = model
        for name in self.path.split(".") if self.path else ():
            found = found._modules.get(name)
            if found is None:
                return False
        return found is self.module and users_forward(found) is self._users


class FrozenModule(Replacement):
    """Stands in for the ``forward`` of a frozen module.

    Attributes:
        path: path of the module.
        module: the module.
        owner: all frozen modules of the network.
        is_open: calls are not recorded; the module runs on lazy tensors, for the frozen modules inside it.
        seconds: that a run took when it was last timed.
    """

    def __init__(self, owner: FrozenModules, path: str, module: nn.Module, inner: Sequence[nn.Module] | None = None):
        super().__init__(owner, path, module)
        self.is_open, self.seconds = False, 0.0
        parts = [part for one in (module.children() if inner is None else inner) for part in one.modules()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._parameters = [p for part in (module, *parts) for p in part.parameters(recurse=False)]
        self._forms: dict[Any, Form | None] = {}
        self._seen: dict[Any, Seen] = {}

    @property
    def mode(self) -> tuple[bool, ...]:
        """Whether the module is in training mode; of a sequence, its layers."""
        return (self.module.training,)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the modules that it runs."""
        return (self.path,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or run the module."""
        owner = self.owner
        if owner.running or owner.batch is None:
            return self.original(*args, **kwargs)
        if len(args) == 1 and not kwargs and type(args[0]) is LazyTensor:
            recorded = self.recorded_before(args[0])
            if recorded is not None:
                return self.hand_on(list(args), *recorded)
        one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        flat, spec = (list(args), _ONE) if one else pytree.tree_flatten((args, kwargs))
        tape, batch = self._tape_of(flat)
        if tape is None or batch is None:
            return self._run_on_values(flat, spec, self._reason(flat))
        if self.is_open or any(self._hooks) or any(_GLOBAL_HOOKS):
            return self._open(flat, spec, self._reason(flat))
        flat = [leaf if not isinstance(leaf, LazyTensor) or _is_of_a_batch(leaf) else plain(leaf) for leaf in flat]
        context = Context.current(owner.devices)
        leaves = [node_of(tape, leaf) for leaf in flat]
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Node) and not is_plain(leaf)]
        if strange:
            return self._open(flat, spec, f"is given a {strange[0]}, which may change")
        try:
            arguments = [leaf.meta if isinstance(leaf, Node) else leaf for leaf in leaves]
            known = (spec, context, self.module.training, *arguments)
            form = self._forms.get(known)
        except TypeError:  # an argument cannot be hashed, so the call has no name
            return self._open(flat, spec)
        owner.called.add(self.path)
        if form is None or not (batch.defers and owner.waits(self.paths)):
            output, nodes, form = self._run(tape, flat, leaves, spec, context)
            self._forms[known] = form
            if form is None or nodes is None:
                return output
        else:
            run = self.call_in(context, form.constants)
            nodes = tape.record(self._name(context), run, leaves, spec, form.metas, form.written)
            if nodes is None:
                return self._open(flat, spec)
            if one and not form.written:
                call = tape.keys, leaves[0].key, leaves[0].meta, self.mode, context
                self._seen[call] = tuple(node.key for node in nodes), run, form
        return self.hand_on(flat, nodes, form)

    def recorded_before(self, lazy: LazyTensor) -> tuple[tuple[Node, ...], Form] | None:
        """Record a call with one argument as such a call was recorded in another batch; None if none was."""
        node, owner = lazy.node, self.owner
        batch = node.tape.owner
        if batch is not owner.batch or batch is None or node.name == UNKNOWN or self.is_open:
            return None
        if any(self._hooks) or any(_GLOBAL_HOOKS) or is_outside_batch():
            return None
        if needs_gradient(lazy) or self._runs_by_itself():
            return None
        if self._is_behind_training((lazy,)):
            return None
        seen = self.seen(node.tape.keys, node.key, node.meta, Context.current(owner.devices))
        if seen is None or not (batch.defers and owner.waits(self.paths)):
            return None
        owner.called.update(self.paths)
        keys, run, form = seen
        return node.tape.add(keys, Call(run, (node,), _ONE), form.metas), form

    def seen(self, keys: Keys, key: int, meta: Meta, context: Context) -> Seen | None:
        """What a call with one argument, a lazy tensor of this key, was recorded as; None if there was none."""
        return self._seen.get((keys, key, meta, self.mode, context))

    def call_in(self, context: Context, constants: Iterable[tuple[int, Any]] = ()) -> UnitCall:
        """Return what computes a call that was made in these modes."""
        values = tuple(value for _, value in constants)
        return UnitCall(self.now, self.owner.devices, context, values, self.paths, self.time)

    def now(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and note the shortest time that it has taken."""
        owner = self.owner
        is_inside = owner.running
        with owner.run_of(self):
            is_timed = (owner.batch is not None and owner.batch.eager) or owner.device.type == "cpu"
            if is_timed:
                wait_for(mark(owner.device))
            started = time.perf_counter()
            output = self.original(*args, **kwargs)
            if is_timed:
                wait_for(mark(owner.device))
                seconds = time.perf_counter() - started
                self.seconds = min(self.seconds or math.inf, seconds)
                if owner.batch is not None and not is_inside:
                    owner.batch.ran_for(seconds)
            return output

    def time(self) -> float:
        """Return the seconds that a run takes."""
        return self.seconds

    def _reason(self, flat: list[Any]) -> str | None:
        """Why a call cannot be recorded, whatever the batch."""
        if any(isinstance(leaf, Tensor) and needs_gradient(leaf) for leaf in flat):
            return "is given a tensor that requires a gradient"
        if self._runs_by_itself():
            return "has a parameter that still trains"
        if any(_GLOBAL_HOOKS):
            return "is watched by a hook on all modules"
        return "has hooks on modules inside it" if any(self._hooks) else None

    def refuse(self, reason: str | None) -> None:
        """Note why a call of the module cannot be recorded, if it is the first one."""
        if reason is not None and self.owner.refused is None:
            self.owner.refused = f"{self.path!r} {reason}"

    def _open(self, flat: list[Any], spec: pytree.TreeSpec, reason: str | None = None) -> Any:
        """Run the module on lazy tensors, for the frozen modules inside it."""
        self.refuse(reason)
        args, kwargs = pytree.tree_unflatten(flat, spec)
        if not self.owner.has_inside(self.path):
            return super().__call__(*args, **kwargs)
        self.owner.place_inside(self.path)
        return self.original(*args, **kwargs)

    def _run_on_values(self, flat: list[Any], spec: pytree.TreeSpec, reason: str | None = None) -> Any:
        """Run the module, as without the cache."""
        self.refuse(reason)
        values = [plain(x) if isinstance(x, LazyTensor) and not x.requires_grad else x for x in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return self.original(*args, **kwargs)

    def _run(
        self, tape: Tape, flat: list[Any], leaves: list[Any], spec: pytree.TreeSpec, context: Context
    ) -> tuple[Any, tuple[Node, ...] | None, Form | None]:
        """Run the module now, and record the call with its results."""
        # In a probe, the input of a frozen module is nothing that the program asks for.
        ask = Node.compute if self.owner.batch is not None and self.owner.batch.eager else Node.ask
        values = [ask(leaf.node) if isinstance(leaf, LazyTensor) else leaf for leaf in flat]
        versions = [version_of(value) if isinstance(value, Tensor) else 0 for value in values]
        args, kwargs = pytree.tree_unflatten(values, spec)
        drawn = RandomState.current()
        output = self.now(*args, **kwargs)
        found, structure = pytree.tree_flatten(output)
        results = [leaf for leaf in found if type(leaf) is Tensor and not leaf.requires_grad]
        constants = tuple((place, leaf) for place, leaf in enumerate(found) if is_plain(leaf))
        if RandomState.current() != drawn:
            return self._opened(output, "draws random numbers")
        if not are_fixed((value for _, value in constants), [*values, *results]):
            return self._opened(output, "returns a number that may depend on values of tensors")
        if any(overlap(one, other) for one, other in itertools.combinations(results, 2)):
            return self._opened(output, "returns tensors that share memory")
        if not results or len(results) + len(constants) < len(found):
            return self._opened(output, "returns something else than tensors without a gradient and plain numbers")
        written = tuple(
            place
            for place, (value, version) in enumerate(zip(values, versions, strict=True))
            if isinstance(value, Tensor) and version_of(value) != version
        )
        if any(not isinstance(flat[place], LazyTensor) for place in written):
            return output, None, None
        results += [values[place] for place in written]
        metas = tuple(Meta.of(result) for result in results)
        for place in written:
            leaves[place].value = None  # it is no longer what it was
        nodes = tape.record(self._name(context), self.call_in(context, constants), leaves, spec, metas, written)
        for node, result in zip(nodes or (), results, strict=True):
            node.value = result
        if nodes is not None and self.owner.batch is not None:
            self.owner.batch.ran_at_once(nodes, is_kept=self.path in self.owner.watched)
        return output, nodes, Form(metas, structure, written, constants)

    def _opened(self, output: Any, reason: str) -> tuple[Any, None, None]:
        """From the next batch on, the modules inside this one record themselves."""
        self.refuse(reason)
        self.is_open = self.owner.opened = True
        return output, None, None

    def hand_on(self, flat: list[Any], nodes: tuple[Node, ...], form: Form) -> Any:
        """Return lazy results."""
        written = form.written
        shown: list[Tensor] = [show(node) for node in nodes[: len(nodes) - len(written)]]
        for place, node in zip(written, nodes[len(nodes) - len(written) :], strict=True):
            lazy = flat[place]
            lazy.node, node.shown = node, lazy.node.shown
        if form.structure.is_leaf():
            return shown[0]
        leaves: list[Any] = [*shown]
        for place, constant in form.constants:
            leaves.insert(place, constant)
        return pytree.tree_unflatten(leaves, form.structure)

    def _tape_of(self, flat: list[Any]) -> tuple[Tape | None, CachedBatch | None]:
        """The tape to record on, and its batch; None if the module has to run."""
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if any(leaf.is_nested for leaf in tensors if not isinstance(leaf, LazyTensor)):
            return None, None
        lazies = [leaf for leaf in tensors if isinstance(leaf, LazyTensor) and _is_of_a_batch(leaf)]
        self.note_gradients(tensors)
        if is_outside_batch() or any(map(needs_gradient, tensors)) or self._runs_by_itself():
            return None, None
        if self._is_behind_training(tensors):
            return None, None
        batch = self.owner.batch
        if batch is None or any(lazy.node.tape is not batch.tape for lazy in lazies):
            return None, None
        if not lazies and not (batch.takes_outside(self.path, tensors) and get_ident() == self.owner.thread):
            return None, None
        return batch.tape, batch

    def _is_behind_training(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors follow from what trains, as far as is known of training: entries of them would never fit."""
        if torch.is_grad_enabled() or not self.owner.is_behind_training(self.path):
            return False
        return any(map(_follows_outside, tensors))

    def _runs_by_itself(self) -> bool:
        """Whether other code trains the module after all, or transforms functions (``torch.func``) that call it."""
        if torch._C._functorch.maybe_current_level() is not None:
            return True
        return torch.is_grad_enabled() and any(map(self.owner.trains, self._parameters))

    def _name(self, context: Context) -> str:
        return f"{self.path} {self.module.training} {context}"


class FrozenSequence(FrozenModule):
    """Stands in for the ``forward`` of an `nn.Sequential` that begins with frozen modules, and records them as one.

    Such a module gives what one layer returns to the next, so nothing else sees it, unless there are hooks. The layers
    are called one by one until each of them has been recorded, and as long as a value between them is kept.

    Args:
        members: what stands in for the ``forward`` of each of its first layers.
    """

    def __init__(self, owner: FrozenModules, path: str, module: nn.Sequential, members: Sequence[FrozenModule]) -> None:
        self._layers, self._others = list(module)[: len(members)], list(module)[len(members) :]
        self.units: list[FrozenModule] = [
            unit for one in members for unit in (one.units if isinstance(one, FrozenSequence) else [one])
        ]
        super().__init__(owner, path, module, self._layers)
        self._members = members
        self._ids = [*map(id, module)]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the modules that it runs."""
        return tuple(unit.path for unit in self.units)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or call the layers."""
        if len(args) == 1 and not kwargs and type(args[0]) is LazyTensor and self.is_whole():
            owner = args[0].node.tape.owner
            if owner is not None and not owner.wants_inner and not self.owner.running:
                recorded = self.recorded_before(args[0])
                if recorded is not None:
                    value = self.hand_on(list(args), *recorded)
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
            and all(own.is_whole() for own in self._members if isinstance(own, FrozenSequence))
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

    def time(self) -> float:
        """Return the seconds that a run of the layers takes."""
        return sum(unit.seconds for unit in self.units)

    def now(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        (value,) = args
        for unit in self.units:
            value = unit.now(value)
        return value


class FrozenEncoder(FrozenModule):
    """Stands in for the ``forward`` of an `nn.TransformerEncoder` that has frozen layers inside, and others.

    In evaluation, and with padding masked, torch computes such a module on nested tensors, which leaves zeros at padded
    positions. It does not do so for lazy tensors, so the module gets true ones.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module: Any = self.module
        masks = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None
        if masks and module.use_nested_tensor and not module.layers[0].training and not torch.is_autocast_enabled():
            args, kwargs = pytree.tree_map_only(LazyTensor, plain, (args, kwargs))
            self.refuse(
                "computes on nested tensors in evaluation; nn.TransformerEncoder(enable_nested_tensor=False) does not"
            )
        return nn.TransformerEncoder.forward(module, *args, **kwargs)


class FrozenModules:
    """The frozen modules of a network in its present modes.

    Between batches the network is as without the cache. While a batch runs, compiled modules run uncompiled: what a
    compiler has made of frozen modules cannot be recorded.

    Args:
        model: the network; it is never frozen as a whole.
        prefix: frozen prefix of the callback that freezes, if there is one.
        before: the frozen modules of before. Where values were kept, larger modules do not hide their places.
        behind_training: as in the attributes; None begins a new set.
        settling: normalisations whose statistics each training step changes, so that entries would be outdated.

    Attributes:
        norms: normalisations that change their statistics in these modes.
        behind_training: paths of modules that were given tensors that need a gradient, for training and validation.
        batch: the batch in training or validation; None between batches.
        thread: the thread that trains on it.
        running: a frozen module runs its own ``forward``.
        version: rises when the state of other modules is compared, or of the same with other weights.
        refused: which module could not be recorded first, and why; None if all could.
        opened: whether a module could not be recorded in this batch, and those inside it are tried in the next.
        ran: paths of the modules that ran, for the owner of the batch to read and clear.
        called: paths of the modules that recorded a call, likewise.
        random: path of each module that would be frozen in evaluation mode, with what is random in it.
        devices: device types whose autocast modes matter.
        sequences: what stands in for each `nn.Sequential` that begins with frozen modules.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: FrozenPrefix | None = None,
        before: FrozenModules | None = None,
        behind_training: set[str] | None = None,
        settling: frozenset[nn.Module] = frozenset(),
    ) -> None:
        self.model, self._prefix, self._settling = model, prefix, settling
        self.behind_training = behind_training if behind_training is not None else set()
        self.batch: CachedBatch | None = None
        self.thread, self.running = get_ident(), False
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.devices: tuple[str, ...] = ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)
        self.version, self.opened = 0, False
        self.refused: str | None = None
        self.ran: set[str] = set()
        self.called: set[str] = set()
        self._in_vain: Counter[str] = Counter()
        self.random: dict[str, str] = {}
        self.modules: dict[str, FrozenModule] = {}
        self.outermost: list[str] = []
        self._others: list[Replacement] = []
        self._watched: dict[str, FrozenState] = {}
        self._fresh: dict[str, int] = {}  # batches in which a module must stay as it is before its calls may wait
        self._changes: Counter[str] = Counter()
        self._leaving: list[str] = []
        self._parameters, self._parts = list(model.parameters()), list(model.modules())
        self._signature = self._modes()
        norms = (part for part in self._parts if isinstance(part, _BatchNorm) and part.track_running_stats)
        self.norms = frozenset(norm for norm in norms if norm.training)
        self._find(model, "", set())
        if before is not None:
            for path in before._watched:
                for own in self.modules.values():
                    own.is_open |= path.startswith(f"{own.path}.")
            for path, module in before.modules.items():
                if path in self.modules:
                    self.modules[path].is_open |= module.is_open
        self._placed: dict[int, Replacement] = {}
        self._chosen: tuple[Any, list[Replacement]] | None = None
        self.sequences = _sequences_of(self)
        self._encoders = _encoders_of(self)
        self._uncompiled = contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self.outermost)

    def _find(self, module: nn.Module, path: str, seen: set[int], inside: bool = False) -> bool:
        """Find the frozen modules below one; return whether there are any."""
        found = False
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            own = f"{path}.{name}" if path else name
            holds = any(True for _ in child.parameters())
            is_frozen = holds and (inside or (self._is_frozen(child) and not self._is_random(child, own)))
            if is_frozen and not hasattr(child, "_orig_mod"):
                self.modules[own] = FrozenModule(self, own, child)
                if not inside:
                    self.outermost.append(own)
                self._find(child, own, seen, inside=True)
                found = True
            elif self._find(child, own, seen, inside):
                found = True
            elif not inside and holds:
                self._others.append(Replacement(self, own, child))
        if found and path:  # the modules inside one that holds frozen ones get true tensors, and it does not
            self._others = [one for one in self._others if one.path != path]
        return found

    def _is_random(self, module: nn.Module, path: str) -> bool:
        kinds = [what for part in module.modules() if (what := randomness_of(part)) is not None]
        kinds += ["batch statistics" for part in module.modules() if part in self._settling]
        if kinds and not any(path.startswith(f"{known}.") for known in self.random):
            self.random[path] = kinds[0]
        return bool(kinds)

    def is_behind_training(self, path: str) -> bool:
        """Whether a module, or one inside it, was given tensors that need a gradient."""
        return any(one == path or one.startswith(f"{path}.") for one in self.behind_training)

    def has_inside(self, path: str) -> bool:
        """Whether a module has frozen modules inside it."""
        return any(other.startswith(f"{path}.") for other in self.modules)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter trains."""
        prefix = self._prefix
        return parameter.requires_grad and (prefix is None or parameter not in prefix.shown_parameters)

    def is_current(self, walk: bool = False) -> bool:
        """Whether the same parameters train, in the same modes, as when the modules were found.

        Args:
            walk: look for new parameters and modules, too.
        """
        if self._modes() != self._signature:
            return False
        if not walk:
            return True
        same = all(map(operator.is_, self._parameters, self.model.parameters()))
        return (
            same
            and [*map(id, self._parts)] == [*map(id, self.model.modules())]
            and len(self._parameters) == len(list(self.model.parameters()))
        )

    @contextlib.contextmanager
    def in_its_modes(self) -> Iterator[None]:
        """In the modes of its batches: a validation batch ends when Lightning has put the model into training mode."""
        before = self._signature[1]
        left = self.model.training is not before[0]
        changed = [part for part, mode in zip(self._parts, before, strict=True) if left and part.training is not mode]
        for part in changed:
            part.training = not part.training
        try:
            yield
        finally:
            for part in changed:
                part.training = not part.training

    def trains_as_before(self) -> bool:
        """Whether the same parameters train as when the modules were found."""
        return self._training() == self._signature[0]

    def is_part_of(self, other: FrozenModules) -> bool:
        """Whether the modules on which kept values depend are frozen in another set, too."""
        return all(
            path in other.modules and other.modules[path].module is self.modules[path].module for path in self._watched
        )

    def _modes(self) -> tuple[list[bool], list[bool]]:
        return self._training(), [*map(_mode, self._parts)]

    def _training(self) -> list[bool]:
        """Which parameters train."""
        if self._prefix is None or not self._prefix.shown_parameters:
            return [*map(_requires_grad, self._parameters)]
        return [*map(self.trains, self._parameters)]

    def _is_frozen(self, module: nn.Module) -> bool:
        return not any(map(self.trains, module.parameters()))

    def begin(self, batch: CachedBatch) -> None:
        """Have a batch go through the network; the one before it has ended."""
        for one in self._to_place():
            self._place(one)
        self._uncompiled.enter_context(eager())
        self.batch, self.thread = batch, get_ident()

    def end(self) -> None:
        """Leave the network as it was. Safe to call twice."""
        while self._placed:
            self._placed.popitem()[1].restore()
        self._uncompiled.close()
        self.batch = None
        while self._leaving:
            self._left_out(self._leaving.pop())

    def _all(self) -> list[Replacement]:
        return [*self.modules.values(), *self.sequences, *self._encoders, *self._others]

    def _to_place(self) -> list[Replacement]:
        """What a batch begins with: not what is inside a module on whose recorded calls kept values depend."""
        closed = {path for path in self._watched if path in self.modules and not self.modules[path].is_open}
        state = closed, len(self.modules), len(self.sequences)
        if self._chosen is None or self._chosen[0] != state:
            self._chosen = state, [one for one in self._all() if closed.isdisjoint(_parents_of(one.path))]
        return self._chosen[1]

    def _place(self, one: Replacement) -> None:
        if id(one) not in self._placed:
            self._placed[id(one)] = one
            one.put()

    def place_inside(self, path: str) -> None:
        """A module runs on lazy tensors in this batch, so those inside it are called."""
        closed = {other for other in self.modules if other.startswith(f"{path}.") and not self.modules[other].is_open}
        for one in self._all():
            if one.path.startswith(f"{path}.") and closed.isdisjoint(_parents_of(one.path)):
                self._place(one)

    def leave_out_unused(self) -> None:
        """From the next batch on, have modules run as without the cache that were called in vain: nothing is kept."""
        for path in self.called - self._watched.keys():
            self._in_vain[path] += 1
            if self._in_vain[path] == policy.CALLED_IN_VAIN:
                self._leave_out(path)
        self.called = set()

    def _leave_out(self, path: str) -> None:
        """Have a module run as without the cache, from the next batch on."""
        self.outermost = [other for other in self.outermost if other != path]
        self._leaving.append(path)

    def _left_out(self, path: str) -> None:
        own = self.modules.get(path)
        if own is None or path in self._watched:  # its output is kept since then
            return
        del self.modules[path]
        inside = [other for other in self.modules if other.startswith(f"{path}.")]
        if not any(other in self._watched for other in inside):
            for other in inside:
                del self.modules[other]
        self._others.append(Replacement(self, path, own.module))
        self.sequences = [one for one in self.sequences if own not in one.units]

    def missing(self) -> str | None:
        """Return the path of a module that other code has replaced, or its ``forward``; None if there is none."""
        return next((path for path in self._watched if not self.modules[path].is_in_place(self.model)), None)

    @contextlib.contextmanager
    def run_of(self, module: FrozenModule) -> Iterator[None]:
        """While a module runs its own ``forward``."""
        before, self.running = self.running, True
        self.ran.add(module.path)
        try:
            yield
        finally:
            self.running = before

    def watch(self, paths: Iterable[str]) -> None:
        """Compare the state of further modules from now on, on which kept values depend.

        Raises:
            CacheError: an attribute of one cannot be read.
        """
        for path in paths:
            if path not in self._watched:
                self._watched[path] = FrozenState([(path, self.modules[path].module)])
                self._fresh[path] = policy.STABLE_BATCHES
                self.version += 1

    def watch_as(self, before: FrozenModules) -> None:
        """Go on comparing the state that another set of frozen modules has compared."""
        self._watched, self._fresh, self._changes = before._watched, before._fresh, before._changes
        self.version = before.version

    def unwatch(self, paths: Iterable[str]) -> None:
        """Compare the state of modules no longer, because they have changed; one that goes on so is left alone."""
        for path in paths:
            del self._watched[path]
            self._fresh.pop(path, None)
            self._changes[path] += 1
            self.version += 1
            if self._changes[path] > policy.CHANGES_TO_LEAVE:
                self._leave_out(path)

    def waits(self, paths: Iterable[str]) -> bool:
        """Whether kept values depend on all of these modules, and they stay as they are: their calls may wait."""
        return all(path in self._watched and path not in self._fresh for path in paths)

    @property
    def has_fresh(self) -> bool:
        """Whether modules are watched that may still change in their first batches."""
        return bool(self._fresh)

    def has_waited(self, path: str) -> bool:
        """Whether calls of a module may have waited in this batch."""
        return path not in self._fresh

    def count_batch(self) -> None:
        """A batch is over, with all modules as they were."""
        self._fresh = {path: left - 1 for path, left in self._fresh.items() if left > 1}

    @property
    def watched(self) -> Collection[str]:
        """Paths of the modules on which kept values depend."""
        return self._watched.keys()

    def digest_of(self, paths: Collection[str]) -> bytes:
        """Return a digest of the state of modules, the same in each run.

        Raises:
            CacheError: an attribute of one cannot be read.
        """
        return FrozenState((path, self.modules[path].module) for path in sorted(paths)).digest

    def changed(self, all_bits: bool = False) -> set[str]:
        """Return the paths of the watched modules that are not as they were; see `FrozenState.is_same`."""
        share = 1 / max(1, len(self._watched))
        return {path for path, state in self._watched.items() if not state.is_same(all_bits, share)}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and attributes on exit, for runs that the program did not ask for."""
        with contextlib.ExitStack() as restored:
            for state in self._watched.values():
                restored.enter_context(state.preserved())
            yield


def _parents_of(path: str) -> list[str]:
    """Return the paths of the modules that a module is inside of.

    >>> _parents_of("net.layers.0")
    ['net', 'net.layers']
    """
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


class TrueTensors(FrozenModules):
    """No frozen modules: every module of a network gets true tensors, for a batch whose plan is out of date."""

    def _find(self, module: nn.Module, path: str, seen: set[int], inside: bool = False) -> bool:
        self._others = [Replacement(self, name, child) for name, child in module.named_children()]
        return False


def randomness_of(module: nn.Module) -> str | None:
    """Return what makes a module's output more than a function of its input, in words; None for nothing known.

    >>> randomness_of(nn.Dropout(0.1)), randomness_of(nn.Dropout(0.1).eval()), randomness_of(nn.BatchNorm1d(3))
    ('dropout', None, 'batch statistics')
    """
    if not module.training:
        return None
    if isinstance(module, _BatchNorm):
        return "batch statistics"
    if isinstance(module, _DropoutNd):
        return "dropout" if module.p > 0 else None
    if isinstance(module, nn.MultiheadAttention):
        return "dropout" if module.dropout > 0 else None
    if isinstance(module, nn.RNNBase):
        return "dropout" if module.dropout > 0 and module.num_layers > 1 else None
    return None


def _encoders_of(frozen: FrozenModules) -> list[FrozenEncoder]:
    """Return what stands in for the ``forward`` of encoders that hold frozen modules and others."""
    encoders = [(path, one) for path, one in frozen.model.named_modules() if isinstance(one, nn.TransformerEncoder)]
    return [
        FrozenEncoder(frozen, path, encoder)
        for path, encoder in encoders
        if type(encoder).forward is nn.TransformerEncoder.forward and frozen.has_inside(path)
        if path not in frozen.modules and "forward" not in vars(encoder)
    ]


def _sequences_of(frozen: FrozenModules) -> list[FrozenSequence]:
    """Return what stands in for the ``forward`` of sequences that begin with frozen modules."""
    known: dict[int, FrozenModule] = {id(frozen.modules[path].module): frozen.modules[path] for path in frozen.modules}
    found: list[FrozenSequence] = []
    for path, container in reversed(list(frozen.model.named_modules())):  # those inside others first
        if type(container) is not nn.Sequential or "forward" in vars(container) or path in frozen.modules:
            continue
        members: list[FrozenModule] = []
        for name, layer in container._modules.items():
            if type(layer).__call__ is not nn.Module.__call__ or "forward" in vars(layer):
                break
            if id(layer) not in known:
                own = f"{path}.{name}" if path else name
                if not members or any(True for _ in layer.parameters()) or any(map(randomness_of, layer.modules())):
                    break
                known[id(layer)] = frozen.modules[own] = FrozenModule(frozen, own, layer)  # an activation
            members.append(known[id(layer)])
        if len(members) > 1:
            found.append(FrozenSequence(frozen, path, container, members))
            if len(members) == len(container):
                known[id(container)] = found[-1]
    return found
