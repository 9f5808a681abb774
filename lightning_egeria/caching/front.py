"""The frozen front of a network: its layer modules are recorded on tapes, and left out where their output is known."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.utils import _pytree as pytree

from lightning_egeria.batches.onlookers import unwatched
from lightning_egeria.caching.weights import FrontState
from lightning_egeria.errors import CacheError
from lightning_egeria.lazy.meta import Meta, version_of
from lightning_egeria.lazy.tape import UNKNOWN, Call, Node, Tape
from lightning_egeria.lazy.tensors import LazyTensor, node_of, plain, show
from lightning_egeria.lazy.units import Context, UnitCall, are_fixed, is_plain
from lightning_egeria.network.folding import folded
from lightning_egeria.network.forwards import own_forward
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.training.rehearsal import is_apart

_GLOBAL_HOOKS = (_hooks._global_forward_hooks, _hooks._global_forward_pre_hooks)
_ONE = pytree.tree_flatten(((0,), {}))[1]  # structure of a call with one positional argument


class _Form(NamedTuple):
    """What a call of a frozen layer returns."""

    metas: tuple[Meta, ...]  # of the tensors, those of changed arguments last
    structure: pytree.TreeSpec
    written: tuple[int, ...]  # places of the arguments that it changes
    constants: tuple[tuple[int, Any], ...]  # places and values of what is no tensor


class Batch(Protocol):
    """What the front asks of the batch that it runs on."""

    tape: Tape
    front: Front | None
    eager: bool  # run layer modules at once, in the order of the program

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


def _is_of_a_batch(lazy: LazyTensor) -> bool:
    """Whether it is known how it follows from a batch; one inside an object of the user's own class never got there."""
    return lazy.node.name != UNKNOWN and lazy.node.tape.owner is not None


