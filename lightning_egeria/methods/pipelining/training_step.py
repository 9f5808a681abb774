"""A training step cut in two: calls of modules, which stages share, and the rest, which runs beside the loss."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.network.forwards import Forward, ForwardReplacements
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.attributes import Attributes
from lightning_egeria.methods.pipelining.metric_calls import Call, MetricCalls, kept
from lightning_egeria.methods.pipelining.tracing import Cut

Logged = tuple[str, Any, dict[str, Any], int]
"""Name, number or path of a metric, other arguments of ``log``, and samples of the micro-batch."""
_READ = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


class TrainingStep:
    """An unchanged ``training_step`` as the forward and the loss of a graph pipeline.

    The stages share its calls of units. On the stage of the loss it runs once for each micro-batch; there, units return
    what was computed for them, and stand-ins where the rest of the step reads nothing. Logged numbers are collected.

    Args:
        module: has ``training_step(batch, ...)`` and ``log(name, value, ...)``, such as a LightningModule.
        arguments: what ``training_step`` gets besides the batch.

    Attributes:
        arguments: as above.
        metrics: those of the module.
        logged: what was logged so far.
        calls: calls of metrics so far, for each micro-batch.
    """

    def __init__(self, module: Any, arguments: Sequence[Any] = ()) -> None:
        self._module, self.arguments = module, tuple(arguments)
        self._cut = Cut((), ())
        self.metrics = MetricCalls(module)
        self.logged: list[Logged] = []
        self.calls: list[list[Call]] = []

    def cut(self, units: Collection[str], batch: Any) -> Cut:
        """Run the step once and return where it is cut: at its last call of a unit.

        Raises:
            UnsupportedError: if it calls no unit, reads weights outside of them, or returns more than a loss.
        """
        modules = {path: module for path, module in self._module.named_modules() if path in units}
        reads = _Reads(modules)
        outside = [
            (path, Attributes(module))
            for path, module in self._module.named_modules()
            if not any(f"{path}.".startswith(f"{unit}.") for unit in units)
        ]
        taken = self.metrics.taken(lambda call: reads.read(call[2:]))
        with taken, self._logging(lambda name, value, given: reads.read(value)), reads.recording(), reads:
            found = loss_of(self._module.training_step(batch, *self.arguments))
        reads.read(found)
        changed = [".".join(filter(None, (path, name))) for path, before in outside for name in before.restore()]
        if changed:
            raise UnsupportedError(
                f"training_step changes {changed[0]!r}, which only the process of the last stage would see. Change it "
                "in a hook such as on_train_batch_end"
            )
        if not reads.calls:
            raise UnsupportedError(
                "training_step calls no module with parameters, so there is nothing to divide into stages"
            )
        if reads.weights:
            raise UnsupportedError(
                f"training_step reads the weights of {reads.weights[0]!r} without calling it, and one process alone "
                "holds them. For an L2 penalty, use weight_decay of the optimizer"
            )
        self._cut = Cut(tuple(reads.calls), reads.outputs())
        return self._cut

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        """Run the step, as a trace does, which ends it at the last call of a unit."""
        with self.metrics.taken(lambda _: None), self._logging(lambda *_: None):
            return self._module.training_step(batch, *self.arguments)

    def expected(self, batch: Any) -> Any:
        """Return the outputs that the rest of the step reads, computed without a pipeline."""
        modules = dict(self._module.named_modules())
        reads = _Reads({path: modules[path] for path in self._cut.calls})
        with self.metrics.taken(lambda _: None), self._logging(lambda *_: None), reads.recording():
            self._module.training_step(batch, *self.arguments)
        return tuple(reads.values[number] for number in self._cut.outputs)

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Run the step on one micro-batch, with units that return what was computed.

        Args:
            output: the outputs that it reads.
            batch: the micro-batch.

        Raises:
            UnsupportedError: if the step calls units in another order, or reads an output that it did not read before.
        """
        samples = next((len(leaf) for leaf in tensor_leaves(batch) if leaf.ndim), 1)

        def collect(name: str, value: Any, given: dict[str, Any]) -> None:
            self.logged.append((name, self.metrics.path(value) or _number(name, value), given, samples))

        def collect_call(call: Call) -> None:
            if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves(call[2:])):
                raise UnsupportedError(_NOT_READ.format(f"the metric {call[0]!r}"))
            self.calls[-1].append(kept(call))

        self.calls.append([])
        taken = self.metrics.taken(collect_call)
        with taken, self._logging(collect), self._served(dict(zip(self._cut.outputs, output, strict=True))):
            loss = loss_of(self._module.training_step(batch, *self.arguments))
        if not isinstance(loss, Tensor):
            raise UnsupportedError(_NOT_READ.format("the loss"))
        return loss

    @contextlib.contextmanager
    def _served(self, values: Mapping[int, Any]) -> Iterator[None]:
        modules, calls = dict(self._module.named_modules()), list[str]()
        replacements, graph = ForwardReplacements(), fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)

        def serve(path: str, original: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                number = len(calls)
                calls.append(path)
                if self._cut.calls[number : number + 1] != (path,):
                    raise UnsupportedError(
                        f"training_step calls {path!r} out of order, expected the order of its first run"
                    )
                return values[number] if number in values else fx.Proxy(graph.placeholder(f"call_{number}"), tracer)

            return forward

        def pass_on(path: str, original: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
                    return fx.Proxy(graph.placeholder("stand_in"), tracer)
                return original(*args, **kwargs)

            return forward

        units = set(self._cut.calls)
        for path, module in modules.items():
            if path in units:
                replacements.replace(module, functools.partial(serve, path))
            elif path and not any(unit.startswith(f"{path}.") or path.startswith(f"{unit}.") for unit in units):
                replacements.replace(module, functools.partial(pass_on, path))
        try:
            yield
        finally:
            replacements.restore()
        if tuple(calls) != self._cut.calls:
            raise UnsupportedError(
                "training_step calls fewer modules than in its first run. Call all of them each time"
            )

    @contextlib.contextmanager
    def _logging(self, receive: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
        """Take what the step logs."""
        own = vars(self._module)

        def log(name: str, value: Any, *args: Any, **given: Any) -> None:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
            receive(name, value, {**dict(zip(names, args, strict=False)), **given})

        replaced = {"log": log, "all_gather": _refuse_all_gather}
        before = {name: own[name] for name in replaced if name in own}
        own.update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del own[name]
            own.update(before)


_NOT_READ = "{} reads the output of a module that the first run of training_step did not read. Read it in every step"


def _refuse_all_gather(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        "training_step calls all_gather, but only the process of the last stage runs it. Leave it out"
    )


def loss_of(found: Any) -> Any:
    """Return the loss in what a training step returned.

    Raises:
        UnsupportedError: if there is none, or more than that.
    """
    if isinstance(found, Mapping):
        others = [key for key in found if key != "loss"]
        if others or "loss" not in found:
            raise UnsupportedError(
                f"training_step returns {sorted(map(str, found))}, expected only the loss: all else stays in the "
                "process of the last stage. Log numbers with self.log"
            )
        return found["loss"]
    if not isinstance(found, (Tensor, fx.Proxy)):
        raise UnsupportedError(f"training_step must return the loss for every batch, got {type(found).__name__}")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, fx.Proxy):
        raise UnsupportedError(_NOT_READ.format(f"self.log({name!r})"))
    if isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    raise UnsupportedError(
        f"self.log({name!r}) in training_step must get one number or a metric of the module in a graph pipeline, got "
        f"{type(value).__name__}"
    )


class _Reads(TorchFunctionMode):
    """Follows which calls of units a value was computed from, not looking through further calls."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.values: list[Any] = []
        self.weights: list[str] = []
        self._units = units
        self._owners = {id(weight): path for path, unit in units.items() for weight in unit.parameters()}
        self._sources: dict[int, tuple[Tensor, frozenset[int]]] = {}
        self._used: list[tuple[int, frozenset[int]]] = []
        self._read: set[int] = set()
        self._inside = 0

    def outputs(self) -> tuple[int, ...]:
        """Return the numbers of the calls whose outputs are read behind the last call, returned or logged."""
        late = [sources for calls, sources in self._used if calls == len(self.calls)]
        return tuple(sorted(self._read.union(*late)))

    def read(self, value: Any) -> None:
        """Note that a value is needed."""
        self._read |= self._sources_of(value)

    def _sources_of(self, value: Any) -> frozenset[int]:
        found = [self._sources[id(leaf)][1] for leaf in tensor_leaves(value) if id(leaf) in self._sources]
        return frozenset[int]().union(*found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        given = (args, kwargs)
        self.weights += [self._owners[id(leaf)] for leaf in tensor_leaves(given) if id(leaf) in self._owners]
        sources = self._sources_of(given)
        if not sources:
            return result
        self._used.append((len(self.calls), sources))
        if func.__name__ in _READ:
            self._read |= sources
        changed = [result]
        if result is None or (func.__name__.endswith("_") and not func.__name__.startswith("__")):
            changed.append(args[:1])
        self._note(changed, sources)
        return result

    def _note(self, value: Any, sources: frozenset[int]) -> None:
        for leaf in tensor_leaves(value):
            self._sources[id(leaf)] = leaf, sources

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note each call of a unit."""
        replacements = ForwardReplacements()
        for path, unit in self._units.items():
            replacements.replace(unit, functools.partial(self._recorded, path))
        try:
            yield
        finally:
            replacements.restore()

    def _recorded(self, path: str, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                output = original(*args, **kwargs)
            finally:
                self._inside -= 1
            self._note(output, frozenset({len(self.calls)}))
            self.calls.append(path)
            self.values.append(output)
            return output

        return forward
