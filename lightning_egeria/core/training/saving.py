"""Checkpoints that code of the user writes: what this package froze must not be left out of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import CheckpointError, first_of


class SavesUnder:
    """Saves checkpoints of a Trainer within a context, until `stop`.

    ``save_checkpoint`` of the Trainer is the way to each checkpoint: by ``ModelCheckpoint``, by other callbacks and by
    the user. It calls the module's ``state_dict`` and ``on_save_checkpoint``, and those of all callbacks.

    Args:
        trainer: the Trainer.
        context: returns the context of one call.
    """

    def __init__(self, trainer: Any, context: Callable[[], AbstractContextManager[object]]) -> None:
        self._trainer: Any = trainer
        self._before = vars(trainer).get("save_checkpoint")
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with context():
                return save(*args, **kwargs)

        self._save = vars(trainer)["save_checkpoint"] = save_checkpoint

    def stop(self) -> None:
        """Let the Trainer save as before. Safe to call twice."""
        trainer, self._trainer = self._trainer, None
        if trainer is None or vars(trainer).get("save_checkpoint") is not self._save:
            return
        if self._before is None:
            del vars(trainer)["save_checkpoint"]
        else:
            vars(trainer)["save_checkpoint"] = self._before


def check_has_frozen(weights: Mapping[str, Any], module: nn.Module, chain: LayerChain, depth: int) -> None:
    """Check that a checkpoint has the weights of frozen layer modules, and the statistics that belong to them.

    A module may save only what requires a gradient, and a run without freezing may do so safely. Layers that froze
    would start again with fresh weights, and never train.

    Args:
        weights: ``state_dict`` of the checkpoint. One without a single name of the model has names of its own.
        module: the model.
        chain: layer chain in the checkpoint.
        depth: number of layer modules that were frozen.

    Raises:
        CheckpointError: if some are missing.
    """
    known = set(module.state_dict())
    frozen = chain.prefix_parameters(depth)
    owners = {name.rpartition(".")[0] for name in frozen}
    statistics = [name for name, _ in module.named_buffers() if name in known and name.rpartition(".")[0] in owners]
    missing = [name for name in (*frozen, *statistics) if name in known and name not in weights]
    if missing and not known.isdisjoint(weights):
        raise CheckpointError(
            f"the checkpoint lacks {first_of(missing)}, which were frozen when it was written, so they would start "
            "again as they were before training. The module's state_dict or on_save_checkpoint has left them out. Use "
            "a checkpoint that has them, add them in the module's on_load_checkpoint, or leave out ckpt_path"
        )


def state_of(checkpoint: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Return the state of a callback in a checkpoint; None if it has none."""
    callbacks: Collection[str] = checkpoint.get("callbacks") or {}
    found: Mapping[str, Any] | None = callbacks[key] if isinstance(callbacks, Mapping) and key in callbacks else None
    return found
