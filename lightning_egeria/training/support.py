"""The strategies and optimizers that freezing is tested with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.training.notices import Notices
from lightning_egeria.upstream.ddp import averages_models, settings_of

TRIED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_ALTERNATIVE = "Use strategy='ddp' or ModelParallelStrategy (FSDP2)"
_REASONS = {
    "FSDPStrategy": "FSDP1 flattens several layers into one parameter, which cannot freeze in part",
    "DeepSpeedStrategy": "DeepSpeed partitions the optimizer once, at the start, and keeps exchanging the gradients of "
    "frozen layers",
}


def check_strategy(trainer: pl.Trainer, allow_untested: bool) -> None:
    """Check that freezing is tested with the strategy of the Trainer.

    Args:
        trainer: the Trainer, after it has started its processes.
        allow_untested: warn instead of raising.

    Raises:
        UnsupportedError: if it is not; the message has the reason and the alternative.
    """
    reason = _reason_against(trainer.strategy)
    if reason is None:
        return
    if not allow_untested:
        raise UnsupportedError(f"{reason}. allow_untested=True trains anyway, at your own risk")
    Notices("freezing").warn(
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


def _reason_against(strategy: Any) -> str | None:
    name = type(strategy).__name__  # `lightning` and `pytorch_lightning` have a class each
    if name not in TRIED:
        why = _REASONS.get(name, f"freezing is not tested with {name}")
        return f"{why}. {_ALTERNATIVE}"
    if name == "DDPStrategy":
        if settings_of(strategy).get("static_graph"):
            return (
                "static_graph=True promises DDP that the set of trained parameters never changes, but freezing changes "
                "it. Leave static_graph out"
            )
        if averages_models(strategy):
            return "post-local SGD lets ranks differ between averages, and freezing needs them equal. Use plain DDP"
    if name == "ModelParallelStrategy" and strategy.device_mesh["tensor_parallel"].size() > 1:
        return "freezing is not tested with tensor parallelism. Use tensor_parallel_size=1"
    return None
