"""Goodput as a data module around the user's own. It only puts the parts together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.checkpoints import check_version, checkpoint_read
from lightning_egeria.core.training.methods import check_combination, methods_of
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.core.training.support import check_setup
from lightning_egeria.core.training.wrapping import WrappingDataModule, remove_callback
from lightning_egeria.errors import ArgumentError, EgeriaError, UnsupportedError, check_integers
from lightning_egeria.methods.goodput import METHOD
from lightning_egeria.methods.goodput.callback import BatchSizeSteps, Settings, Start
from lightning_egeria.methods.goodput.control import BatchSizeChange, BatchSizeControl
from lightning_egeria.methods.goodput.decision import BatchSizeRule, LargestGoodput, ScriptedBatchSizes
from lightning_egeria.methods.goodput.display import panels_of
from lightning_egeria.methods.goodput.learning_rate import LearningRateRule, rule_of
from lightning_egeria.methods.goodput.progress import COUNTS
from lightning_egeria.methods.goodput.sizes import Sizes, are_limits, first_sizes
from lightning_egeria.upstream.torch import is_out_of_memory

STATE_VERSION = 2


class AdaptiveBatchSize(WrappingDataModule):
    """Moves the batch size to the largest goodput, and adapts the learning rate.

    Goodput is throughput times statistical efficiency; both are measured during training. The samples are those of your
    data module, divided into other batches: each sample still comes once an epoch. With ``max_batch_size`` at the
    initial batch size, training is bit for bit training without this class.

    A batch size is the number of samples in an optimizer step: in all processes and all accumulated batches.

    Args:
        datamodule: your data module, or just the training DataLoader.
        max_batch_size: the largest batch size. The initial one is the smallest.
        learning_rate: rule for the learning rate: ``"auto"`` (``"adascale"``, or ``"sqrt"`` for Adam and its like),
            ``"adascale"``, ``"sqrt"``, ``"linear"``, ``"legw"``, ``"none"``, or a `LearningRateRule`.
        schedule_by: what schedulers count that Lightning steps after each step: ``"epoch"`` (steps of the initial batch
            size, so that a schedule ends with its epochs), ``"step"``, or ``"progress"``. None: ``"step"`` if the
            Trainer has ``max_steps``, else ``"epoch"``.
        change_every_n_steps: number of steps between two decisions.
        measure_every_n_steps: number of steps between two measurements of the gradient noise.
        local_batch_sizes: smallest and largest batch of one process. None: from half of the initial one to the largest
            that fits in memory.
        batch_sizes: a fixed schedule, batch size by optimizer step, instead of the sizes of the largest goodput.
        hints: file that describes this job to a scheduler, written every 30 s, more often at first; None writes no
            file.
        val_dataloaders: for validation, if ``datamodule`` is a DataLoader.

    Attributes:
        datamodule: your data module.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD

    def __init__(
        self,
        datamodule: pl.LightningDataModule | DataLoader[Any] | None,
        max_batch_size: int,
        learning_rate: str | LearningRateRule = "auto",
        schedule_by: str | None = None,
        change_every_n_steps: int = 100,
        measure_every_n_steps: int = 1,
        local_batch_sizes: tuple[int, int | None] | None = None,
        batch_sizes: Mapping[int, int] | None = None,
        hints: str | os.PathLike[str] | None = None,
        val_dataloaders: Any = None,
    ) -> None:
        super().__init__()
        check_integers(
            1,
            max_batch_size=max_batch_size,
            change_every_n_steps=change_every_n_steps,
            measure_every_n_steps=measure_every_n_steps,
        )
        if schedule_by is not None and schedule_by not in COUNTS:
            raise ArgumentError(f"schedule_by must be one of {', '.join(COUNTS)}, or None, got {schedule_by!r}")
        if hints is not None and not Path(hints).name:
            raise ArgumentError(f"hints must be the path of a file, got {str(hints)!r}")
        if local_batch_sizes is not None and not are_limits(local_batch_sizes):
            raise ArgumentError(
                "local_batch_sizes must be the smallest and the largest batch of one process, or None for the largest; "
                f"got {local_batch_sizes!r}"
            )
        rule_of(learning_rate, adaptive=False)
        self._rule: BatchSizeRule = (
            LargestGoodput() if batch_sizes is None else ScriptedBatchSizes(batch_sizes, max_batch_size)
        )
        self.max_batch_size = max_batch_size
        self.learning_rate = learning_rate
        self.schedule_by = schedule_by
        self.change_every_n_steps = change_every_n_steps
        self.measure_every_n_steps = measure_every_n_steps
        self.local_batch_sizes = local_batch_sizes
        self.batch_sizes = dict(batch_sizes) if batch_sizes is not None else None
        self.hints = Path(hints) if hints is not None else None
        self._notices = Notices("goodput")
        self._adapted: AdaptedLoader | None = None
        self._sizes: Sizes | None = None
        self._steps: BatchSizeSteps | None = None
        self._refusal: EgeriaError | None = None  # raised when training starts
        self._control: BatchSizeControl | None = None  # of the last fit
        self._state: dict[str, Any] | None = None  # loaded, or of the end of the last fit
        self.wrap(datamodule, val_dataloaders)

    @property
    def changes(self) -> list[BatchSizeChange]:
        """Every change of the batch size, in the last fit so far."""
        return list(self._control.changes) if self._control is not None else []

    @property
    def control(self) -> BatchSizeControl | None:
        """Noise, throughput and limits measured in the last fit so far; None before training starts."""
        return self._control

    @property
    def total_batch_size(self) -> int | None:
        """The current batch size, over all processes and accumulated batches; None outside of training."""
        steps = self._steps
        return steps.changes.now.total if steps is not None and steps.started else None

    def panels(self) -> list[Panel]:
        """Return the figures of the run for a report; none before training starts."""
        trainer = self.trainer
        return panels_of(self._control, trainer.world_size) if self._control is not None and trainer is not None else []

    def setup(self, stage: str) -> None:
        """Set up the user's data module, and refuse a Trainer that is not supported."""
        super().setup(stage)
        if stage != "fit":
            return
        self._close()
        self._state = self._control = self._refusal = None
        trainer: Any = self.trainer
        check_combination(methods_of(trainer))
        if not getattr(trainer, "fast_dev_run", False):
            _check(trainer)
            self._steps = BatchSizeSteps(self._begin, self._notices)
            trainer.callbacks.insert(0, self._steps)  # first: those after it may write checkpoints

    def train_dataloader(self) -> Any:
        """Return the user's DataLoader, with batches of a size that changes."""
        loader = self.datamodule.train_dataloader()
        trainer, steps = self.trainer, self._steps
        if trainer is None or steps is None:
            return loader
        try:
            self._adapted = AdaptedLoader(loader, trainer, self._notices.warn)
            if not steps.started:
                local, notices = self.local_batch_sizes, self._notices
                self._sizes = first_sizes(trainer, self._adapted, self._state, self.max_batch_size, local, notices)
                self._rule.check(self._sizes.initial)
        except EgeriaError as error:
            # Not here: Lightning would leave DataLoader as it has changed it while it asks for loaders.
            self._refusal = error
            return loader
        if steps.started:  # loaded again, for a later epoch
            self._adapted.batches.change(steps.changes.now.local)
            steps.adapted = self._adapted
        return self._adapted.loader

    def teardown(self, stage: str) -> None:
        """Return the Trainer's settings."""
        if stage == "fit":
            self._close()
        super().teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Do the same; Lightning does not call `teardown` after an error."""
        steps = self._steps
        if steps is not None and steps.started and is_out_of_memory(exception):
            exception.add_note(
                f"goodput: batches had {steps.changes.now.local} samples in each process. Set the second value "
                "of local_batch_sizes to a smaller number"
            )
        self._close()
        super().on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """That of the user's own, and what is known of the goodput."""
        steps = self._steps
        own = {"version": STATE_VERSION, **steps.state()} if steps is not None and steps.started else self._state
        return super().state_dict() | ({"goodput": own} if own is not None else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts.

        Raises:
            CheckpointError: if another version of this class wrote it.
        """
        super().load_state_dict(state_dict)
        state = state_dict.get("goodput")
        if state is None or self._steps is None:
            return
        check_version(state, STATE_VERSION, METHOD.name)
        self._state = dict(state)

    def _begin(self, trainer: pl.Trainer) -> Start:
        if self._refusal is not None:
            raise self._refusal
        sizes, adapted, state = self._sizes, self._adapted, self._state
        assert sizes is not None  # `train_dataloader` comes before training
        assert adapted is not None
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError("LBFGS runs the training step more than once in a step. Use SGD, Adam or AdamW")
        groups = len(optimizer.param_groups)
        control = BatchSizeControl(
            sizes.initial, sizes.largest, sizes.local, self._rule, self.change_every_n_steps, groups
        )
        with checkpoint_read("goodput"):
            if state is not None:
                control.load(state)
        control.nodes = trainer.num_nodes
        rule = rule_of(self.learning_rate, adaptive="betas" in optimizer.defaults)
        counts = self.schedule_by or ("step" if trainer.max_steps != -1 else "epoch")
        adapted.batches.announced = None
        self._control, self._state = control, None
        settings = Settings(rule, counts, self.measure_every_n_steps, self.hints)
        return Start(control, adapted, sizes.now, settings, sizes.planned, sizes.done, state)

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        if steps.started:
            self._state = {"version": STATE_VERSION, **steps.state()}
            steps.close(self.trainer)
        remove_callback(self.trainer, steps)


def _check(trainer: Any) -> None:
    """Refuse a Trainer that is not supported.

    Raises:
        UnsupportedError: if it is not; the message has the alternative.
    """
    check_setup(trainer, METHOD)
    if trainer.overfit_batches:
        raise UnsupportedError("overfit_batches replaces the sampler whose batches AdaptiveBatchSize cuts. Remove one")
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise UnsupportedError(
            "GradientAccumulationScheduler and AdaptiveBatchSize both set accumulate_grad_batches. Remove one of them"
        )
    if importlib.util.find_spec("scipy") is None:
        raise UnsupportedError("the throughput is fitted with scipy. Run: pip install 'lightning-egeria[goodput]'")
