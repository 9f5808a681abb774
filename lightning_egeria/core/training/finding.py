"""The base of every callback that works on the layer chain: it finds the chain in the first training step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.limits import depth_limit
from lightning_egeria.core.training.checkpoints import check_version, checkpoint_read
from lightning_egeria.core.training.freezer import tell_what_trains
from lightning_egeria.core.training.methods import check_combination, methods_of
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.observers import ObserverCallback
from lightning_egeria.core.training.search import LayerSearch
from lightning_egeria.errors import ArgumentError, first_of
from lightning_egeria.upstream.checks import check
from lightning_egeria.upstream.lightning import only_recomputes_statistics

STATE_VERSION = 1


class Stage(enum.Enum):
    """Stage of a `LayerFinding`."""

    IDLE = "idle"  # outside `fit`, or in a `fit` without the method
    LOOKING = "looking"  # the next training step shows the layer chain
    WAITING = "waiting"  # too few layer modules are trainable; looks again at the start of the next epoch
    STARTING = "starting"  # there is a chain, and the method starts
    READY = "ready"  # the method runs


# The stages that may follow each one, and why. IDLE may follow any: `fit` ends, or fails. `LayerFinding._enter` is the
# only way into a stage, so what a transition brings with it does not depend on how it came about.
TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    Stage.IDLE: {Stage.LOOKING: "fit starts"},
    Stage.LOOKING: {
        Stage.LOOKING: "more parameters train",
        Stage.WAITING: "too few layer modules train, in the step or in the checkpoint",
        Stage.STARTING: "the chain of the step, of the checkpoint, or of another callback",
    },
    Stage.WAITING: {Stage.LOOKING: "an epoch begins, or more parameters train"},
    Stage.STARTING: {Stage.READY: "the method has started"},
    Stage.READY: {Stage.LOOKING: "more parameters train, or another callback has found another chain"},
}


class LayerFinding(ObserverCallback):
    """Base of callbacks that work on the layer chain. Override `chain_found`, `chain_released` and `own_state`.

    The callback finds the layer modules in the first training step, or takes them from the checkpoint, and calls
    `chain_found`. It calls `chain_released` when `fit` ends, after an error, and before it finds the chain again.

    Args:
        topic: first word of each message, and name of the state in messages about checkpoints.
        layer_modules: paths of the layer modules, in execution order; None finds them.
        freeze_until: limit of the prefix, as for `PrefixFreezing`.

    Attributes:
        chain: the layer modules; None before the first training step.
        ranks: the processes of the job.
        notices: takes log lines and warnings.

    Raises:
        ArgumentError: if ``layer_modules`` is a string.
    """

    def __init__(
        self, topic: str, layer_modules: Sequence[str] | None = None, freeze_until: str | float | None = None
    ) -> None:
        super().__init__()
        if isinstance(layer_modules, str):
            raise ArgumentError(f"layer_modules must be a list of module paths, got the string {layer_modules!r}")
        self.freeze_until = freeze_until
        self.chain: LayerChain | None = None
        self.ranks = Ranks()
        self.notices = Notices(topic)
        self._topic = topic
        self._named_layer_modules = None if layer_modules is None else list(layer_modules)
        self._stage = Stage.IDLE
        self._fitting: bool | None = None  # whether the Trainer was set up for `fit` last; None: never set up
        self._search = LayerSearch(self.ranks, self.notices, self._named_layer_modules, freeze_until)
        self._restored: dict[str, Any] | None = None  # loaded state, before training starts
        self._final: dict[str, Any] | None = None  # state at the end of `fit`
        self._followed: LayerChain | None = None  # of `chain_source`, when it was last looked at

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer that the method does not support: by default, one with other methods that it excludes."""
        check_combination(methods_of(trainer))

    def chain_found(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, state: dict[str, Any] | None
    ) -> None:
        """Start the method. After an error in it, `chain_released` is called too.

        Args:
            trainer: the Trainer.
            pl_module: the model.
            chain: its layer chain.
            state: `state_dict` from the checkpoint; None without a checkpoint.
        """
        raise NotImplementedError

    def chain_released(self) -> None:
        """Stop the method and restore the user's settings."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """Return what `state_dict` holds beside the layer chain, in plain types and tensors."""
        raise NotImplementedError

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take from a loaded state what must be known before training starts. Does nothing by default."""

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        self.chain = self._final = self._restored = self._followed = None

    def chain_source(self, trainer: pl.Trainer) -> LayerFinding | None:
        """Return the callback whose layer chain this one takes instead of finding it; None by default."""
        return None

    @property
    def follows(self) -> bool:
        """Whether the layer chain is that of another callback."""
        return self._followed is not None

    @property
    def is_searching(self) -> bool:
        """Whether the next step is observed to find the layer chain."""
        return self._stage is Stage.LOOKING

    @property
    def is_active(self) -> bool:
        """Whether this `fit` uses the method."""
        return self._stage is not Stage.IDLE

    def start_over(self) -> None:
        """Stop the method and find the layer chain again."""
        self._enter(Stage.LOOKING)
        self.chain = self._final = None

    def chain_outdated(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """The model contradicts the chain of a checkpoint, which is not used. Does nothing by default."""

    @property
    def layer_modules(self) -> list[str]:
        """Names of the layer modules, front to back; empty before the first training step."""
        return list(self.chain.names) if self.chain is not None else []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an unsupported Trainer."""
        again, self._fitting = self._fitting is not None, stage == "fit"
        if not self._fitting:
            return
        if again:
            # Drop the state of an earlier fit, or of the tuner, which saves and loads before `on_fit_start`. Lightning
            # reads a checkpoint to resume from after this.
            self._close()
            self.forget_fit()
        self.check_trainer(trainer)
        check(trainer)
        self.ranks = Ranks(trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the search for layer modules."""
        self.notices = Notices(self._topic)
        self._search = LayerSearch(self.ranks, self.notices, self._named_layer_modules, self.freeze_until)
        if not getattr(trainer, "fast_dev_run", False):
            self._enter(Stage.LOOKING)
        self._search.trainable.note(pl_module)  # as the strategy has just wrapped it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the checkpoint, now that the optimizers exist."""
        state = self._restored
        if self._stage is Stage.IDLE or state is None:
            self.forget_fit()
            return
        with checkpoint_read(self._topic):
            chain = None if state["chain"] is None else LayerChain.from_state(state["chain"])
            trained = list(state["trained"]) if "trained" in state else None
        if released := released_again(trainer, pl_module, trained or ()):
            self.notices.warn(
                f"when the run resumed, a callback froze {first_of(released)}, which trained when the checkpoint was "
                "written. They continue to train, as in a run without interruption"
            )
            tell_what_trains(trainer.strategy)
        self._search.trainable.note(pl_module)
        if chain is not None and (change := chain.contradiction(pl_module, trained)) is not None:
            self.notices.warn(
                f"the layer chain in the checkpoint differs from the model's: {change}. Everything trains now, and the "
                "layer modules are found again"
            )
            self.chain_outdated(trainer, state)
        elif chain is not None:
            self._search.check_restored(chain, state["layer_modules"])
            limit = depth_limit(chain, self.freeze_until)
            self._start(trainer, pl_module, dataclasses.replace(chain, max_depth=limit), state)
            # A callback may hold back what did not train, when the epoch begins; else it is noticed in the first step.
            self._search.trainable.note(pl_module, trained)
        elif state.get("waiting", False):
            self._enter(Stage.WAITING)
        self._restored = None  # not earlier: a checkpoint on an exception stores it

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the first step to find the layer chain."""
        if self._stage is not Stage.IDLE and only_recomputes_statistics(trainer):
            # Stochastic weight averaging has finished training and recomputes all running statistics; frozen modules
            # would keep theirs.
            self._close()
        if self._stage is not Stage.IDLE and batch_idx % trainer.accumulate_grad_batches == 0:
            self._follow_what_trains(trainer, pl_module, thoroughly=batch_idx == 0)
        if batch_idx == 0 and self._stage is Stage.WAITING:
            self._enter(Stage.LOOKING)  # only a step can show whether more layer modules train by now
        source = self.chain_source(trainer) if self._stage is not Stage.IDLE else None
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if source is not None:
            self._follow(trainer, pl_module, source)
        elif self._stage is Stage.LOOKING:
            self._search.start(pl_module)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Find the layer chain after the first forward."""
        if self._search.is_looking:
            chain = self._search.chain(pl_module, loss, trainer.optimizers)
            if chain is not None:
                self._start(trainer, pl_module, chain, None)
            else:
                self._enter(Stage.WAITING)
        super().on_before_backward(trainer, pl_module, loss)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the search of a step without backward; it observes the next one instead."""
        self._search.stop()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

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
        """Stop the method and restore the user's settings."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return layer chain and state of the method, in plain types and tensors.

        Before training starts, this is the loaded state; after `fit`, the state at its end.
        """
        kept = self._restored or self._final
        if kept is not None:
            return kept
        return {
            "version": STATE_VERSION,
            "chain": self.chain.to_state() if self.chain is not None else None,
            "layer_modules": self._named_layer_modules,
            "trained": self.trained_names(),
            "waiting": self._stage is Stage.WAITING,
            **self.own_state(),
        }

    def trained_names(self) -> list[str]:
        """Return the names of the parameters that train, where this method lets them."""
        return self._search.trainable.names()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts, because the method needs the optimizers.

        Lightning also calls this to validate, test and predict with a checkpoint; then it does nothing.

        Raises:
            CheckpointError: if another version of this class wrote the checkpoint, or it is damaged.
        """
        if self._fitting is False:
            return
        check_version(state_dict, STATE_VERSION, self._topic)
        self._restored = state_dict
        with checkpoint_read(self._topic):
            self.read_own_state(state_dict)

    def _start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, state: dict[str, Any] | None
    ) -> None:
        self.chain = chain
        self._enter(Stage.STARTING)  # from here on, `on_exception` cleans up
        self.chain_found(trainer, pl_module, chain, state)
        self._enter(Stage.READY)

    def _follow(self, trainer: pl.Trainer, pl_module: pl.LightningModule, source: LayerFinding) -> None:
        """Start with the layer chain of another callback, or start over if that has found another one."""
        chain = source.chain if source._stage is Stage.READY else None
        if chain is None or chain is self._followed:
            return
        self._followed = chain
        if self.chain is not None and self.chain.names == chain.names:
            return
        if self.chain is not None:
            self.start_over()
        self._search.trainable.note(pl_module)
        self._start(trainer, pl_module, chain, None)

    def _follow_what_trains(self, trainer: pl.Trainer, pl_module: pl.LightningModule, thoroughly: bool) -> None:
        """Find the layer chain again if more parameters train, as when a callback releases a backbone.

        Args:
            trainer: the Trainer.
            pl_module: the model, between two optimizer steps.
            thoroughly: whether to look also for parameters that are new in the model.
        """
        if not (thoroughly or self._search.trainable.has_new()):
            return
        known = set(self.chain.prefix_parameters(len(self.chain))) if self.chain is not None else set()
        new = [name for name in self._search.trainable.new_in(pl_module) if name not in known]  # a frozen one is known
        if not new:
            return
        if self.chain is not None:
            self.notices.warn(
                f"parameters started training after the layer modules were found: {first_of(new)}. Everything trains "
                "now, and the layer modules are found again"
            )
        self.start_over()
        self._search.trainable.note(pl_module)
        if self.chain_source(trainer) is None:  # which has done it
            tell_what_trains(trainer.strategy)

    def _enter(self, stage: Stage) -> None:
        """Go to a stage; the only way into one. A transition that leaves a chain stops the method that uses it."""
        before = self._stage
        assert stage is Stage.IDLE or stage in TRANSITIONS[before], f"{before} -> {stage}"
        try:
            if before in (Stage.LOOKING, Stage.WAITING, Stage.READY) and stage is Stage.IDLE:
                self._final = self.state_dict()  # before `chain_released` drops it
        finally:
            self._stage = stage
            if before is Stage.LOOKING:
                self._search.stop()
            if before in (Stage.STARTING, Stage.READY) and stage is not Stage.READY:
                self.observers.abort()
                self.chain_released()

    def _close(self) -> None:
        """Stop the method and restore the user's settings. Safe to call twice."""
        self._search.stop()
        self.observers.abort()
        self._enter(Stage.IDLE)


def released_again(trainer: Any, module: nn.Module, trained: Iterable[str]) -> list[str]:
    """Let parameters train again that Lightning's ``BaseFinetuning`` froze when a run resumed; return their names.

    It freezes in ``setup`` and releases in one epoch, so a run that resumes behind that epoch would train them no more
    (Lightning issue 21901).

    Args:
        trainer: the Trainer, with the optimizers of the checkpoint.
        module: the model.
        trained: names of the parameters that trained when the checkpoint was written.
    """
    kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    if "BaseFinetuning" not in kinds:  # `lightning` and `pytorch_lightning` have a class each
        return []
    stepped = {one for optimizer in trainer.optimizers for group in optimizer.param_groups for one in group["params"]}
    parameters, found = dict(module.named_parameters()), []
    for name in trained:
        if name in parameters and not parameters[name].requires_grad and parameters[name] in stepped:
            parameters[name].requires_grad_(True)
            owner = module.get_submodule(name.rpartition(".")[0])
            if hasattr(owner, "track_running_stats"):
                owner.track_running_stats = True  # type: ignore[assignment]  # as the callback does when it releases batch normalisation
            found.append(name)
    return found
