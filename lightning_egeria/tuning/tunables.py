"""What can be tuned: how to read and to set it in a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.training.callback import freezing_of
from lightning_egeria.training.freezer import Freezer
from lightning_egeria.tuning.rates import LearningRate
from lightning_egeria.tuning.spaces import Setting, Space, Value


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


class Custom:
    """A tunable of your own.

    Args:
        space: its values.
        get: returns the present value; called with the Trainer.
        set: sets a value; called with the Trainer and the value.
        changes_cost: whether a step takes another time with another value.

    >>> from lightning_egeria.tuning.spaces import Choice
    >>> smoothing = Custom(
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
        self.space = space
        self.changes_cost = changes_cost
        self._get = get
        self._set = set

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a value that cannot be stored.

        Raises:
            UnsupportedError: if ``get`` returns no number, string or boolean.
        """
        value = self.get(trainer)
        if not isinstance(value, bool | int | float | str):
            raise UnsupportedError(
                f"the getter of a Custom tunable returned {value!r:.60}, expected a number, a string or a boolean"
            )

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the present value."""
        return self._get(trainer)

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the value."""
        self._set(trainer, value)


class OptimizerOption:
    """An option of the parameter groups: ``"weight_decay"``, ``"betas.0"``, ``"groups.1.weight_decay"``.

    Args:
        path: its name, with a number behind it for an item of a tuple, and ``groups.N.`` before it for one group.
    """

    changes_cost = False
    outside_checkpoints = False

    def __init__(self, path: str) -> None:
        self._path = path
        parts = path.split(".")
        self._group: int | None = None
        if parts[0] == "groups" and len(parts) > 2 and parts[1].isdigit():
            self._group, parts = int(parts[1]), parts[2:]
        self._name = parts[0]
        self._item = int(parts[1]) if len(parts) == 2 and parts[1].isdigit() else None
        self._valid = len(parts) == (1 if self._item is None else 2)

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse an option that the optimizers do not have.

        Raises:
            UnsupportedError: if no parameter group has it, or it is no number, string or boolean.
        """
        groups = list(self._groups(trainer)) if self._valid else []
        if not groups:
            names = sorted({name for one in trainer.optimizers for name in one.param_groups[0]} - {"params"})
            raise UnsupportedError(
                f"there is nothing to tune named {self._path!r}: no parameter group has such an option. The options "
                f"are {', '.join(names)}; what is no option of an optimizer needs Custom and a setter"
            )
        value = self.get(trainer)
        if not isinstance(value, bool | int | float | str):
            raise UnsupportedError(
                f"the option {self._path!r} is {value!r:.60}, expected a number, a string or a boolean. For an item of "
                f"a tuple, give its number: '{self._path}.0'"
            )

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the value in the first parameter group that has it."""
        value: Any = next(self._groups(trainer))[self._name]
        return value if self._item is None else value[self._item]  # type: ignore[no-any-return]

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the value in all parameter groups that have it."""
        for group in self._groups(trainer):
            if self._item is None:
                group[self._name] = value
            else:
                items = list(group[self._name])
                items[self._item] = value
                group[self._name] = type(group[self._name])(items)

    def _groups(self, trainer: pl.Trainer) -> Iterator[dict[str, Any]]:
        for optimizer in trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                if self._group not in (None, number) or self._name not in group or self._name == "params":
                    continue
                if self._item is None or self._item < _length(group[self._name]):
                    yield group


class Momentum:
    """``momentum`` of SGD and RMSprop; the first of the ``betas`` of Adam and its kin."""

    changes_cost = False
    outside_checkpoints = False

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse optimizers without momentum, and schedulers that set it.

        Raises:
            UnsupportedError: if there is no momentum, or a scheduler cycles it.
        """
        self._option(trainer).check(trainer)
        for config in trainer.lr_scheduler_configs:
            if getattr(config.scheduler, "cycle_momentum", False):
                raise UnsupportedError(
                    f"{type(config.scheduler).__name__} sets the momentum in each step. Give it cycle_momentum=False, "
                    "or do not tune the momentum"
                )

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the momentum of the first parameter group."""
        return self._option(trainer).get(trainer)

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Set the momentum of all parameter groups."""
        self._option(trainer).set(trainer, value)

    def _option(self, trainer: pl.Trainer) -> OptimizerOption:
        first = trainer.optimizers[0].param_groups[0]
        return OptimizerOption("betas.0" if "betas" in first and "momentum" not in first else "momentum")


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
                "or Custom with a setter"
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
                "with manual optimization the Trainer does not clip gradients. Use Custom with a setter"
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
                "to tune frozen_depth, something must find the layer modules. Add PrefixFreezing() to the callbacks"
            )

    def get(self, trainer: pl.Trainer) -> int:
        """Return the frozen depth."""
        freezer = freezer_of(trainer)
        return freezer.depth if freezer is not None else 0

    def set(self, trainer: pl.Trainer, value: Value) -> None:
        """Freeze so many layer modules, and no more than may freeze."""
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
        spaces: the values of each, or a `Custom`.

    Attributes:
        spaces: the values of each.
        changes_cost: whether a step takes another time with another setting.

    Raises:
        ArgumentError: if there are none, or one has no space.
    """

    def __init__(self, spaces: Mapping[str, Space | Custom]) -> None:
        if not spaces:
            raise ArgumentError("tunables must name at least one thing to tune, such as {'lr': LogUniform(1e-4, 1)}")
        for name, space in spaces.items():
            if not isinstance(space, Custom) and not hasattr(space, "draw"):
                raise ArgumentError(
                    f"the values of {name!r} must be Choice, Uniform, LogUniform or Custom, got {space!r:.60}"
                )
        self.spaces = {name: one.space if isinstance(one, Custom) else one for name, one in spaces.items()}
        self._tunables = {name: one if isinstance(one, Custom) else _named(name) for name, one in spaces.items()}
        self.changes_cost = any(one.changes_cost for one in self._tunables.values())
        self.needs_freezer = any(isinstance(one, FrozenDepth) for one in self._tunables.values())

    def check(self, trainer: pl.Trainer) -> None:
        """Raise `UnsupportedError` if this fit cannot tune one of them."""
        for tunable in self._tunables.values():
            tunable.check(trainer)

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


def freezer_of(trainer: pl.Trainer) -> Freezer | None:
    """Return the freezer of the Trainer's callback that freezes; None without one, and before its first step."""
    freezing = freezing_of(trainer)
    return freezing.freezer if freezing is not None else None


_NAMED: dict[str, Callable[[], Tunable]] = {
    "lr": LearningRate,
    "momentum": Momentum,
    "dropout": Dropout,
    "gradient_clip_val": GradientClipping,
    "frozen_depth": FrozenDepth,
}


def _named(name: str) -> Tunable:
    return _NAMED[name]() if name in _NAMED else OptimizerOption(name)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, tuple | list) else 0
