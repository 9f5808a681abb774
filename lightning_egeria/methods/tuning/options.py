"""Options of an optimizer as tunables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning.spaces import Value


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
                f"are {', '.join(names)}; for anything else, use CustomTunable with a setter"
            )
        value = self.get(trainer)
        if not isinstance(value, bool | int | float | str):
            raise UnsupportedError(
                f"the option {self._path!r} is {value!r:.60}, expected a number, a string or a boolean. For an item of "
                f"a tuple, give its number: '{self._path}.0'"
            )

    def get(self, trainer: pl.Trainer) -> Value:
        """Return the value in the first parameter group that has it."""
        held: Any = next(self._groups(trainer))[self._name]
        value: Value = held if self._item is None else held[self._item]
        return value

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


def _length(value: Any) -> int:
    return len(value) if isinstance(value, tuple | list) else 0
