"""The Lightning callback. It only translates hooks; the engine decides."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import Tensor

from lightning_egeria.bars import BarEntry
from lightning_egeria.errors import (
    ArgumentError,
    CheckpointError,
    TooFewLayersError,
    UnsupportedError,
)
from lightning_egeria.freezing.display import log_metrics, tell_event, tell_messages
from lightning_egeria.freezing.engine import FreezingEngine, FreezingEvent, LastEvaluation
from lightning_egeria.freezing.first_step import FirstStep
from lightning_egeria.freezing.learners import Learners, without_part_in
from lightning_egeria.freezing.limits import depth_limit, find_chain, that_learn
from lightning_egeria.freezing.policy import FreezingPolicy, Policy, checkpoint_read
from lightning_egeria.freezing.pool import ReferencePool, idle_workers
from lightning_egeria.freezing.ranks import Ranks, prefix_buffers
from lightning_egeria.freezing.reference import Precision, ReferenceModel
from lightning_egeria.freezing.strategies import check_strategy, prefix_changed
from lightning_egeria.freezing.summary import summarize
from lightning_egeria.layers import FrozenPrefix, LayerChain, StepListener
from lightning_egeria.report import Savings, savings_table

STATE_VERSION = 6
EVALUATIONS_PER_RUN = 50  # bounds the evaluations' cost by that many forwards, however long the run
EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN = 100
LEAST_STEPS_BETWEEN_EVALUATIONS = 8  # in fewer, whatever learns hardly moves either


class KnowledgeGuidedFreezing(pl.Callback):
    """Freezes the front of the model as soon as comparison with a reference model shows that it has converged.

    Nothing about the model is to be told: the first training step shows its layer modules. Until something freezes the
    parameters are bit for bit those of a run without the callback.

    Args:
        policy: decides when; `FreezingPolicy()` if None. It is copied at each start of `fit`.
        layer_modules: paths of the layer modules in execution order; None finds them.
        evaluate_every_n_steps: optimizer steps between evaluations; None takes a fiftieth of the whole run, at least 8.
            Plasticity is what changes in these steps: a shorter interval needs a smaller tolerance. A policy may do
            without for a while, as `FreezingPolicy` does while the learning rate is high.
        refresh_every_n_evaluations: after so many, the reference model takes over the weights of the moment, unless the
            policy holds on to it. More than one is for a `SlopePolicy`.
        evaluation_samples: how many samples of a batch are compared at most.
        reference_precision: of the reference model. ``"auto"`` measures which is fastest, or takes float32 in a
            deterministic run; a precision whose noise would show in plasticity gives way to a higher one.
        workers: processes that run the reference; 0 runs it in the training thread, to the same result. None starts one
            where a core is idle beside training: on a GPU, or on fewer threads than there are cores. With more than
            one, an answer has as many evaluation intervals' time.
        threads_per_worker: cores that each of them may use.
        timeout_s: a worker that has not answered for so many seconds is ended and replaced.
        deterministic: wait for answers that are due instead of going on without them, so that two runs of one seed
            freeze at the same steps, and keep the weights of the reference in checkpoints. None asks the Trainer.
        max_frozen_fraction: share of the layer modules that may be frozen at most; in (0, 1].
        freeze_until: path of the last module that may freeze; None leaves it to the policy.
        never_freeze: paths of modules that never freeze, nor anything behind them; one that does not learn counts once
            it does.
        check_ranks: after every freeze and unfreeze, see that all processes of the job have the same prefix and the
            same parameters, and end training if they do not. Reads all weights; for the search for an error.
        allow_untested: train under a strategy that freezing was not tried with.

    Attributes:
        events: every freeze and unfreeze so far.
        step_listeners: are told of every freeze, unfreeze and training step.

    Raises:
        ArgumentError: an argument is out of its range.

    """

    def __init__(
        self,
        policy: Policy | None = None,
        layer_modules: Sequence[str] | None = None,
        evaluate_every_n_steps: int | None = None,
        refresh_every_n_evaluations: int = 1,
        evaluation_samples: int = 32,
        reference_precision: Precision = "auto",
        workers: int | None = None,
        threads_per_worker: int = 1,
        timeout_s: float = 120.0,
        deterministic: bool | None = None,
        max_frozen_fraction: float = 1.0,
        freeze_until: str | None = None,
        never_freeze: Sequence[str] = (),
        check_ranks: bool = False,
        allow_untested: bool = False,
    ) -> None:
        for name, value, least in (
            ("evaluate_every_n_steps", 1 if evaluate_every_n_steps is None else evaluate_every_n_steps, 1),
            ("refresh_every_n_evaluations", refresh_every_n_evaluations, 1),
            ("evaluation_samples", evaluation_samples, 2),
            ("workers", 0 if workers is None else workers, 0),
            ("threads_per_worker", threads_per_worker, 1),
        ):
            if value < least:
                raise ArgumentError(f"{name} must be at least {least}, got {value}")
        for name, names in (("layer_modules", layer_modules), ("never_freeze", never_freeze)):
            if isinstance(names, str):
                raise ArgumentError(f"{name} must be a list of names, got the single text {names!r}")
        if reference_precision not in get_args(Precision):
            raise ArgumentError(
                f"reference_precision must be one of {get_args(Precision)}, got {reference_precision!r}"
            )
        if not timeout_s > 0:
            raise ArgumentError(f"timeout_s must be greater than 0, got {timeout_s}")
        if not 0 < max_frozen_fraction <= 1:
            raise ArgumentError(f"max_frozen_fraction must be in (0, 1], got {max_frozen_fraction}")
        self.policy = policy
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.refresh_every_n_evaluations = refresh_every_n_evaluations
        self.evaluation_samples = evaluation_samples
        self.reference_precision = reference_precision
        self.workers = workers
        self.threads_per_worker = threads_per_worker
        self.timeout_s = timeout_s
        self.deterministic = deterministic
        self.max_frozen_fraction = max_frozen_fraction
        self.freeze_until = freeze_until
        self.never_freeze = list(never_freeze)
        self.check_ranks = check_ranks
        self.allow_untested = allow_untested
        self.events: list[FreezingEvent] = []
        self._named_layer_modules = None if layer_modules is None else list(layer_modules)
        self._chain: LayerChain | None = None
        self._engine: FreezingEngine | None = None
        self._first_step: FirstStep | None = None
        self._bar_entry: BarEntry | None = None
        self._ranks = Ranks()
        self._every = 0
        self._active = False
        self._waits = False
        self._idle = False  # too few layer modules learn, in this epoch
        self._told_too_few = False
        self._step_before = 0
        self._learning_rate = math.nan
        self.step_listeners: list[StepListener] = []
        self._accumulation = 1
        self._learners = Learners()
        self._restored: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None  # the state when a deterministic fit ended
        self._stage: str | None = None  # of the Trainer, as its last setup told it

    @property
    def layer_modules(self) -> list[str]:
        """Names of the layer modules in order; empty until the first training step has shown them."""
        return list(self._chain.names) if self._chain is not None else []

    @property
    def frozen_depth(self) -> int:
        """How many layer modules are frozen, or were when `fit` ended."""
        return self.events[-1].depth if self.events else 0

    @property
    def last_evaluation(self) -> LastEvaluation | None:
        """The newest comparison with the reference; None before the first, and on all ranks but the first."""
        return self._engine.last_evaluation if self._engine is not None else None

    def savings(self) -> Savings:
        """What freezing did to the last `fit`, so far.

        Raises:
            RuntimeError: no training step was done yet.
        """
        if self._chain is None or self._engine is None:
            raise RuntimeError("there are no savings to tell of before the first training step")
        return summarize(self._engine, self.events)

    def observes(self, batches_ahead: int) -> bool:
        """Whether the batch so many after the last one may be compared with the reference; see `PrefixOwner`."""
        return self._engine is not None and self._engine.observes(batches_ahead, self._accumulation)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what freezing was not made for, before anything is set up."""
        before, self._stage = self._stage, stage
        if stage == "fit":
            if before is not None:
                # What an earlier fit left, or the tuner loaded, which saves and loads before `on_fit_start`; a
                # checkpoint to resume from is read after this.
                self._close()
                self._chain = self._engine = self._kept = self._restored = None
                self.events = []
            check_strategy(trainer, self.allow_untested)
            self._ranks = Ranks(trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start anew."""
        self._learners = Learners()
        self._idle = self._told_too_few = False
        self._active = not getattr(trainer, "fast_dev_run", False)
        asked = torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic
        self._waits = asked
        if not self._active:
            return
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise UnsupportedError(
                "LBFGS goes on moving frozen weights, along the directions that it remembers; use an optimizer that "
                "leaves weights without a gradient alone, as all others of torch do"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze again what the checkpoint had frozen, now that the optimizers are there."""
        if self._active:
            self._every = self.evaluate_every_n_steps or _interval(trainer)
        restored = self._restored
        if not self._active or restored is None or restored["chain"] is None:
            self._restored, self.events = None, []
            return
        self._learners.note(pl_module)
        with checkpoint_read():
            chain = LayerChain.from_state(restored["chain"])
            limit = depth_limit(
                chain, self.max_frozen_fraction, self.freeze_until, that_learn(pl_module, self.never_freeze)
            )
            asked = self._named_layer_modules
            if asked not in (None, restored["layer_modules"], list(chain.names)):
                raise CheckpointError(
                    f"the checkpoint was written with the layer modules {list(chain.names)}, and layer_modules asks "
                    f"for {asked}: give it the same, or leave ckpt_path out to start anew"
                )
            chain = dataclasses.replace(chain, max_depth=limit)
        self._start_engine(trainer, pl_module, chain, restored)
        self._restored = None  # not before: a checkpoint that is written on an exception holds it
        if self.frozen_depth:
            self._prefix_changed(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the first step to find the layer chain, and every evaluation step to compare it."""
        for listener in self.step_listeners:
            listener.batch_begins(batch)
        if self._active and getattr(trainer.fit_loop, "_skip_backward", False):
            # Stochastic weight averaging is done with training and measures all statistics of normalisation anew, which
            # a frozen module would not do.
            self._active = False
            self._close()
        if not self._active:
            return
        if batch_idx == 0:
            self._idle = False  # more may have a part in the loss by now, which only a step can show
            if self._engine is not None:
                self._start_over_if_more_learns(trainer, pl_module)
        self._step_before = trainer.global_step
        self._learning_rate = self._learners.learning_rate(trainer.optimizers)
        if self._engine is not None:
            real = True
            for listener in self.step_listeners:
                real = listener.step_begins() and real
            self._accumulation = trainer.accumulate_grad_batches
            self._engine.begin_step(trainer.global_step, real)
            return
        if self._idle:
            return
        self._learners.note(pl_module)
        self._first_step = FirstStep(pl_module, self._ranks)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over: nothing is observed any longer."""
        if not self._active:
            return
        if self._first_step is not None:
            self._end_first_step(self._first_step, trainer, pl_module, loss)
        if self._engine is not None:
            self._engine.end_forward(loss)
        for listener in self.step_listeners:  # in the reverse order of their beginning: both replace forwards
            listener.forward_ended()

    def _end_first_step(
        self, first: FirstStep, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        find = functools.partial(
            find_chain,
            loss=loss,
            optimizers=trainer.optimizers,
            layer_modules=self._named_layer_modules,
            max_frozen_fraction=self.max_frozen_fraction,
            freeze_until=self.freeze_until,
            never_freeze=that_learn(pl_module, self.never_freeze),
        )
        try:
            chain = first.chain(find)
        except TooFewLayersError as error:
            fixed = without_part_in(loss, pl_module)
            if not fixed:
                raise
            if not self._told_too_few:
                rank_zero_warn(
                    f"freezing: {error}. {fixed[0]!r} and {len(fixed) - 1} more parameters do not learn yet; nothing "
                    "freezes until an epoch begins in which they do"
                )
            self._idle = self._told_too_few = True
        else:
            self._start_engine(trainer, pl_module, chain, None)
            for note in chain.notes:
                rank_zero_warn(f"freezing: {note}")
        self._first_step = None

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time."""
        if self._engine is not None:
            self._engine.end_backward(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Apply the decision that is due, ask for the next evaluation."""
        if not self._active:
            return
        if batch is None:
            return  # the data loader gave nothing; Lightning left the step out, and `on_train_batch_start` with it
        first = self._stop_first_step()
        if self._engine is None:
            # A step that was skipped has no backward; the next one is observed instead.
            stepped = trainer.global_step > self._step_before and not pl_module.automatic_optimization
            if first is not None and stepped:
                self._active = False
                rank_zero_warn(
                    "freezing: an optimizer step was done and no backward was seen before it, so nothing will freeze. "
                    "With manual optimization, call self.manual_backward(loss) instead of loss.backward()"
                )
            return
        self._engine.end_batch()
        for listener in self.step_listeners:
            listener.step_ended()
        if trainer.global_step > self._step_before:
            due = trainer.global_step >= self._engine.next_evaluation
            version = self._engine.prefix.version
            event = self._engine.end_step(trainer.global_step, self._learning_rate)
            if self._engine.prefix.version != version:
                self._prefix_changed(trainer)
            if event is not None:
                self.events.append(event)
                tell_event(event, self._engine)
            if due or event is not None:
                log_metrics(trainer, self._engine)
        tell_messages(self._engine)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Observe no longer if the last batch had no end: the module's own ``on_train_batch_start`` may return -1."""
        self._stop_first_step()
        for listener in self.step_listeners:
            listener.step_ended()
        if self._engine is not None:
            self._engine.forget_batch()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print what was saved, beside the metrics."""
        if self._active and (trainer.num_training_batches == 0 or trainer.limit_train_batches == 0):
            rank_zero_warn(
                "freezing: there are no training batches: the train dataloader is empty, or limit_train_batches leaves "
                "none of it"
            )
        policy = self._engine.policy if self._engine is not None else None
        if isinstance(policy, FreezingPolicy) and policy.held_back and not self.events:
            rank_zero_warn(
                f"freezing: nothing froze: {policy.held_back}. What began with new weights freezes only once the "
                "learning rate has fallen to half of its highest so far: let it fall, or use "
                "FreezingPolicy(pretrained=True) if the weights were trained already"
            )
        if self._engine is not None and trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            Console().print(savings_table(self.savings(), metrics))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the model as the user made it: what was frozen is trainable again."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As `teardown`, which Lightning does not call after an error."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Plain types only: the layer chain, the policy, and what has happened so far.

        In a deterministic run also the weights of the reference, which is as much again as the model's own. A state
        that was loaded stays what it is until training starts, and that of the end of a deterministic `fit` until the
        next begins.
        """
        if self._restored is not None:
            return self._restored
        if self._kept is not None:
            return self._kept
        engine = self._engine
        return {
            "version": STATE_VERSION,
            "chain": self._chain.to_state() if self._chain is not None else None,
            "layer_modules": self._named_layer_modules,
            "policy": engine.policy.state_dict() if engine is not None else None,
            "policy_class": type(engine.policy).__name__ if engine is not None else None,
            "engine": engine.state_dict(with_reference=self._waits) if engine is not None else None,
            "events": [vars(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts; the model may freeze only once its optimizers are there.

        Lightning also calls this to validate, test and predict with a checkpoint, where it means nothing.

        Raises:
            CheckpointError: the checkpoint was written by another version of this class, or is damaged.
        """
        if self._stage not in (None, "fit"):
            return
        if state_dict.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint holds freezing state of version {state_dict.get('version')!r}; this version of "
                f"lightning_egeria reads version {STATE_VERSION}"
            )
        self._restored = state_dict
        with checkpoint_read():
            self.events = [FreezingEvent(**event) for event in state_dict["events"]]

    def _start_over_if_more_learns(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A callback that releases a backbone after some epochs puts layers in front of those that were found."""
        new = self._learners.new_in(pl_module)
        if not new:
            return
        rank_zero_warn(
            f"freezing: {new[0]!r} and {len(new) - 1} more parameters have begun to learn since the layer modules "
            "were found. All is unfrozen, and they are found anew"
        )
        if self.frozen_depth:
            self.events.append(FreezingEvent(trainer.global_step, "unfreeze", 0, "other parameters began to learn"))
        self._close()
        self._engine = self._chain = self._kept = None
        self._prefix_changed(trainer)

    def _prefix_changed(self, trainer: pl.Trainer) -> None:
        prefix = self._engine.prefix if self._engine is not None else None
        if self.check_ranks and prefix is not None:
            self._ranks.compare(prefix)  # before a strategy makes equal what was not
        prefix_changed(trainer.strategy, prefix_buffers(prefix, prefix.settled_depth) if prefix is not None else ())

    def _start_engine(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, restored: dict[str, Any] | None
    ) -> None:
        prefix = FrozenPrefix(pl_module, chain)
        prefix.listeners.extend(self.step_listeners)
        prefix.check_fits()
        policy = copy.deepcopy(self.policy) if self.policy is not None else FreezingPolicy()
        if restored is not None and restored["policy_class"] != type(policy).__name__:
            raise CheckpointError(
                f"the checkpoint was written under a {restored['policy_class']}, and the callback has a "
                f"{type(policy).__name__}: give it the same policy, or leave ckpt_path out to start anew"
            )
        most = chain.max_depth if restored is None else restored["chain"]["max_depth"]
        policy.start(most)
        before = restored["engine"] if restored is not None else {"precision": None, "crops": None}
        precision = before["precision"] or self.reference_precision
        if precision == "auto" and self._waits:
            precision = "float32"  # what is fastest may differ from run to run
        make = functools.partial(ReferenceModel, chain, self.evaluation_samples, precision, before["crops"] or None)
        self._chain = chain
        self._learners.follow(chain.prefix_parameters(len(chain))[0], trainer.optimizers)
        workers = idle_workers(pl_module.device) if self.workers is None else self.workers
        self._engine = engine = FreezingEngine(  # from here on, `on_exception` undoes what it has done
            prefix,
            policy,
            ReferencePool(make, chain.entries, workers, self.threads_per_worker, self.timeout_s),
            evaluate_every_n_steps=self._every,
            refresh_every_n_evaluations=self.refresh_every_n_evaluations,
            evaluation_samples=self.evaluation_samples,
            in_flight=max(1, workers),
            wait_s=self.timeout_s if self._waits else 0.0,
            adapt=self.evaluate_every_n_steps is None,
            step=trainer.global_step,
            ranks=self._ranks,
        )
        self._bar_entry = BarEntry(trainer, "frozen", lambda: f"{prefix.depth}/{len(chain)}")
        if restored is not None:
            with checkpoint_read():
                policy.load_state_dict(restored["policy"])
                engine.load_state_dict(restored["engine"])
            allowed = min(most, chain.max_depth)
            if allowed < most or not engine.pool.has_snapshot:
                policy.start(allowed)
            if prefix.depth < restored["engine"]["prefix"]["depth"]:
                engine.prefix_changed(prefix)  # what is under way was asked at the other depth
                reason = "max_frozen_fraction, freeze_until or never_freeze allow no more now"
                self.events.append(FreezingEvent(trainer.global_step, "unfreeze", prefix.depth, reason))
                tell_event(self.events[-1], engine)
        if not engine.pool.has_snapshot:
            engine.refresh_reference(self._first_step.weights if self._first_step is not None else None)

    def _stop_first_step(self) -> FirstStep | None:
        first, self._first_step = self._first_step, None
        if first is not None:
            first.stop()
        return first

    def _close(self) -> None:
        self._stop_first_step()
        try:
            if self._waits and self._engine is not None and self._kept is None:
                self._kept = self.state_dict()  # closing drops the reference, and what is asked of it
        finally:
            if self._engine is not None:
                self._engine.close()
            if self._bar_entry is not None:
                self._bar_entry.remove()


def _interval(trainer: pl.Trainer) -> int:
    """Steps between evaluations, by the length of the run; to be asked when the data loaders are there."""
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 0:
        return EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN
    return max(LEAST_STEPS_BETWEEN_EVALUATIONS, round(steps / EVALUATIONS_PER_RUN))
