"""What a Trainer and a LightningModule may do with a graph pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import LBFGS, Optimizer

from lightning_egeria.core.training.support import check_setup
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining import METHOD

_WEIGHT_READERS = ("WeightAveraging", "StochasticWeightAveraging")
_PLAIN = (bool, int, float, str, type(None))


def check_support(trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer] = ()) -> None:
    """Check a set-up.

    Args:
        trainer: the Trainer.
        module: what it trains.
        optimizers: those of the module, once they are there.

    Raises:
        UnsupportedError: if it does something that a graph pipeline cannot do; the message names it.
    """
    strategy = trainer.strategy
    if strategy.root_device.type != "cpu":
        raise UnsupportedError(
            f"graph pipelines run on the CPU in this version, got {strategy.root_device}. Pass accelerator='cpu'"
        )
    asked = trainer._accelerator_connector._devices_flag  # 1 where the Trainer was not asked
    if isinstance(asked, int) and asked not in (1, trainer.num_devices):
        raise UnsupportedError(
            f"a graph pipeline needs one number of processes, got Trainer(devices={asked}) and "
            f"{trainer.num_devices} of the strategy. Leave one out"
        )
    check_setup(trainer, METHOD)
    precision = str(strategy.precision_plugin.precision)
    if precision not in ("32-true", "bf16-mixed"):
        raise UnsupportedError(
            f"a graph pipeline needs precision='32-true' or 'bf16-mixed', got {precision!r}. A scaler of gradients "
            "would skip a step in one process and not in another"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found = [one.__name__ for one in type(callback).__mro__ if one.__name__ in _WEIGHT_READERS]
        if found:
            raise UnsupportedError(
                f"{type(callback).__name__} averages all weights after each step, and a process of a graph pipeline "
                "holds those of its stage. Remove the callback"
            )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError("LBFGS computes several losses a step. With a graph pipeline, use another optimizer")


def check_logged(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``self.log`` in a training step, which other processes get.

    Raises:
        UnsupportedError: if one cannot be sent.
    """
    for key, value in given.items():
        if not isinstance(value, _PLAIN):
            raise UnsupportedError(
                f"self.log({name!r}, {key}=...) in training_step must get a number or a name in a graph pipeline, got "
                f"{type(value).__name__}"
            )
    return given
