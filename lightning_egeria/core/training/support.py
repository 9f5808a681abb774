"""Refusing a Trainer in which a method does not run, as the method declares it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_egeria.core.training.loops import fetches_batches
from lightning_egeria.core.training.methods import Method, check_combination, methods_of
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.upstream.ddp import averages_models, settings_of


def check_setup(trainer: pl.Trainer, method: Method, allow_untested: bool | None = None) -> None:
    """Check that a method runs with the other methods, the strategy and the training step of a Trainer.

    Args:
        trainer: the Trainer, after it has started its processes.
        method: the method.
        allow_untested: warn of a strategy instead of raising; None if the method has no such argument.

    Raises:
        UnsupportedError: if it does not; the message has the reason and the alternative.
    """
    check_combination(methods_of(trainer))
    check_strategy(trainer.strategy, method, allow_untested)
    module = trainer.lightning_module
    if method.manual and not module.automatic_optimization:
        raise UnsupportedError(
            f"{method.label} does not run with manual optimization: {method.manual}. Use automatic optimization"
        )
    if method.own_batches and fetches_batches(module.training_step):
        raise UnsupportedError(
            f"{method.label} does not run with dataloader_iter: {method.own_batches}, and a training_step with "
            "dataloader_iter fetches its own. Use training_step(batch, batch_idx)"
        )


def check_strategy(strategy: Any, method: Method, allow_untested: bool | None) -> None:
    """Check that a method runs with a strategy.

    Raises:
        UnsupportedError: if it does not.
    """
    reason = _reason_against(strategy, method)
    if reason is None:
        return
    if not allow_untested:
        more = "" if allow_untested is None else ". allow_untested=True trains anyway, at your own risk"
        raise UnsupportedError(reason + more)
    Notices(method.label).warn(
        f"{reason}. Training anyway because of allow_untested=True; it may fail, or give wrong results"
    )


def check_optimizers(trainer: pl.Trainer) -> None:
    """Check that frozen weights stay as they are.

    Raises:
        UnsupportedError: if an optimizer is LBFGS.
    """
    if any(isinstance(one, torch.optim.LBFGS) for one in trainer.optimizers):
        raise UnsupportedError(
            "LBFGS keeps moving frozen weights along the directions it remembers. Use an optimizer that skips "
            "parameters without a gradient, such as SGD, Adam or AdamW"
        )


def _reason_against(strategy: Any, method: Method) -> str | None:
    name = type(strategy).__name__  # `lightning` and `pytorch_lightning` have a class each
    if method.strategies and name not in method.strategies:
        why = method.strategy_reasons.get(name)
        text = f"is not tested with {name}" if why is None else f"does not run with {name}: {why}"
        return f"{method.label} {text}. {method.instead}"
    if name == "DDPStrategy" and method.changes_gradients:
        if settings_of(strategy).get("static_graph"):
            return (
                f"static_graph=True promises DDP that all steps have the same gradients, but {method.label} changes "
                "them. Leave static_graph out"
            )
        if averages_models(strategy):
            text = "post-local SGD lets ranks differ between averages"
            return f"{text}, and {method.label} needs them equal. Use plain DDP"
    if name == "ModelParallelStrategy" and strategy.device_mesh["tensor_parallel"].size() > 1:
        return f"{method.label} is not tested with tensor parallelism. Use tensor_parallel_size=1"
    return None
