"""The base of every callback that freezes: it owns the freezer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.modes import effect_of_evaluation
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.finding import LayerFinding, Stage
from lightning_egeria.core.training.freezer import Decision, Freezer, FreezingEvent
from lightning_egeria.core.training.methods import FREEZING, Method
from lightning_egeria.core.training.metrics_log import MetricsLog, metrics_of
from lightning_egeria.core.training.notices import log_line
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.core.training.progress import BarEntry
from lightning_egeria.core.training.saving import SavesUnder, check_has_frozen, state_of
from lightning_egeria.core.training.support import check_optimizers, check_setup
from lightning_egeria.errors import ArgumentError


class PrefixFreezing(LayerFinding):
    """Base of callbacks that freeze the front of a network. Override `choose_depth`.

    The callback finds the layer modules in the first training step and creates `freezer`. From then on it calls
    `choose_depth` after each optimizer step, and freezes or unfreezes to the returned depth.

    Args:
        layer_modules: paths of the layer modules, in execution order; None finds them.
        freeze_until: limit of the prefix. A path: up to and including that module. A number in [0, 1]: that share of
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

    egeria_method: Method = FREEZING
    measures_plasticity = False  # whether `latest_plasticity` is overridden

    def __init__(
        self,
        layer_modules: Sequence[str] | None = None,
        freeze_until: str | float | None = None,
        allow_untested: bool = False,
    ) -> None:
        super().__init__(self.egeria_method.label, layer_modules, freeze_until)
        if not isinstance(freeze_until, str | None) and not 0 <= freeze_until <= 1:
            raise ArgumentError(f"freeze_until must be a module path or a share in [0, 1], got {freeze_until!r}")
        self.allow_untested = allow_untested
        self.freezer: Freezer | None = None
        self.events: list[FreezingEvent] = []
        self.learning_rate = math.nan
        self._own_observers: list[Observer] = []
        self._bar_entry: BarEntry | None = None
        self._saves: SavesUnder | None = None
        self._gave_up = False
        self._compares = False  # frozen weights, after the next optimizer step

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

    def metrics(self) -> dict[str, float]:
        """Return what the loggers get at each change of depth: what is frozen, and what ranks exchange."""
        return metrics_of(self.freezer) if self.freezer is not None else {}

    def metrics_news(self) -> tuple[int, ...]:
        """Return numbers that differ when there are new `metrics`: by default, the number of changes of depth."""
        return (len(self.events),)

    @property
    def latest_plasticity(self) -> tuple[int, Sequence[float]] | None:
        """Step and plasticity of each layer module, as measured last on rank 0; None before, and on other ranks."""
        return None

    @property
    def frozen_depth(self) -> int:
        """Number of frozen layer modules, now or when `fit` ended."""
        return self.events[-1].depth if self.events else 0

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse what the method declares."""
        check_setup(trainer, self.egeria_method, self.allow_untested)

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        super().forget_fit()
        self.freezer, self.events, self._gave_up = None, [], False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the search for layer modules, and refuse LBFGS.

        Raises:
            UnsupportedError: if an optimizer is LBFGS.
        """
        super().on_fit_start(trainer, pl_module)
        if self._stage is Stage.LOOKING:
            check_optimizers(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the learning rate of the step."""
        self.learning_rate = self._search.trainable.learning_rate(trainer.optimizers)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Frozen parameters show that they are frozen."""
        if self.freezer is not None:
            self.freezer.prefix.hide()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Frozen parameters show that they are frozen, and frozen modules have their mode."""
        if self.freezer is not None and trainer.state.fn == "fit":
            self.freezer.prefix.hide()
            self.freezer.prefix.assert_modes()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Behind the last batch, do the same as `on_validation_epoch_end`, for callbacks in front of this one."""
        counts = trainer.num_val_batches
        if dataloader_idx + 1 == len(counts) and batch_idx + 1 == counts[-1]:
            self._show()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hooks of the user that save or count what trains find all that they have not frozen themselves."""
        self._show()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """If the epoch continues, show that frozen parameters are frozen before any callback sees the next batch."""
        if self.freezer is not None and trainer.state.fn == "fit" and not trainer.is_last_batch:
            self.freezer.prefix.hide()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do the same as `on_validation_epoch_end`; frozen weights are compared after the next step."""
        super().on_train_epoch_end(trainer, pl_module)
        self._compares = True
        self._show()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do the same as `on_validation_epoch_end`."""
        self._show()

    def _show(self) -> None:
        if self.freezer is not None and self._stage is Stage.READY:
            self.freezer.prefix.show()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint without the weights of what was frozen.

        Raises:
            CheckpointError: if it lacks some.
        """
        state = state_of(checkpoint, self.state_key)
        weights = checkpoint.get("state_dict")
        if self._fitting and state and state.get("chain") and isinstance(weights, Mapping):
            with checkpoint_read():
                chain, depth = LayerChain.from_state(state["chain"]), state["prefix"]["depth"]
            check_has_frozen(weights, pl_module, chain, depth)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Freeze or unfreeze to the depth of `choose_depth`."""
        # A skipped step has no backward; the search observes the next one instead.
        unseen = self._search.stop() and trainer.global_step > self._steps_before
        if unseen and not pl_module.automatic_optimization:
            self._enter(Stage.IDLE)
            self.notices.warn(
                "an optimizer step was taken without a backward pass the callback could see, so nothing will freeze. "
                "With manual optimization, call self.manual_backward(loss) instead of loss.backward()"
            )
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.freezer is not None and self._stage is Stage.READY:
            self.chain = self.freezer.chain  # it may have been extended
            if trainer.is_last_batch or trainer.global_step == trainer.max_steps:
                self._show()

    def before_optimizer_step_observers(self, trainer: pl.Trainer) -> None:
        """Call `choose_depth` and apply the decision."""
        freezer = self.freezer
        if freezer is None or self._stage is not Stage.READY or self._gave_up:
            return
        freezer.step = trainer.global_step
        if freezer.depth and (found := freezer.moved(self.compares_weights(trainer.global_step))) is not None:
            name, by_optimizer = found
            if by_optimizer:
                self._give_up(trainer, name)
                return
            mover = f"{self._optimizers_of(trainer, name) or 'the optimizer'} or other code has moved it"
            self.notices.inform(f"{name!r} has changed although it is frozen: {mover}", once="changed")
        decision = self.choose_depth(trainer.global_step)
        if decision is not None:
            self.follow(decision)

    def compares_weights(self, step: int) -> bool:
        """Whether frozen weights are compared with what they were when this was true last.

        By default that is once an epoch. All ranks must return the same.

        Args:
            step: number of optimizer steps so far.
        """
        due, self._compares = self._compares, False
        return due

    def _give_up(self, trainer: pl.Trainer, name: str) -> None:
        """Unfreeze everything for good: the frozen weights move all the same."""
        kinds = self._optimizers_of(trainer, name)
        mover = f"{kinds} moves" if kinds else "code that runs with the optimizer's step moves"
        self.notices.warn(
            f"{mover} {name!r}, which is frozen and has no gradient, as momentum and weight decay do where a missing "
            "gradient counts as zero. Everything is unfrozen, and nothing freezes from now on. Use an optimizer that "
            "skips parameters without a gradient, such as SGD, Adam or AdamW of torch"
        )
        self._gave_up = True
        self.follow(Decision(0, f"the frozen parameter {name!r} moved without a gradient"))
        self.stop_deciding()

    def _optimizers_of(self, trainer: pl.Trainer, name: str) -> str:
        """The classes of the optimizers that have a parameter; empty if none has."""
        parameters = dict(trainer.lightning_module.named_parameters())
        has = (
            type(optimizer).__name__
            for optimizer in trainer.optimizers
            if any(parameters.get(name) is one for group in optimizer.param_groups for one in group["params"])
        )
        return " and ".join(has)

    def stop_deciding(self) -> None:
        """`choose_depth` is not called any more in this `fit`. Does nothing by default."""

    def follow(self, decision: Decision) -> bool:
        """Freeze or unfreeze as decided; return whether something changed."""
        assert self.freezer is not None  # or there would be no decision
        event = self.freezer.freeze_to(decision.depth, decision.reason)
        if event is not None:
            self._search.trainable.note(self.freezer.prefix.module)  # what trains is what DDP knows now
            self.report(event)
            self._tell_of_modes()
        return event is not None

    def _tell_of_modes(self) -> None:
        assert self.freezer is not None  # something is frozen
        prefix = self.freezer.prefix
        text = effect_of_evaluation(prefix.module, prefix.chain.members(prefix.depth))
        if text is not None:
            self.notices.inform(text, once="modes")

    def report(self, event: FreezingEvent) -> None:
        """Log a freeze or unfreeze."""
        log_line(event.describe(self.layer_modules))

    def chain_found(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, state: dict[str, Any] | None
    ) -> None:
        """Create the freezer and start the method."""
        strategy, step = trainer.strategy, trainer.global_step
        freezer = Freezer(pl_module, chain, self.ranks, strategy, self.events, step, self.notices)
        self.freezer = freezer
        self.observers.add(freezer, position=0)
        self._saves = SavesUnder(trainer, freezer.prefix.shown)
        self._search.trainable.follow(chain.prefix_parameters(len(chain))[0], trainer.optimizers)
        self.learning_rate = self._search.trainable.learning_rate(trainer.optimizers)  # it was another group's
        self._bar_entry = BarEntry(trainer, "frozen", lambda: f"{freezer.depth}/{len(chain)}")
        with checkpoint_read():
            less = freezer.load_state_dict(state["prefix"]) if state is not None else None
        before = state["method"] if state is not None else None
        own = self.start_method(trainer, freezer, self._search.gathered, before)
        self._own_observers = [freezer, *own, MetricsLog(trainer, self.metrics, self.metrics_news)]
        for observer in self._own_observers[1:]:
            self.observers.add(observer)
        if state is not None and freezer.depth:
            last = chain.names[freezer.depth - 1]
            frozen = f"{freezer.depth} of {len(chain)} layer modules are frozen again, up to {last!r}"
            self.notices.inform(f"resumed at step {step}: {frozen}")
        if less is not None:
            self.report(less)
        self._tell_of_modes()

    def start_over(self) -> None:
        """Unfreeze everything and find the layer chain again."""
        if self.freezer is not None:
            self.freezer.freeze_to(0, "more parameters started training")
        super().start_over()
        self.freezer = None

    def chain_outdated(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """Note that what was frozen is no longer."""
        if self.frozen_depth:
            reason = "the checkpoint has another layer chain than the model"
            self.events.append(FreezingEvent(trainer.global_step, "unfreeze", 0, reason))

    def chain_released(self) -> None:
        """Unfreeze everything and restore the user's settings."""
        if self._bar_entry is not None:
            self._bar_entry.remove()
        if self._saves is not None:
            self._saves.stop()
            self._saves = None
        if self.freezer is None:
            return
        self.stop_method()
        for observer in (self.freezer, *self._own_observers):
            self.observers.remove(observer)
        self._own_observers = []  # they may hold the Trainer, which cannot be copied
        self.freezer.close()

    def own_state(self) -> dict[str, Any]:
        """Return frozen prefix, events and the state of the method."""
        freezer = self.freezer
        return {
            "prefix": freezer.prefix.state_dict() if freezer is not None else None,
            "method": self.method_state() if freezer is not None else None,
            "events": [vars(event) for event in self.events],
            "gave_up": self._gave_up,
        }

    def trained_names(self) -> list[str]:
        """Return the names of the parameters that train, or would without the freezes of this callback."""
        names = dict.fromkeys(super().trained_names())
        if self.freezer is not None:
            names.update(dict.fromkeys(self.freezer.chain.prefix_parameters(self.freezer.depth)))
        return list(names)

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take the events."""
        self.events = [FreezingEvent(**event) for event in state["events"]]
        self._gave_up = bool(state.get("gave_up", False))


def freezing_of(trainer: Any) -> PrefixFreezing | None:
    """Return the Trainer's callback that freezes; None if there is none."""
    return next((c for c in getattr(trainer, "callbacks", []) if isinstance(c, PrefixFreezing)), None)
