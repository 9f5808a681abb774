"""Running the user's training step without leaving a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_egeria.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.snapshots.random_state import preserved_random_state


@contextlib.contextmanager
def rehearsal(module: nn.Module) -> Iterator[None]:
    """Run training steps of a module that leave no trace in its attributes, buffers, metrics and logs.

    ``self.log`` and ``self.log_dict`` do nothing meanwhile. Attributes, buffers and the states of torchmetrics return
    to their values at the end, and so does the random state of torch, numpy and Python. Parameters, gradients and
    optimizers are the caller's, and so is what the step writes elsewhere: files, a logger's ``experiment``, objects
    that are no module.

    Args:
        module: the module; its submodules are included.
    """
    attributes = ModuleAttributes(module)
    try:
        with preserved_random_state():
            for part in module.modules():
                if isinstance(part, pl.LightningModule):
                    vars(part).update(log=_ignore, log_dict=_ignore)
            yield
    finally:
        attributes.restore()


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of ``self.log``."""
