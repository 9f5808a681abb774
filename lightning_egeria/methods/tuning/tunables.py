"""What can be tuned: how to read and to set it in a fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.methods.tuning.batch_size import BatchSize
from lightning_egeria.methods.tuning.options import Momentum, OptimizerOption
from lightning_egeria.methods.tuning.rates import LearningRate
from lightning_egeria.methods.tuning.spaces import Setting, Space, Value


class Tunable(Protocol):
    """Something that can be tuned.

    Attributes:
        changes_cost: whether a step takes another time with another value. Then speeds are measured in seconds.
        outside_checkpoints: whether Lightning's checkpoints do not hold it.
    """

    changes_cost: bool
    outside_checkpoints: bool

    def check(self, trainer: pl.Trainer) -> None:
        """Raise `UnsupportedError` if this fit cannot tune it."""

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the present value."""

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the value, between two optimizer steps."""


class CustomTunable:
    """A tunable with a getter and a setter of your own.

    Args:
        space: its values.
        get: returns the current value; called with the Trainer.
        set: sets a value; called with the Trainer and the value.
        changes_cost: whether the time of a step depends on the value.

    Raises:
        ArgumentError: if ``space`` is not a space, or a function cannot be called.

    >>> from lightning_egeria.methods.tuning.spaces import Choice
    >>> smoothing = CustomTunable(
    ...     Choice([0.0, 0.1]),
    ...     get=lambda trainer: trainer.lightning_module.loss.label_smoothing,
    ...     set=lambda trainer, value: setattr(trainer.lightning_module.loss, "label_smoothing", value),
    ... )
    """

    outside_checkpoints = True

    def __init__(
        self,
        space: Space,
        get: Callable[[pl.Trainer], Value],
        set: Callable[[pl.Trainer, Value], None],
        changes_cost: bool = False,
    ) -> None:
        functions: tuple[object, object] = get, set
        if not hasattr(space, "draw") or not all(map(callable, functions)):
            raise ArgumentError(
                "CustomTunable needs a Choice, Uniform or LogUniform and two functions, "
                f"got {space!r:.60}, {get!r:.60} and {set!r:.60}"
            )
        self.space = space
        self.changes_cost = changes_cost
        self._get = get
        self._set = set

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a value that cannot be stored.

        Raises:
            UnsupportedError: if ``get`` returns no number, string or boolean.
        """
        value: object = self.get(trainer)
        if not isinstance(value, bool | int | float | str) or value != value:  # NaN
            raise UnsupportedError(
                f"the getter of a CustomTunable returned {value!r:.60}, expected a number, a string or a boolean"
            )

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the present value."""
        return self._get(trainer)

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the value."""
        self._set(trainer, value)


class Dropout:
    """The probability of all dropout modules."""

    changes_cost = False
    outside_checkpoints = True

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a model without dropout modules.

        Raises:
            UnsupportedError: if there are none.
        """
        if not any(self._modules(trainer)):
            raise UnsupportedError(
                "the model has no dropout modules, and calls of the function dropout cannot be found. Use nn.Dropout, "
                "or CustomTunable with a setter"
            )

    def get(self, trainer: pl.Trainer) -> float:
        """Return the probability of the first dropout module."""
        module = next(self._modules(trainer))
        return float(module.dropout if isinstance(module, nn.MultiheadAttention) else module.p)

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the probability of all dropout modules."""
        for module in self._modules(trainer):
            setattr(module, "dropout" if isinstance(module, nn.MultiheadAttention) else "p", float(value))

    def _modules(self, trainer: pl.Trainer) -> Iterator[Any]:
        return (m for m in trainer.lightning_module.modules() if isinstance(m, _DropoutNd | nn.MultiheadAttention))


class GradientClipping:
    """The Trainer's ``gradient_clip_val``; 0 does not clip."""

    changes_cost = False
    outside_checkpoints = True

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse manual optimization.

        Raises:
            UnsupportedError: if the model clips gradients itself.
        """
        if not trainer.lightning_module.automatic_optimization:
            raise UnsupportedError(
                "with manual optimization the Trainer does not clip gradients. Use CustomTunable with a setter"
            )

    def get(self, trainer: pl.Trainer) -> float:
        """Return the limit."""
        return float(trainer.gradient_clip_val or 0.0)

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the limit."""
        trainer.gradient_clip_val = float(value)


class FrozenDepth:
    """The number of frozen layer modules of a `PrefixFreezing` callback in the same Trainer."""

    changes_cost = True
    outside_checkpoints = False

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer without a callback that freezes.

        Raises:
            UnsupportedError: if there is none.
        """
        if freezing_of(trainer) is None:
            raise UnsupportedError(
                "to tune frozen_depth, a callback must find the layer modules. Add PrefixFreezing() to the callbacks"
            )

    def get(self, trainer: pl.Trainer) -> int:
        """Return the frozen depth."""
        freezer = freezer_of(trainer)
        return freezer.depth if freezer is not None else 0

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Freeze this many layer modules, and no more than may freeze."""
        freezer = freezer_of(trainer)
        assert freezer is not None  # a search waits for it
        depth = min(int(value), freezer.chain.max_depth)
        if depth > freezer.depth:
            freezer.ranks.share_buffers(freezer.prefix.buffers(depth))
        freezer.prefix.set_depth(depth)
        freezer.update_reducer()


