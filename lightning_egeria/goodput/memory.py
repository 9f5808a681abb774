"""Whether a larger batch fits in memory: tried before training uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_egeria.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.training.rehearsal import rehearsal

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ended, on any device.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("shapes"))
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


def enlarged(batch: Any, samples: int, wanted: int) -> Any:
    """Return a batch of ``wanted`` samples, those of ``batch`` over and over; None if no tensor has one row a sample.

    Args:
        batch: a batch.
        samples: number of its samples.
        wanted: number of samples to return.

    >>> enlarged((torch.tensor([[1], [2]]), torch.tensor(7.0)), samples=2, wanted=3)
    (tensor([[1],
            [2],
            [1]]), tensor(7.))
    """
    rows = [leaf for leaf in tensor_leaves(batch) if leaf.ndim and leaf.shape[0] == samples]
    if not rows:
        return None

    def more(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0] != samples:
            return leaf
        return leaf.index_select(0, torch.arange(wanted, device=leaf.device) % samples)

    return change_leaves(batch, Tensor, more)


def fits_in_memory(trainer: pl.Trainer, batch: Any, batch_idx: int) -> bool:
    """Run forward and backward of a batch without a trace, and return whether memory sufficed.

    Processes do not exchange gradients meanwhile. Every rank must call it, and agree on the result.

    Args:
        trainer: the Trainer, between two optimizer steps.
        batch: the batch, on its device.
        batch_idx: number of the batch in the epoch, for the training step.
    """
    module = trainer.lightning_module
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    # The progress bar stays: its own thread looks for it here.
    trainer.callbacks = [one for one in callbacks if isinstance(one, pl.callbacks.ProgressBar)]  # type: ignore[attr-defined]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with rehearsal(module), _block_parallel_sync_behavior(trainer.strategy, block=True):
            takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            output = trainer.strategy.training_step(*((batch, batch_idx) if takes_index else (batch,)))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is not None:
                trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    else:
        fits = True
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        for parameter, gradient in gradients:
            parameter.grad = gradient
    if not fits and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits
