"""The loss of each sample of a batch, from a forward that leaves no trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_egeria.core.batches.rows import Rows
from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.network.trainable import nothing_trains
from lightning_egeria.core.snapshots.random_state import RandomState, preserved_random_state
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.isolation import dry_run
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import PerSampleLossError
from lightning_egeria.methods.selecting.per_sample_loss import per_sample_losses

PerSampleLoss = Callable[[pl.LightningModule, Any], Tensor]


class Scorer:
    """Computes losses in evaluation mode, without gradients.

    Buffers, metrics, logs, attributes of the module and random states are as before. The module runs as it is in this
    process, outside of DDP.

    Args:
        trainer: the Trainer.
        per_sample_loss: takes the module and a batch, returns one value for each sample; None reads the losses off the
            training step.
        from_cache: whether batches come from a cache of training steps, which tells apart what runs under ``no_grad``.
    """

    def __init__(self, trainer: pl.Trainer, per_sample_loss: PerSampleLoss | None, from_cache: bool = False) -> None:
        self._trainer = trainer
        self._from_cache = from_cache
        self._per_sample_loss = per_sample_loss
        self._notices = Notices("selective backprop")
        self._copies = False  # the training step changes its batch in place

    def check(self, moved: Callable[[], Any], samples: int, number: int, rows: Callable[[Any, int], Rows]) -> None:
        """Compute losses to find out whether they can be had. No random number of the process moves.

        Args:
            moved: returns the batch on its device.
            samples: as in `losses`.
            number: as in `losses`.
            rows: takes a batch and its number of samples, and divides it into samples.

        Raises:
            PerSampleLossError: they cannot.
        """
        with preserved_random_state():
            batch = copy.deepcopy(moved())
            order = np.random.default_rng(0).permutation(samples)
            # What a cache holds of a batch is in its order.
            shuffled = None if self._from_cache else copy.deepcopy(rows(batch, samples).take(order).batch())
            versions = [leaf._version for leaf in tensor_leaves(batch)]
            with self._rehearsed():
                random = RandomState.current()
                losses = self._read(batch, samples, number)
                draws = RandomState.current() != random
            self._copies = self._copies or versions != [leaf._version for leaf in tensor_leaves(batch)]
            if shuffled is not None:
                few = samples // 2 if self._per_sample_loss is None and not draws and samples > 2 else 0
                half = copy.deepcopy(rows(shuffled, samples).take(np.arange(few)).batch()) if few else None
                self._check_order(shuffled, losses[order], number)
                if half is not None:
                    self._check_others(half, losses[order][:few], samples, number)

    def _check_order(self, batch: Any, expected: NDArray[np.float64], number: int) -> None:
        found = self._losses_if_any(batch, len(expected), number)
        if found is not None and _are_elsewhere(expected, found):
            raise PerSampleLossError(
                "the losses of the samples are in another order than the samples, so samples would get the wrong "
                "losses. Return them in the order of the batch, or pass SelectiveBackprop(..., "
                "per_sample_loss=function), which takes the module and a batch"
            )

    def _check_others(self, batch: Any, expected: NDArray[np.float64], samples: int, number: int) -> None:
        found = self._losses_if_any(batch, len(expected), number)
        if found is None:
            return
        # A sum may be divided by the number of samples.
        away = min(np.abs(found - share * expected).max() for share in (1, samples / len(found)))
        if away > 0.1 * np.abs(found).max():
            self._notices.warn(
                "the loss of a sample depends on the other samples of its batch (is it contrastive?), so batches of "
                "selected samples have other losses than full batches. Compare with a run without selection",
                once="others",
            )

    def _losses_if_any(self, batch: Any, samples: int, number: int) -> NDArray[np.float64] | None:
        """The losses of samples that are not a batch of the program's; None if the step fails on them."""
        try:
            return self._losses(batch, samples, number)
        except Exception:  # of the user's training step: it needs samples that are sorted, or a whole batch of them
            return None

    def losses(self, batch: Any, samples: int, number: int) -> NDArray[np.float64]:
        """Return the loss of each sample, shape ``(samples,)``.

        Args:
            batch: the batch, on its device.
            samples: number of its samples.
            number: number of the batch, for training steps that take it.

        Raises:
            PerSampleLossError: the losses cannot be read off the training step, or ``per_sample_loss`` returns
                something else.
        """
        return self._losses(copy.deepcopy(batch) if self._copies else batch, samples, number)

    def _with_own_mode(self) -> list[nn.Module]:
        """Modules of frozen layers that training calls in another mode than their parts, and so does a cache."""
        freezing = freezing_of(self._trainer)
        freezer = freezing.freezer if freezing is not None else None
        return freezer.prefix.with_own_mode() if freezer is not None else []

    def _losses(self, batch: Any, samples: int, number: int) -> NDArray[np.float64]:
        with self._rehearsed():
            return self._read(batch, samples, number)

    @contextlib.contextmanager
    def _rehearsed(self) -> Iterator[None]:
        """Let the module be in evaluation mode, without gradients and traces."""
        module = self._trainer.lightning_module
        without = nothing_trains(module) if self._from_cache else torch.no_grad()
        with dry_run(module), without, self._trainer.precision_plugin.train_step_context():
            as_trained = [(part, part.training) for part in self._with_own_mode()]
            module.eval()
            for part, mode in as_trained:
                part.training = mode
            yield

    def _read(self, batch: Any, samples: int, number: int) -> NDArray[np.float64]:
        module = self._trainer.lightning_module
        if self._per_sample_loss is None:
            takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            arguments = (batch, number) if takes_number else (batch,)
            losses = _explained(lambda: per_sample_losses(lambda: module.training_step(*arguments), samples))
        else:
            losses = _checked(self._per_sample_loss(module, batch), samples)
        return losses.double().cpu().numpy()


def _are_elsewhere(expected: NDArray[np.float64], found: NDArray[np.float64]) -> bool:
    """Whether losses are the expected ones, and not in their places. Losses that depend on the batch prove nothing."""
    spread = np.ptp(expected)
    apart, away = np.abs(np.sort(found) - np.sort(expected)).max(), np.abs(found - expected).max()
    return bool(apart <= 0.01 * spread < 0.1 * spread < away)


def _explained(compute: Callable[[], Tensor]) -> Tensor:
    try:
        return compute()
    except PerSampleLossError as error:
        raise PerSampleLossError(
            f"{error}, and pass SelectiveBackprop(..., per_sample_loss=function): it takes the module and a batch, and "
            "returns one loss for each sample"
        ) from error
    except Exception as error:  # of the user's training step; raised again with a note
        error.add_note(
            "SelectiveBackprop ran this training step in evaluation mode, to read off the loss of each sample. If the "
            "step works in training mode only, pass per_sample_loss=function"
        )
        raise


def _checked(losses: Any, samples: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"the shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise PerSampleLossError(
            f"per_sample_loss must return a tensor of shape ({samples},), one loss for each sample, got {got}"
        )
    return losses.detach()
