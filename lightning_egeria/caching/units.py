"""Frozen layers that are recorded on the tape of a batch instead of run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.utils import _pytree as pytree

from lightning_egeria.batches.onlookers import unwatched
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.meta import Meta, version_of
from lightning_egeria.lazy.tape import UNKNOWN, Call, Node, Tape
from lightning_egeria.lazy.tensors import LazyTensor, node_of, plain, show
from lightning_egeria.lazy.units import Context, UnitCall, are_fixed, is_plain
from lightning_egeria.network.folding import folded
from lightning_egeria.network.forwards import own_forward, restore_forward
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.snapshots.digests import overlap
from lightning_egeria.training.rehearsal import is_apart

_GLOBAL_HOOKS = (_hooks._global_forward_hooks, _hooks._global_forward_pre_hooks)
_ONE = pytree.tree_flatten(((0,), {}))[1]  # structure of a call with one positional argument


class Form(NamedTuple):
    """What a call of a frozen layer returns."""

    metas: tuple[Meta, ...]  # of the tensors, those of changed arguments last
    structure: pytree.TreeSpec
    written: tuple[int, ...]  # places of the arguments that it changes
    constants: tuple[tuple[int, Any], ...]  # places and values of what is no tensor


def _is_of_a_batch(lazy: LazyTensor) -> bool:
    """Whether it is known how it follows from a batch; one inside an object of the user's own class never got there."""
    return lazy.node.name != UNKNOWN and lazy.node.tape.owner is not None


