"""Refusing a version that lacks a private name, before the first step and not at the first freeze."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.upstream import ddp, lightning, terminal
from lightning_egeria.upstream import torch as of_torch


def check(trainer: Any) -> None:
    """Check that all private names are there.

    Args:
        trainer: the Trainer, with its model, before training starts.

    Raises:
        UnsupportedError: if one is missing; the message has the versions.
    """
    missing = [*of_torch.missing(), *ddp.missing(trainer.strategy), *lightning.missing(trainer), *terminal.missing()]
    if missing:
        versions = f"torch {torch.__version__} with Lightning {pl.__version__}"  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"{versions} lacks {', '.join(missing)}, which this version "
            "of lightning_egeria relies on. Use versions that its changelog names, or a newer lightning_egeria"
        )