class Tunables:
    """All tunables of a run, by name.

    Args:
        spaces: the values of each, or a `CustomTunable`.

    Attributes:
        spaces: the values of each.
        changes_cost: whether a step takes another time with another setting.
        batch_size: the tunable of that name; None without one.

    Raises:
        ArgumentError: if there are none, or one has no space.
    """

    def __init__(self, spaces: Mapping[str, Space | CustomTunable]) -> None:
        given: object = spaces
        if not isinstance(given, Mapping) or not spaces:
            raise ArgumentError("tunables must name at least one thing to tune, such as {'lr': LogUniform(1e-4, 1)}")
        for name, space in spaces.items():
            if not isinstance(name, str):
                raise ArgumentError(f"the names of tunables must be strings, such as 'lr', got {name!r}")
            if not isinstance(space, CustomTunable) and not hasattr(space, "draw"):
                raise ArgumentError(
                    f"the values of {name!r} must be Choice, Uniform, LogUniform or CustomTunable, got {space!r:.60}"
                )
        for name, other in _same_value(spaces):
            raise ArgumentError(f"{name!r} and {other!r} set the same value. Leave out one of them")
        self.spaces = {name: one.space if isinstance(one, CustomTunable) else one for name, one in spaces.items()}
        self._tunables = {
            name: one if isinstance(one, CustomTunable) else _named(name, one)
            for name, one in sorted(spaces.items(), key=lambda item: item[0].startswith("groups."))  # after all groups
        }
        self.batch_size = next((one for one in self._tunables.values() if isinstance(one, BatchSize)), None)
        self.changes_cost = any(one.changes_cost for one in self._tunables.values())
        self.needs_freezer = any(isinstance(one, FrozenDepth) for one in self._tunables.values())

    def check(self, trainer: pl.Trainer) -> None:
        """Raise `UnsupportedError` if this fit cannot tune one of them."""
        for name, tunable in self._tunables.items():
            tunable.check(trainer)
            low, high = _LIMITS.get(name, (-math.inf, math.inf))
            if isinstance(tunable, FrozenDepth) and (freezer := freezer_of(trainer)) is not None:
                high = freezer.chain.max_depth
            wrong = [value for value in self._ends(name) if not _fits(name, tunable.get(trainer), value, low, high)]
            if wrong:
                raise UnsupportedError(
                    f"{name!r} cannot be {wrong[0]!r}: it is {tunable.get(trainer)!r} now, and takes "
                    f"{_takes(name, low, high)}. Change its values"
                )

    def _ends(self, name: str) -> list[Value]:
        """Return all values of a list, or both ends of a range."""
        space = self.spaces[name]
        return space.grid(2) if hasattr(space, "grid") else []

    def get(self, trainer: pl.Trainer) -> Setting:
        """Return the present setting."""
        return {name: tunable.get(trainer) for name, tunable in self._tunables.items()}

    def set(self, trainer: pl.Trainer, setting: Setting) -> None:
        """Apply a setting; what has its value already is left alone."""
        for name, tunable in self._tunables.items():
            if name in setting and tunable.get(trainer) != setting[name]:
                tunable.set(trainer, setting[name])

    def set_outside_checkpoints(self, trainer: pl.Trainer, setting: Setting) -> None:
        """Apply the part of a setting that checkpoints do not hold."""
        outside = {name for name, tunable in self._tunables.items() if tunable.outside_checkpoints}
        self.set(trainer, {name: value for name, value in setting.items() if name in outside})


_LIMITS: dict[str, tuple[float, float]] = {  # the least value, and the largest
    "momentum": (0.0, 1.0),
    "dropout": (0.0, 1.0),
    "gradient_clip_val": (0.0, math.inf),
    "lr": (0.0, math.inf),
    "frozen_depth": (0, math.inf),
}


def _fits(name: str, now: Value, value: Value, low: float, high: float) -> bool:
    """Whether a value is of the kind of the present one, and within the limits of its tunable."""
    if name == "frozen_depth" and type(value) is not int:
        return False
    if isinstance(now, bool | str) or isinstance(value, bool | str):
        return type(now) is type(value)
    return low <= value <= high and not (name == "lr" and value == 0) and not (name == "momentum" and value == 1)


def _takes(name: str, low: float, high: float) -> str:
    if name == "lr":
        return "a positive number"
    if name not in _LIMITS:
        return "values of that kind"
    if name == "frozen_depth":
        return "a Choice of whole numbers" + (f" from 0 to {high:g}" if math.isfinite(high) else "")
    return f"numbers of at least {low:g}" if math.isinf(high) else f"numbers from {low:g} to {high:g}"


def freezer_of(trainer: pl.Trainer) -> Freezer | None:
    """Return the freezer of the Trainer's callback that freezes; None without one, and before its first step."""
    freezing = freezing_of(trainer)
    return freezing.freezer if freezing is not None else None


def _same_value(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of names of one value: that of all parameter groups is read from the first one."""
    known = set(names)
    pairs = [(name, f"groups.0.{name}") for name in sorted(known)]
    pairs += [("momentum", "betas.0"), ("momentum", "groups.0.betas.0")]
    return [pair for pair in pairs if known.issuperset(pair)]


_NAMED: dict[str, Callable[[], Tunable]] = {
    "lr": LearningRate,
    "momentum": Momentum,
    "dropout": Dropout,
    "gradient_clip_val": GradientClipping,
    "frozen_depth": FrozenDepth,
}


def _named(name: str, space: Space) -> Tunable:
    if name == "batch_size":
        return BatchSize(space)
    return _NAMED[name]() if name in _NAMED else OptimizerOption(name)
