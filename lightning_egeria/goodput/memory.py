"""Running other batches without a trace: larger ones to see if memory suffices, and halves to measure noise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_egeria.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.distributed.reducer import wrapped_by_ddp
from lightning_egeria.profiling.clock import mark
from lightning_egeria.training.rehearsal import apart, rehearsal, with_callbacks
from lightning_egeria.upstream.torch import is_out_of_memory

Gradients = dict[nn.Parameter, Tensor]
Mark = float | torch.cuda.Event


def with_samples(batch: Any, samples: int, wanted: Sequence[int]) -> Any:
    """Return a batch of other samples of a batch; None if no tensor has one row a sample.

    Lists of one text a sample follow.

    Args:
        batch: a batch.
        samples: number of its samples.
        wanted: their numbers in the batch to return; some may come again.

    >>> with_samples((torch.tensor([[1], [2]]), torch.tensor(7.0)), samples=2, wanted=[0, 1, 0])
    (tensor([[1],
            [2],
            [1]]), tensor(7.))
    """
    rows = [leaf for leaf in tensor_leaves(batch) if leaf.ndim and leaf.shape[0] == samples]
    if not rows:
        return None

    def chosen(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0] != samples:
            return leaf
        return leaf.index_select(0, torch.tensor(wanted, device=leaf.device))

    def of_samples(node: Any) -> bool:
        return (
            type(node) in (list, tuple)
            and len(node) == samples
            and all(isinstance(item, (str, bytes)) for item in node)
        )

    def chosen_texts(node: Any) -> Any:
        return type(node)(node[number] for number in wanted) if of_samples(node) else node

    return pytree.tree_map(chosen_texts, change_leaves(batch, Tensor, chosen), is_leaf=of_samples)


def enlarged(batch: Any, samples: int, wanted: int) -> Any:
    """Return a batch of ``wanted`` samples, those of ``batch`` over and over; None as for `with_samples`."""
    return with_samples(batch, samples, [number % samples for number in range(wanted)])


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
        with apart(), with_callbacks(trainer, *bars), rehearsal(module), unsynchronised:
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
        ValueError: if no tensor of the batch has one row a sample.
    """
    middle, device = samples // 2, trainer.strategy.root_device
    first, second = (with_samples(batch, samples, part) for part in (range(middle), range(middle, samples)))
    if first is None:
        raise ValueError("no tensor of the batch has one row for each sample")
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
