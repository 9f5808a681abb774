"""Whether a larger batch fits in memory: tried before training uses it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils import _pytree as pytree

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

    Lists of one text a sample are as long again.

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

    return _with_longer_lists(change_leaves(batch, Tensor, more), samples, wanted)


def _with_longer_lists(batch: Any, samples: int, wanted: int) -> Any:
    def of_samples(node: Any) -> bool:
        return (
            type(node) in (list, tuple)
            and len(node) == samples
            and all(isinstance(item, (str, bytes)) for item in node)
        )

    def more(node: Any) -> Any:
        return type(node)(itertools.islice(itertools.cycle(node), wanted)) if of_samples(node) else node

    return pytree.tree_map(more, batch, is_leaf=of_samples)


def fits_in_memory(trainer: pl.Trainer, batch: Any, batch_idx: int) -> bool | Exception:
    """Run forward and backward of a batch without a trace, and return whether memory sufficed, or another error.

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
    fits: bool | Exception = True
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
        fits = False if is_out_of_memory(error) else error
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        for parameter, gradient in gradients:
            parameter.grad = gradient
    if fits is False and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits
