"""Running other batches without a trace: larger ones to see if memory suffices, and halves to measure noise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.distributed.reducer import wrapped_by_ddp
from lightning_egeria.core.profiling.clock import mark
from lightning_egeria.core.training.isolation import dry_run, outside_batch, with_callbacks
from lightning_egeria.upstream.torch import is_out_of_memory

Gradients = dict[nn.Parameter, Tensor]
Mark = float | torch.cuda.Event


def enlarged(batch: Any, samples: int, wanted: int) -> Any:
    """Return a batch of ``wanted`` samples: those of a batch, over and over.

    Args:
        batch: a batch.
        samples: number of its samples.
        wanted: number of samples to return.

    Raises:
        RowsError: if nothing in the batch has one row a sample.

    >>> enlarged((torch.tensor([[1], [2]]), torch.tensor(7.0)), samples=2, wanted=3)
    (tensor([[1],
            [2],
            [1]]), tensor(7.))
    """
    return Rows.of(batch, samples).take(np.arange(wanted) % samples).batch()


@contextlib.contextmanager
def repeating(trainer: pl.Trainer, batch_idx: int) -> Iterator[Callable[[Any], Gradients]]:
    """Give a function that runs forward and backward of a batch and returns its gradients. No trace remains of it.

    Processes exchange neither gradients nor buffers meanwhile: one of them may fail.

    Args:
        trainer: the Trainer, between two batches.
        batch_idx: number of the batch in the epoch, for the training step.
    """
    module = trainer.lightning_module
    parameters = list(module.parameters())
    before = [parameter.grad for parameter in parameters]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def run(batch: Any) -> Gradients:
        for parameter in parameters:
            parameter.grad = None
        output = trainer.strategy.training_step(*((batch, batch_idx) if takes_index else (batch,)))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None:
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}

    # The progress bar stays: its own thread looks for it here.
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # the connectors set it
    bars = [one for one in callbacks if isinstance(one, pl.callbacks.ProgressBar)]
    unsynchronised = _block_parallel_sync_behavior(trainer.strategy, block=True)
    wrapped = wrapped_by_ddp(trainer.strategy)
    sends_buffers = wrapped is not None and wrapped.require_forward_param_sync
    if wrapped is not None:
        wrapped.require_forward_param_sync = False
    try:
        with outside_batch(), with_callbacks(trainer, *bars), dry_run(module), unsynchronised:
            yield run
    finally:
        if wrapped is not None:
            wrapped.require_forward_param_sync = sends_buffers  # each forward of DDP sets it, unless it fails
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@dataclasses.dataclass(frozen=True)
class Halves:
    """What the two halves of a batch gave.

    Attributes:
        first: gradients of the first half.
        second: those of the other.
        began: when they began.
        ended: when they were over.
    """

    first: Gradients
    second: Gradients
    began: Mark
    ended: Mark


def run_in_halves(trainer: pl.Trainer, batch: Any, samples: int, batch_idx: int) -> Halves:
    """Run the two halves of a batch without a trace.

    Raises:
        RowsError: if nothing in the batch has one row a sample.
    """
    middle, device = samples // 2, trainer.strategy.root_device
    rows = Rows.of(batch, samples)
    first, second = (rows.take(np.arange(*part)).batch() for part in ((0, middle), (middle, samples)))
    with repeating(trainer, batch_idx) as run:
        began = mark(device)
        return Halves(run(first), run(second), began, mark(device))


def fits_in_memory(trainer: pl.Trainer, batch: Any, batch_idx: int) -> bool | Exception:
    """Return whether memory suffices for forward and backward of a batch, or another error that they raised.

    Every rank must call it, and agree on the result.

    Args:
        trainer: the Trainer, between two optimizer steps.
        batch: the batch, on its device.
        batch_idx: number of the batch in the epoch, for the training step.
    """
    try:
        with repeating(trainer, batch_idx) as run:
            run(batch)
    except Exception as error:  # of the user's training step; returned
        if not is_out_of_memory(error):
            return error
    else:
        return True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