def _needs_grad(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


class FrontUnit:
    """Stands in for the ``forward`` of one module of the front. A copy or pickle of the module has its own again.

    Attributes:
        number: place among the units of the front.
        path: path of the module.
        front: the front that it belongs to.
        depth: number of layer modules that end with it; 0 if none does.
        output_leaf: number of the boundary tensor among those of its output.
    """

    def __init__(self, front: Front, number: int, path: str, module: nn.Module, depth: int, output_leaf: int) -> None:
        self.front, self.number, self.path = front, number, path
        self.depth, self.output_leaf = depth, output_leaf
        self._hooks = [
            hooks
            for part in module.modules()
            if part is not module
            for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        self._module, self._parameters = module, list(module.parameters())
        self._before = vars(module).get("forward")
        self._forms: dict[Any, _Form | None] = {}
        self._seen: dict[Any, tuple[tuple[int, ...], UnitCall, _Form]] = {}
        vars(module)["forward"] = self

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own ``forward``, even if its class has changed meanwhile; with the kernels of a plain step."""
        own = self._before if self._before is not None else functools.partial(type(self._module).forward, self._module)
        folds = self.front.folds.get(self.front.prefix.module.training)
        return functools.partial(unwatched, folded, own) if folds else functools.partial(unwatched, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or run the module."""
        if len(args) == 1 and not kwargs and type(args[0]) is LazyTensor:
            recorded = self._recorded_before(args[0])
            if recorded is not None:
                return self._hand_on(args[0].node.tape.owner, list(args), *recorded)
        if self.front.batch is None and not kwargs and all(type(argument) is Tensor for argument in args):
            return self.original(*args)  # as fast as without the cache
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
            known = (spec, context, self._module.training, *arguments)
            form = self._forms.get(known)
        except TypeError:  # an argument cannot be hashed, so the call has no name
            return self._untracked(flat, spec)
        if form is None or batch.eager:
            output, nodes, form = self._run(tape, flat, leaves, spec, context)
            self._forms[known] = form
            if form is None or nodes is None:
                return output
        else:
            run = self._call_in(context, form.constants)
            nodes = tape.record(self._name(context), run, leaves, spec, form.metas, form.written)
            if nodes is None:
                return self._untracked(flat, spec)
            if one and not form.written:
                self._seen[self._call_of(leaves[0], context)] = tuple(node.key for node in nodes), run, form
        return self._hand_on(batch, flat, nodes, form)

    def _recorded_before(self, lazy: LazyTensor) -> tuple[tuple[Node, ...], _Form] | None:
        """Record a call with one argument as such a call was recorded in another batch; None if none was."""
        node = lazy.node
        batch = node.tape.owner
        if batch is None or batch.eager or batch.front is not self.front or node.name == UNKNOWN:
            return None
        if any(self._hooks) or any(_GLOBAL_HOOKS) or _needs_grad(lazy) or self._runs_by_itself():
            return None
        seen = self._seen.get(self._call_of(node, Context.current(self.front.devices)))
        if seen is None:
            return None
        batch.enter()
        keys, run, form = seen
        return node.tape.add(keys, Call(run, (node,), _ONE), form.metas), form

    def _call_of(self, node: Node, context: Context) -> tuple[Any, ...]:
        """What the results of a call with one argument follow from."""
        return node.tape.keys, node.key, node.meta, self._module.training, context

    def _call_in(self, context: Context, constants: Iterable[tuple[int, Any]]) -> UnitCall:
        return UnitCall(self._now, self.front.devices, context, tuple(value for _, value in constants))

    def _now(self, *args: Any, **kwargs: Any) -> Any:
        self.front.ran.add(self.number)
        return self.original(*args, **kwargs)

    def _reason(self, flat: list[Any]) -> str | None:
        """Why a call cannot be recorded, whatever the batch."""
        if any(isinstance(leaf, Tensor) and _needs_grad(leaf) for leaf in flat):
            return "is given a tensor that requires a gradient"
        if self._runs_by_itself():
            return "has a parameter that still trains"
        return "has hooks on modules inside it" if any(self._hooks) else None

    def _refuse(self, reason: str | None) -> None:
        if reason is not None and self.front.refused is None:
            self.front.refused = f"{self.path!r} {reason}"

    def _untracked(self, flat: list[Any], spec: pytree.TreeSpec, reason: str | None = None) -> Any:
        """Run the module, as without the cache."""
        self._refuse(reason)
        values = [plain(x) if isinstance(x, LazyTensor) and not x.requires_grad else x for x in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return self.original(*args, **kwargs)

    def _run(
        self, tape: Tape, flat: list[Any], leaves: list[Any], spec: pytree.TreeSpec, context: Context
    ) -> tuple[Any, tuple[Node, ...] | None, _Form | None]:
        """Run the module now, and record the call with its results."""
        values = [plain(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        versions = [version_of(value) if isinstance(value, Tensor) else 0 for value in values]
        args, kwargs = pytree.tree_unflatten(values, spec)
        output = self._now(*args, **kwargs)
        found, structure = pytree.tree_flatten(output)
        results = [leaf for leaf in found if type(leaf) is Tensor and not leaf.requires_grad]
        constants = tuple((place, leaf) for place, leaf in enumerate(found) if is_plain(leaf))
        if not are_fixed((value for _, value in constants), [*values, *results]):
            self._refuse("returns a number that may depend on values of tensors")
            return output, None, None
        if not results or len(results) + len(constants) < len(found):
            self._refuse("returns something else than tensors without a gradient and plain numbers")
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
        nodes = tape.record(self._name(context), self._call_in(context, constants), leaves, spec, metas, written)
        for node, result in zip(nodes or (), results, strict=True):
            node.value = result
        return output, nodes, _Form(metas, structure, written, constants)

    def _hand_on(self, batch: Batch, flat: list[Any], nodes: tuple[Node, ...], form: _Form) -> Any:
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
        if not lazies and not (tensors and batch.takes_outside(self.path)):
            return None, None
        batch.enter()
        return batch.tape, batch

    def _runs_by_itself(self) -> bool:
        """Whether other code trains the module after all, or transforms functions (``torch.func``) that call it."""
        if torch._C._functorch.maybe_current_level() is not None:
            return True
        return torch.is_grad_enabled() and any(one.requires_grad for one in self._parameters)

    def _name(self, context: Context) -> str:
        return f"{self.path} {self._module.training} {context}"

    def is_in_place(self, model: nn.Module) -> bool:
        """Whether calls of the module still come here."""
        found: Any = model
        for name in self.path.split(".") if self.path else ():
            found = found._modules.get(name)
            if found is None:
                return False
        return found is self._module and vars(found).get("forward") is self

    def restore(self) -> None:
        """Give the module its own ``forward`` back, unless other code has replaced it since."""
        if vars(self._module).get("forward") is self:
            if self._before is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        return own_forward(self._module, self._before)


class Front:
    """The first ``depth`` layer modules of a frozen prefix, with other boundaries inside.

    Args:
        prefix: the frozen prefix.
        depth: number of layer modules to leave out.

    Attributes:
        depth: number of layer modules to leave out.
        batch: the batch in training or validation; None between batches.
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
        self.folds: dict[bool, bool] = {}
        self.device = next((p.device for p in prefix.module.parameters()), torch.device("cpu"))
        self.devices = ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)
        modules = dict(prefix.module.named_modules())
        layers = prefix.chain.layer_modules[:depth]
        ends = {layer.units[-1]: (at + 1, layer.output_leaf) for at, layer in enumerate(layers)}
        paths = list(dict.fromkeys(path for layer in layers for path in layer.units))
        self.state = FrontState([(path, modules[path]) for path in paths])
        self.first = frozenset(layers[0].units)
        self.ran: set[int] = set()
        self.refused: str | None = None
        self.renewals = 0
        self._paths = paths
        self.units = [
            FrontUnit(self, number, path, modules[path], *ends.get(path, (0, 0))) for number, path in enumerate(paths)
        ]

    def missing(self) -> str | None:
        """Return the path of a module that other code has replaced, or its ``forward``; None if there is none."""
        return next((unit.path for unit in self.units if not unit.is_in_place(self.prefix.module)), None)

    def renew(self) -> None:
        """Take the weights as they are now for those of the front."""
        modules = dict(self.prefix.module.named_modules())
        with contextlib.suppress(CacheError):  # it cannot be read; then it goes on changing
            self.state = FrontState([(path, modules[path]) for path in self._paths if path in modules])
        self.renewals += 1

    def close(self) -> None:
        """Restore the modules. Safe to call twice."""
        for unit in reversed(self.units):
            unit.restore()
        self.batch = None
