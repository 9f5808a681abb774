"""Selective-Backprop as a data module around the user's own. It only puts the parts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_egeria.core.batches.reading import BatchSource
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.core.training.support import check_setup
from lightning_egeria.core.training.wrapping import WrappingDataModule, remove_callback
from lightning_egeria.errors import ArgumentError, UnsupportedError, check_integers
from lightning_egeria.methods.selecting import METHOD
from lightning_egeria.methods.selecting.callback import SelectionCallback
from lightning_egeria.methods.selecting.figures import figures_of
from lightning_egeria.methods.selecting.loader import SelectedBatches
from lightning_egeria.methods.selecting.losses import LossTable
from lightning_egeria.methods.selecting.rule import SelectionRule, Settings
from lightning_egeria.methods.selecting.scoring import PerSampleLoss
from lightning_egeria.methods.selecting.stats import SelectionStats
from lightning_egeria.methods.selecting.trainer_access import TrainerAccess, Transferred
from lightning_egeria.methods.selecting.window import Window
from lightning_egeria.upstream.lightning import chosen_hook, is_asked_by_loop, let_batches_go_to, prepared

MODES = ("queue", "in_batch")
SCHEDULES = ("seen", "used")


class SelectiveBackprop(WrappingDataModule):
    """Computes the backward pass only for samples with a high loss.

    A forward pass without gradients computes the loss of each sample, which is read off your own training step. A
    sample is kept with probability ``percentile ** beta``, where the percentile is that of its loss among the last
    ``history`` losses. With ``beta=0``, training is bit for bit training without this class. The first epoch trains on
    all samples.

    Args:
        datamodule: your data module, a `FrozenPrefixCache`, or just the training DataLoader.
        beta: how strongly high losses are preferred. About 1 / (beta + 1) of the samples are kept.
        mode: ``"queue"``: full batches of kept samples, as in the paper. ``"in_batch"``: a fixed share of each batch.
        share: share of each batch to keep with ``mode="in_batch"``; None is 1 / (beta + 1).
        history: number of last losses that a loss is compared with.
        staleness: number of epochs for which a loss is used before the sample is scored again; 0 scores all samples.
            The samples to score are topped up with the next-oldest ones, to a multiple of a quarter batch.
        start: share of the run at which selection begins.
        end: share of the run at which selection ends.
        full_every: one batch in this many is trained whole; 0 trains none whole.
        schedule: what learning-rate schedulers and validation count with ``mode="queue"``: ``"seen"``, the batches that
            were scored, as in a plain run, or ``"used"``, the batches that were trained.
        per_sample_loss: takes the module and a batch, returns one loss for each sample; None reads the losses off the
            training step.
        seed: seed of the random numbers of the selection.
        val_dataloaders: for validation, if ``datamodule`` is a DataLoader.

    Attributes:
        datamodule: your data module.
        selection: which samples were scored and trained, in the last fit so far.
        losses: the last loss of each sample, by id; filled with ``staleness``.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD

    def __init__(
        self,
        datamodule: pl.LightningDataModule | DataLoader[Any] | None,
        beta: float = 1,
        mode: str = "queue",
        share: float | None = None,
        history: int = 1024,
        staleness: int = 0,
        start: float = 0.0,
        end: float = 1.0,
        full_every: int = 0,
        schedule: str = "seen",
        per_sample_loss: PerSampleLoss | None = None,
        seed: int = 0,
        val_dataloaders: Any = None,
    ) -> None:
        super().__init__()
        self.window = Window(start, end, full_every)
        SelectionRule(beta, history)
        for name, value, known in (("mode", mode, MODES), ("schedule", schedule, SCHEDULES)):
            if value not in known:
                raise ArgumentError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if share is not None and (not hasattr(share, "__float__") or not 0 < share <= 1):
            raise ArgumentError(f"share must be a number in (0, 1], got {share!r}")
        if share is not None and mode == "queue":
            raise ArgumentError("share is for mode='in_batch'; with mode='queue', beta decides how much is kept")
        if schedule == "used" and mode == "in_batch":
            raise ArgumentError("schedule='used' is for mode='queue'; with mode='in_batch' each batch is trained")
        check_integers(0, staleness=staleness, seed=seed)
        if per_sample_loss is not None and not callable(per_sample_loss):
            raise ArgumentError(f"per_sample_loss must be a function, got {per_sample_loss!r}")
        self.beta, self.mode, self.history, self.staleness = beta, mode, history, staleness
        self.share = share if share is not None or mode == "queue" else 1 / (beta + 1)
        self.schedule, self.per_sample_loss, self.seed = schedule, per_sample_loss, seed
        self.selection = SelectionStats()
        self._notices = Notices("selective backprop")
        self.losses = LossTable(staleness)
        self._batches: SelectedBatches | None = None
        self._callback: SelectionCallback | None = None
        self._resumed: list[dict[str, Any]] | None = None  # from a checkpoint, until there is a loader
        self.wrap(datamodule, val_dataloaders)

    def make_rule(self) -> SelectionRule:
        """Return the rule of a run. Override it to use another rule with the same methods."""
        return SelectionRule(self.beta, self.history)

    def setup(self, stage: str) -> None:
        """Set up your data module; for `fit`, refuse a set-up that does not work.

        Raises:
            UnsupportedError: the strategy, the module or the loader cannot be used; the message has the reason.
        """
        super().setup(stage)
        if stage != "fit":
            return
        self._close()
        self._resumed = None
        self.selection, self.losses = SelectionStats(off=None), LossTable(self.staleness)
        reason = self._reason_for_nothing()
        if reason is not None:
            self.selection.off = reason
            return
        trainer = self._check_trainer()
        # The training step shows the losses of training forwards only to one who can read them off.
        table = self.losses if self.staleness and self.per_sample_loss is None else None
        by_seen = self.schedule == "seen" if self.mode == "queue" else None
        self._callback = SelectionCallback(lambda: self._batches, self.selection, table, by_seen)
        trainer.callbacks.insert(0, self._callback)

    def train_dataloader(self) -> Any:
        """Return the batches to train.

        Raises:
            UnsupportedError: there are several loaders, or samples have no ids and stale losses are wanted.
            ArgumentError: ``history`` is below the batch size.
        """
        loader = self.datamodule.train_dataloader()
        trainer = self.trainer
        if self._callback is None or trainer is None or not is_asked_by_loop():
            return loader
        if isinstance(loader, (list, tuple, dict)) or type(loader).__name__ == "CombinedLoader":
            raise UnsupportedError(
                f"selective backprop needs one training loader, got a {type(loader).__name__} of several. Join "
                "their datasets"
            )
        batch_size = getattr(loader, "batch_size", None)
        if isinstance(batch_size, int) and batch_size > self.history:
            raise ArgumentError(f"history must be at least the batch size, got {self.history} and {batch_size}")
        loader = prepared(trainer, loader)
        source = BatchSource(loader)
        if self.staleness and not source.has_ids:
            raise UnsupportedError(
                f"staleness={self.staleness} needs the id of each sample, and a {type(loader).__name__} over "
                f"{type(getattr(loader, 'dataset', None)).__name__} has none. Use a map-style dataset, or staleness=0"
            )
        before = self._batches
        if before is not None:
            before.close()
        settings = Settings(self.make_rule(), self.window, self.share, self.seed)
        side = TrainerAccess(trainer, self.per_sample_loss, from_cache=source.lookahead is not None)
        self._batches = SelectedBatches(loader, settings, self.losses, side, self.selection)
        if before is not None:
            self._batches.go_on_from(before)
        if self._resumed is not None:
            with checkpoint_read("selective backprop"):
                self._batches.load_rank_states(self._resumed)
            self._resumed = None
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's data module, and the state of selection on each rank."""
        state = super().state_dict()
        return state if self._batches is None else {**state, "selection": self._batches.rank_states()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the user's data module. Selection resumes from it when training begins."""
        super().load_state_dict(state_dict)
        self._resumed = state_dict.get("selection")

    def panels(self) -> list[Panel]:
        """Return the figures of the report."""
        return figures_of(self.selection)

    def attach_hooks(self, trainer: pl.Trainer) -> None:
        """Have all batches come here; those that went through the hooks already do not again."""
        let_batches_go_to(trainer, self)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As the user's, of the data module or the model."""
        return self._hook("on_before_batch_transfer", batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """As the user's, of the data module or the model."""
        return self._hook("transfer_batch_to_device", batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As the user's, of the data module or the model."""
        if isinstance(batch, Transferred):
            return batch.batch
        return self._hook("on_after_batch_transfer", batch, dataloader_idx)

    def _hook(self, name: str, batch: Any, *arguments: Any) -> Any:
        if isinstance(batch, Transferred):
            return batch
        trainer = self.trainer
        if trainer is None or trainer.lightning_module is None:
            return getattr(self.datamodule, name)(batch, *arguments)
        users = None if self.wraps_loader else self.datamodule
        return chosen_hook(trainer.lightning_module, users, name)(batch, *arguments)

    def teardown(self, stage: str) -> None:
        """As the user's."""
        if stage == "fit":
            self._close()
        super().teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """As the user's; Lightning does not call `teardown` after an error."""
        self._close()
        super().on_exception(exception)

    def _reason_for_nothing(self) -> str | None:
        """Return why training is that without selection."""
        trainer = self.trainer
        if not self.make_rule().needs_losses and (self.share is None or self.share == 1) and self.beta == 0:
            return "beta=0 keeps every sample"
        if getattr(trainer, "fast_dev_run", False):
            return "fast_dev_run"
        if getattr(trainer, "overfit_batches", 0):
            self._notices.warn("nothing is selected: overfit_batches replaces the sampler")
            return "overfit_batches replaces the sampler"
        if getattr(trainer, "max_epochs", None) == 1:
            self._notices.warn("nothing is selected: the first epoch trains on all samples, and max_epochs is 1")
            return "the first epoch trains on all samples, and max_epochs is 1"
        return None

    def _check_trainer(self) -> Any:
        trainer: Any = self.trainer
        module, strategy = trainer.lightning_module, type(trainer.strategy).__name__
        if trainer.datamodule is not self:
            raise UnsupportedError(
                "SelectiveBackprop is inside another wrapper. Swap them: "
                "SelectiveBackprop(FrozenPrefixCache(datamodule))"
            )
        check_setup(trainer, METHOD)
        if strategy == "ModelParallelStrategy" and self.mode == "queue":
            raise UnsupportedError(
                "with FSDP2 all ranks score together, and with mode='queue' they do not. Use mode='in_batch', or DDP"
            )
        if strategy == "ModelParallelStrategy" and self.staleness:
            raise UnsupportedError(
                "with FSDP2 all ranks must score at the same step, and with staleness they do not. Use staleness=0"
            )
        if not module.automatic_optimization and self.per_sample_loss is None and self.make_rule().needs_losses:
            raise UnsupportedError(
                "with manual optimization the training step cannot run without training the model, so the losses of "
                "the samples cannot be read off it. Pass per_sample_loss=function: it takes the module and a batch, "
                "and returns one loss for each sample"
            )
        ends = (trainer.max_epochs or -1) > 0 or trainer.max_steps > 0
        if not ends and not self.window.is_whole_run:
            raise UnsupportedError("start and end are shares of the run, and its length is unknown. Pass max_epochs")
        return trainer

    def _close(self) -> None:
        if self._callback is not None:
            self._callback.close()
            remove_callback(self.trainer, self._callback)
        if self._batches is not None:
            self._batches.close()
        self._callback = self._batches = None