def _needs_grad(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


class UnitsOwner(Protocol):
    """What a unit asks of the front that it belongs to; see `Front`."""

    depth: int
    batch: Batch | None
    thread: int
    folds: dict[bool, bool]
    devices: tuple[str, ...]
    prefix: FrozenPrefix
    ran: set[int]
    refused: str | None


class Batch(Protocol):
    """What the front asks of the batch that it runs on."""

    tape: Tape
    eager: bool  # run layer modules at once, in the order of the program

    @property
    def front(self) -> UnitsOwner | None:
        """The front that it was planned for; None if that is gone."""

    @property
    def reads(self) -> Sequence[Any]:
        """Entries that are being read."""

    def takes_outside(self, unit: str) -> bool:
        """Whether a unit may begin with tensors that the program made."""

    def enter(self) -> None:
        """The front is called."""

    def boundary(self, depth: int, node: Node) -> Tensor | None:
        """The cached output at the boundary of ``depth``; None if it has to be computed."""

    def reached(self, node: Node, value: Tensor) -> Tensor:
        """The output at the deepest boundary was computed; return what the program gets."""

    def finish(self) -> None:
        """The batch is over."""


Seen: TypeAlias = tuple[tuple[int, ...], UnitCall, Form]  # keys of the results, how they are computed, their form


class FrontUnit:
    """Stands in for the ``forward`` of one module of the front, between `put` and `restore`.

    A copy or pickle of the module has its own again.

    Attributes:
        number: place among the units of the front.
        path: path of the module.
        module: the module.
        front: the front that it belongs to.
        depth: number of layer modules that end with it; 0 if none does.
        output_leaf: number of the boundary tensor among those of its output.
    """

    def __init__(
        self,
        front: UnitsOwner,
        number: int,
        path: str,
        module: nn.Module,
        depth: int,
        output_leaf: int,
        inner: Sequence[nn.Module] | None = None,
    ) -> None:
        self.front, self.number, self.path = front, number, path
        self.depth, self.output_leaf = depth, output_leaf
        self.module = module
        parts = [part for one in (module.children() if inner is None else inner) for part in one.modules()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._parameters = [p for part in (module, *parts) for p in part.parameters(recurse=False)]
        self._before = vars(module).get("forward")
        self._forms: dict[Any, Form | None] = {}
        self._seen: dict[Any, Seen] = {}

    @property
    def mode(self) -> tuple[bool, ...]:
        """Whether the module is in training mode; of a sequence, its layers."""
        return (self.module.training,)

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own ``forward``, even if its class has changed meanwhile; with the kernels of a plain step."""
        own = self._before if self._before is not None else functools.partial(type(self.module).forward, self.module)
        folds = self.front.folds.get(self.front.prefix.module.training)
        return functools.partial(unwatched, folded, own) if folds else functools.partial(unwatched, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or run the module."""
        if len(args) == 1 and not kwargs and type(args[0]) is LazyTensor:
            recorded = self.recorded_before(args[0])
            if recorded is not None:
                return self.hand_on(args[0].node.tape.owner, list(args), *recorded)
        one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        flat, spec = (list(args), _ONE) if one else pytree.tree_flatten((args, kwargs))
        tape, batch = self._tape_of(flat)
        if tape is None or batch is None or any(self._hooks) or any(_GLOBAL_HOOKS):
            return self._untracked(flat, spec, self._reason(flat))
        flat = [leaf if not isinstance(leaf, LazyTensor) or _is_of_a_batch(leaf) else plain(leaf) for leaf in flat]
        context = Context.current(self.front.devices)
        leaves = [node_of(tape, leaf) for leaf in flat]
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Node) and not is_plain(leaf)]
        if strange:
            return self._untracked(flat, spec, f"is given a {strange[0]}, which may change")
        try:
            arguments = [leaf.meta if isinstance(leaf, Node) else leaf for leaf in leaves]
            known = (spec, context, self.module.training, *arguments)
            form = self._forms.get(known)
        except TypeError:  # an argument cannot be hashed, so the call has no name
            return self._untracked(flat, spec)
        if form is None or batch.eager:
            output, nodes, form = self._run(tape, flat, leaves, spec, context)
            self._forms[known] = form
            if form is None or nodes is None:
                return output
        else:
            run = self.call_in(context, form.constants)
            nodes = tape.record(self._name(context), run, leaves, spec, form.metas, form.written)
            if nodes is None:
                return self._untracked(flat, spec)
            if one and not form.written:
                call = tape.keys, leaves[0].key, leaves[0].meta, self.mode, context
                self._seen[call] = tuple(node.key for node in nodes), run, form
        return self.hand_on(batch, flat, nodes, form)

    def recorded_before(self, lazy: LazyTensor) -> tuple[tuple[Node, ...], Form] | None:
        """Record a call with one argument as such a call was recorded in another batch; None if none was."""
        node = lazy.node
        batch = node.tape.owner
        if batch is None or batch.eager or batch.front is not self.front or node.name == UNKNOWN:
            return None
        if any(self._hooks) or any(_GLOBAL_HOOKS) or _needs_grad(lazy) or self._runs_by_itself():
            return None
        seen = self.seen(node.tape.keys, node.key, node.meta, Context.current(self.front.devices))
        if seen is None:
            return None
        batch.enter()
        keys, run, form = seen
        return node.tape.add(keys, Call(run, (node,), _ONE), form.metas), form

    def seen(self, keys: Keys, key: int, meta: Meta, context: Context) -> Seen | None:
        """What a call with one argument, a lazy tensor of this key, was recorded as; None if there was none."""
        return self._seen.get((keys, key, meta, self.mode, context))

    def call_in(self, context: Context, constants: Iterable[tuple[int, Any]] = ()) -> UnitCall:
        """Return what computes a call that was made in these modes."""
        return UnitCall(self.now, self.front.devices, context, tuple(value for _, value in constants))

    def now(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self.front.ran.add(self.number)
        return self.original(*args, **kwargs)

    def _reason(self, flat: list[Any]) -> str | None:
        """Why a call cannot be recorded, whatever the batch."""
        if any(isinstance(leaf, Tensor) and _needs_grad(leaf) for leaf in flat):
            return "is given a tensor that requires a gradient"
        if self._runs_by_itself():
            return "has a parameter that still trains"
        if any(_GLOBAL_HOOKS):
            return "is watched by a hook on all modules"
        return "has hooks on modules inside it" if any(self._hooks) else None

    def refuse(self, reason: str | None) -> None:
        """Note why a call of the module cannot be recorded, if it is the first one."""
        if reason is not None and self.front.refused is None:
            self.front.refused = f"{self.path!r} {reason}"

    def _untracked(self, flat: list[Any], spec: pytree.TreeSpec, reason: str | None = None) -> Any:
        """Run the module, as without the cache."""
        self.refuse(reason)
        values = [plain(x) if isinstance(x, LazyTensor) and not x.requires_grad else x for x in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return self.original(*args, **kwargs)

    def _run(
        self, tape: Tape, flat: list[Any], leaves: list[Any], spec: pytree.TreeSpec, context: Context
    ) -> tuple[Any, tuple[Node, ...] | None, Form | None]:
        """Run the module now, and record the call with its results."""
        values = [plain(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        versions = [version_of(value) if isinstance(value, Tensor) else 0 for value in values]
        args, kwargs = pytree.tree_unflatten(values, spec)
        output = self.now(*args, **kwargs)
        found, structure = pytree.tree_flatten(output)
        results = [leaf for leaf in found if type(leaf) is Tensor and not leaf.requires_grad]
        constants = tuple((place, leaf) for place, leaf in enumerate(found) if is_plain(leaf))
        if not are_fixed((value for _, value in constants), [*values, *results]):
            self.refuse("returns a number that may depend on values of tensors")
            return output, None, None
        if any(overlap(one, other) for one, other in itertools.combinations(results, 2)):
            self.refuse("returns tensors that share memory")
            return output, None, None
        if not results or len(results) + len(constants) < len(found):
            self.refuse("returns something else than tensors without a gradient and plain numbers")
            return output, None, None
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
        return output, nodes, Form(metas, structure, written, constants)

    def hand_on(self, batch: Batch, flat: list[Any], nodes: tuple[Node, ...], form: Form) -> Any:
        """Return lazy results; at a boundary, the cached or computed output."""
        written = form.written
        shown: list[Tensor] = [show(node) for node in nodes[: len(nodes) - len(written)]]
        for place, node in zip(written, nodes[len(nodes) - len(written) :], strict=True):
            lazy = flat[place]
            lazy.node, node.shown = node, lazy.node.shown
        if self.depth and self.output_leaf < len(shown):
            node = nodes[self.output_leaf]
            served = batch.boundary(self.depth, node)
            if self.depth == self.front.depth:
                if served is None:
                    served = batch.reached(node, node.compute())
                    node.value = None  # the program may change it in place
                shown[self.output_leaf] = served
        if form.structure.is_leaf():
            return shown[0]
        leaves: list[Any] = [*shown]
        for place, constant in form.constants:
            leaves.insert(place, constant)
        return pytree.tree_unflatten(leaves, form.structure)

    def _tape_of(self, flat: list[Any]) -> tuple[Tape | None, Batch | None]:
        """The tape to record on, and its batch; None if the module has to run."""
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        lazies = [leaf for leaf in tensors if isinstance(leaf, LazyTensor) and _is_of_a_batch(leaf)]
        if is_apart() or any(map(_needs_grad, tensors)) or self._runs_by_itself():
            return None, None
        batch = lazies[0].node.tape.owner if lazies else self.front.batch
        if batch is None or batch.front is not self.front or any(x.node.tape is not batch.tape for x in lazies):
            return None, None
        if not lazies and not (tensors and batch.takes_outside(self.path) and get_ident() == self.front.thread):
            return None, None
        batch.enter()
        return batch.tape, batch

    def _runs_by_itself(self) -> bool:
        """Whether other code trains the module after all, or transforms functions (``torch.func``) that call it."""
        if torch._C._functorch.maybe_current_level() is not None:
            return True
        return torch.is_grad_enabled() and any(one.requires_grad for one in self._parameters)

    def _name(self, context: Context) -> str:
        return f"{self.path} {self.module.training} {context}"

    def is_in_place(self, model: nn.Module) -> bool:
        """Whether the module is where it was, with its own ``forward`` or this one."""
        found: Any = model
        for name in self.path.split(".") if self.path else ():
            found = found._modules.get(name)
            if found is None:
                return False
        forward = vars(found).get("forward")
        return found is self.module and (forward is self or forward is self._before)

    def put(self) -> None:
        """Replace the module's own ``forward``, unless other code has replaced it since."""
        if vars(self.module).get("forward") is self._before:
            vars(self.module)["forward"] = self

    def restore(self) -> None:
        """Give the module its own ``forward`` back, unless other code has replaced it since."""
        restore_forward(self.module, self, self._before)

    def __reduce__(self) -> tuple[Any, ...]:
        return own_forward(self.module, self._before)
