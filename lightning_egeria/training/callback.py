"""The base of every callback that freezes: it finds the layer chain and owns the freezer."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.errors import ArgumentError, CheckpointError, UnsupportedError, first_of
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.limits import depth_limit
from lightning_egeria.training.adapter import ObserverCallback
from lightning_egeria.training.checkpoints import checkpoint_read
from lightning_egeria.training.freezer import Decision, Freezer, FreezingEvent
from lightning_egeria.training.notices import Notices, log_line
from lightning_egeria.training.observers import Observer
from lightning_egeria.training.progress import BarEntry
from lightning_egeria.training.search import LayerSearch
from lightning_egeria.training.support import check_strategy

STATE_VERSION = 1


class Stage(enum.Enum):
    """Stage of a `PrefixFreezing`."""

    IDLE = "idle"  # outside `fit`, or in a `fit` without freezing
    LOOKING = "looking"  # the next training step shows the layer chain
    WAITING = "waiting"  # too few layer modules are trainable; looks again at the start of the next epoch
    STARTING = "starting"  # there is a freezer, and the method starts
    READY = "ready"  # calls `choose_depth` after each optimizer step


class PrefixFreezing(ObserverCallback):
    """Base of callbacks that freeze the front of a network. Override `choose_depth`.

    The callback finds the layer modules in the first training step and creates `freezer`. From then on it calls
    `choose_depth` after each optimizer step, and freezes or unfreezes to the returned depth.

    Args:
        layer_modules: paths of the layer modules, in execution order; None finds them.
        freeze_until: limit of the prefix. A path: up to and including that module. A number in (0, 1]: that share of
            the layer modules at most. None sets no limit. The last layer module never freezes.
        allow_untested: train with a strategy that is refused otherwise, with a warning.

    Attributes:
        freezer: freezes and unfreezes; None before the first training step.
        observers: observers of the moments of training, the freezer first.
        events: every freeze and unfreeze so far.
        ranks: the processes of the job.
        notices: takes log lines and warnings.
        learning_rate: learning rate of the front's parameter group in this step; NaN if the optimizer has none.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    def __init__(
        self,
        layer_modules: Sequence[str] | None = None,
        freeze_until: str | float | None = None,
        allow_untested: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(layer_modules, str):
            raise ArgumentError(f"layer_modules must be a list of module paths, got the string {layer_modules!r}")
        if not isinstance(freeze_until, str | None) and not 0 < freeze_until <= 1:
            raise ArgumentError(f"freeze_until must be a module path or a share in (0, 1], got {freeze_until!r}")
        self.freeze_until = freeze_until
        self.allow_untested = allow_untested
        self.freezer: Freezer | None = None
        self.events: list[FreezingEvent] = []
        self.ranks = Ranks()
        self.learning_rate = math.nan
        self.notices = Notices("freezing")
        self._named_layer_modules = None if layer_modules is None else list(layer_modules)
        self._stage = Stage.IDLE
        self._fitting: bool | None = None  # whether the Trainer was set up for `fit` last; None: never set up
        self._search = LayerSearch(self.ranks, self.notices, self._named_layer_modules, freeze_until)
        self._own_observers: list[Observer] = []
        self._bar_entry: BarEntry | None = None
        self._restored: dict[str, Any] | None = None  # loaded state, before training starts
        self._final: dict[str, Any] | None = None  # state at the end of `fit`

    def choose_depth(self, step: int) -> Decision | None:
        """Return a decision, or None to keep the depth. Called after each optimizer step, on every rank.

        All ranks must return the same decision. Send rank 0's with ``self.ranks.share(...)`` if they may differ.

        Args:
            step: number of optimizer steps so far.
        """
        return None

    def start_method(
        self, trainer: pl.Trainer, freezer: Freezer, gathered: Mapping[str, Tensor] | None, state: Any
    ) -> Sequence[Observer]:
        """Start the method and return its observers; none by default.

        Args:
            trainer: the Trainer.
            freezer: freezer of the model, at the depth of the checkpoint if the run resumes.
            gathered: weights that FSDP2 gathered in the first step, by name; None without FSDP2.
            state: output of `method_state` from the checkpoint; None without a checkpoint.
        """
        return ()

    def stop_method(self) -> None:
        """Stop the method: `fit` is over, or the layer chain has to be found again. Does nothing by default."""

    def method_state(self) -> dict[str, Any]:
        """Return the state of the method for a checkpoint, in plain types and tensors; empty by default."""
        return {}

    def will_compare(self, batches_ahead: int) -> bool:
        """Whether the method needs the input of the batch ``batches_ahead`` after the last; False by default."""
        return False

    @property
    def layer_modules(self) -> list[str]:
        """Names of the layer modules, front to back; empty before the first training step."""
        return list(self.freezer.chain.names) if self.freezer is not None else []

    @property
    def frozen_depth(self) -> int:
        """Number of frozen layer modules, now or when `fit` ended."""
        return self.events[-1].depth if self.events else 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an unsupported strategy."""
        again, self._fitting = self._fitting is not None, stage == "fit"
        if not self._fitting:
            return
        if again:
            # Drop the state of an earlier fit, or of the tuner, which saves and loads before `on_fit_start`. Lightning
            # reads a checkpoint to resume from after this.
            self._close()
            self.freezer = self._final = self._restored = None
            self.events = []
        check_strategy(trainer, self.allow_untested)
        self.ranks = Ranks(trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the search for layer modules, and refuse LBFGS.

        Raises:
            UnsupportedError: if an optimizer is LBFGS.
        """
        self.notices = Notices("freezing")
        self._search = LayerSearch(self.ranks, self.notices, self._named_layer_modules, self.freeze_until)
        self._stage = Stage.IDLE if getattr(trainer, "fast_dev_run", False) else Stage.LOOKING
        if self._stage is Stage.LOOKING and any(isinstance(one, torch.optim.LBFGS) for one in trainer.optimizers):
            raise UnsupportedError(
                "LBFGS keeps moving frozen weights along the directions it remembers. Use an optimizer that skips "
                "parameters without a gradient, such as SGD, Adam or AdamW"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the frozen prefix from the checkpoint, now that the optimizers exist."""
        state = self._restored
        if self._stage is Stage.IDLE or state is None or state["chain"] is None:
            self._restored, self.events = None, []
            return
        self._search.trainable.note(pl_module)
        with checkpoint_read():
            chain = LayerChain.from_state(state["chain"])
            self._search.check_restored(chain, state["layer_modules"])
            limit = depth_limit(chain, self.freeze_until)
        self._start(trainer, pl_module, dataclasses.replace(chain, max_depth=limit), state)
        self._restored = None  # not earlier: a checkpoint on an exception stores it

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the first step to find the layer chain."""
        if self._stage is not Stage.IDLE and getattr(trainer.fit_loop, "_skip_backward", False):
            # Stochastic weight averaging has finished training and recomputes all running statistics; frozen modules
            # would keep theirs.
            self._close()
        if batch_idx == 0 and self._stage is Stage.WAITING:
            self._stage = Stage.LOOKING  # only a step can show whether more parameters train by now
        if batch_idx == 0 and self._stage is Stage.READY:
            self._start_over_if_more_learns(pl_module)
        self.learning_rate = self._search.trainable.learning_rate(trainer.optimizers)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._stage is Stage.LOOKING:
            self._search.start(pl_module)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Find the layer chain after the first forward."""
        if self._search.is_looking:
            chain = self._search.chain(pl_module, loss, trainer.optimizers)
            self._stage = Stage.WAITING
            if chain is not None:
                self._start(trainer, pl_module, chain, None)
        super().on_before_backward(trainer, pl_module, loss)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Freeze or unfreeze to the depth of `choose_depth`."""
        # A skipped step has no backward; the search observes the next one instead.
        unseen = self._search.stop() and trainer.global_step > self._steps_before
        if unseen and not pl_module.automatic_optimization:
            self._stage = Stage.IDLE
            self.notices.warn(
                "an optimizer step was taken without a backward pass the callback could see, so nothing will freeze. "
                "With manual optimization, call self.manual_backward(loss) instead of loss.backward()"
            )
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def before_optimizer_step_observers(self, trainer: pl.Trainer) -> None:
        """Call `choose_depth` and apply the decision."""
        if self.freezer is None or self._stage is not Stage.READY:
            return
        self.freezer.step = trainer.global_step
        decision = self.choose_depth(trainer.global_step)
        event = self.freezer.freeze_to(decision.depth, decision.reason) if decision is not None else None
        if event is not None:
            self.report(event)

    def report(self, event: FreezingEvent) -> None:
        """Log a freeze or unfreeze."""
        log_line(event.describe(self.layer_modules))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop observing the first step if its batch has no end."""
        self._search.stop()
        super().on_train_epoch_end(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if there were no training batches."""
        no_batches = trainer.num_training_batches == 0 or trainer.limit_train_batches == 0
        if self._stage is not Stage.IDLE and no_batches:
            self.notices.warn(
                "there are no training batches. The train dataloader is empty, or limit_train_batches leaves none"
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Unfreeze everything and restore the user's settings."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return layer chain, frozen prefix, events and the state of the method, in plain types and tensors.

        Before training starts, this is the loaded state; after `fit`, the state at its end.
        """
        kept = self._restored or self._final
        if kept is not None:
            return kept
        freezer = self.freezer
        return {
            "version": STATE_VERSION,
            "chain": freezer.chain.to_state() if freezer is not None else None,
            "layer_modules": self._named_layer_modules,
            "prefix": freezer.prefix.state_dict() if freezer is not None else None,
            "method": self.method_state() if freezer is not None else None,
            "events": [vars(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts, because freezing needs the optimizers.

        Lightning also calls this to validate, test and predict with a checkpoint; then it does nothing.

        Raises:
            CheckpointError: if another version of this class wrote the checkpoint, or it is damaged.
        """
        if self._fitting is False:
            return
        if state_dict.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint holds freezing state of version {state_dict.get('version')!r}, expected version "
                f"{STATE_VERSION}. Leave out ckpt_path, or use the lightning_egeria that wrote it"
            )
        self._restored = state_dict
        with checkpoint_read():
            self.events = [FreezingEvent(**event) for event in state_dict["events"]]

    def _start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        chain: LayerChain,
        state: dict[str, Any] | None,
    ) -> None:
        freezer = Freezer(pl_module, chain, self.ranks, trainer.strategy, self.events, trainer.global_step)
        freezer.prefix.check_fits()
        self._search.trainable.follow(chain.prefix_parameters(len(chain))[0], trainer.optimizers)
        self.freezer, self._stage = freezer, Stage.STARTING  # from here on, `on_exception` cleans up
        self.observers.add(freezer, position=0)
        self._bar_entry = BarEntry(trainer, "frozen", lambda: f"{freezer.depth}/{len(chain)}")
        with checkpoint_read():
            less = freezer.load_state_dict(state["prefix"]) if state is not None else None
        before = state["method"] if state is not None else None
        self._own_observers = [freezer, *self.start_method(trainer, freezer, self._search.gathered, before)]
        for observer in self._own_observers[1:]:
            self.observers.add(observer)
        self._stage = Stage.READY
        if less is not None:
            self.report(less)

    def _start_over_if_more_learns(self, pl_module: pl.LightningModule) -> None:
        """Find the layer chain again if more parameters are trainable, as when a callback releases a backbone."""
        new, freezer = self._search.trainable.new_in(pl_module), self.freezer
        if not new or freezer is None:
            return
        self.notices.warn(
            f"parameters started training after the layer modules were found: {first_of(new)}. Everything is unfrozen, "
            "and the layer modules are found again"
        )
        freezer.freeze_to(0, "more parameters started training")
        self._close()
        self._stage, self.freezer, self._final = Stage.LOOKING, None, None
        freezer.update_reducer()  # even if nothing was frozen: DDP does not know the new parameters

    def _close(self) -> None:
        """Unfreeze everything and restore the user's settings. Safe to call twice."""
        self._search.stop()
        stage, self._stage = self._stage, Stage.IDLE
        self.observers.abort()
        if self._bar_entry is not None:
            self._bar_entry.remove()
        if self.freezer is None or stage not in (Stage.STARTING, Stage.READY):
            return
        try:
            if stage is Stage.READY:
                self._final = self.state_dict()  # before closing drops it
        finally:
            self.stop_method()
            for observer in (self.freezer, *self._own_observers):
                self.observers.remove(observer)
            self._own_observers = []  # they may hold the Trainer, which cannot be copied
            self.freezer.close()


def freezing_of(trainer: Any) -> PrefixFreezing | None:
    """Return the Trainer's callback that freezes; None if there is none."""
    return next((c for c in getattr(trainer, "callbacks", []) if isinstance(c, PrefixFreezing)), None)
