"""The Lightning callback. It only translates hooks; the engine decides."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import Tensor

from lightning_egeria.errors import ArgumentError, CheckpointError, TrainingDataError, UnsupportedError
from lightning_egeria.freezing.engine import FreezingEngine, FreezingEvent
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.reference import InlineExecutor
from lightning_egeria.layers import FrozenPrefix, LayerChain
from lightning_egeria.report import LayerModuleSavings, Savings, savings_table
from lightning_egeria.tracing import StepTrace

# A child of Lightning's logger: its lines appear where Lightning's do, whatever the user has set up.
_log = logging.getLogger("lightning.pytorch.lightning_egeria")

STATE_VERSION = 1
EVALUATIONS_PER_RUN = 200  # bounds the evaluations' cost by that many forwards, however long the run
EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN = 100


class KnowledgeGuidedFreezing(pl.Callback):
    """Freezes the front of the model as soon as comparison with a reference model shows that it has converged.

    Nothing about the model is to be told: the first training step shows its layer modules. Until something freezes the
    parameters are bit for bit those of a run without the callback.

    Args:
        policy: decides when; `FreezingPolicy()` if None. It is copied at each start of `fit`.
        layer_modules: paths of the layer modules in execution order; None finds them.
        evaluate_every_n_steps: optimizer steps between evaluations; None makes 200 evaluations of the whole run.
        refresh_every_n_evaluations: after so many, the reference model takes over the weights of the moment. With the
            policy's ``window_evaluations`` of the same length, the refresh does not show in the smoothed plasticity.
        evaluation_samples: how many samples of a batch are compared at most.

    Attributes:
        events: every freeze and unfreeze so far.

    Raises:
        ArgumentError: an interval is below 1, or ``evaluation_samples`` below 2.

    """

    def __init__(
        self,
        policy: Policy | None = None,
        layer_modules: Sequence[str] | None = None,
        evaluate_every_n_steps: int | None = None,
        refresh_every_n_evaluations: int = 10,
        evaluation_samples: int = 64,
    ) -> None:
        if evaluate_every_n_steps is not None and evaluate_every_n_steps < 1:
            raise ArgumentError(f"evaluate_every_n_steps must be at least 1 or None, got {evaluate_every_n_steps}")
        if refresh_every_n_evaluations < 1:
            raise ArgumentError(f"refresh_every_n_evaluations must be at least 1, got {refresh_every_n_evaluations}")
        if evaluation_samples < 2:
            raise ArgumentError(f"evaluation_samples must be at least 2, got {evaluation_samples}")
        if isinstance(layer_modules, str):
            raise ArgumentError(f"layer_modules must be a list of names, got the single text {layer_modules!r}")
        self.policy = policy
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.refresh_every_n_evaluations = refresh_every_n_evaluations
        self.evaluation_samples = evaluation_samples
        self.events: list[FreezingEvent] = []
        self._named_layer_modules = None if layer_modules is None else list(layer_modules)
        self._chain: LayerChain | None = None
        self._engine: FreezingEngine | None = None
        self._trace: StepTrace | None = None
        self._every = 0
        self._active = False
        self._failure_told = False
        self._step_before = 0
        self._learning_rate = math.nan
        self._restored: dict[str, Any] | None = None

    @property
    def layer_modules(self) -> list[str]:
        """Names of the layer modules in order; empty until the first training step has shown them."""
        return list(self._chain.names) if self._chain is not None else []

    @property
    def frozen_depth(self) -> int:
        """How many layer modules are frozen, or were when `fit` ended."""
        return self.events[-1].depth if self.events else 0

    def savings(self) -> Savings:
        """What freezing did to the last `fit`, so far.

        Raises:
            RuntimeError: no training step was done yet.
        """
        if self._chain is None or self._engine is None:
            raise RuntimeError("there are no savings to tell of before the first training step")
        costs = self._engine.costs
        shares = costs.layer_shares(len(self._chain))
        modules = []
        for index, name in enumerate(self._chain.names):
            frozen_at = None
            for event in self.events:
                frozen_at = (event.step if frozen_at is None else frozen_at) if event.depth > index else None
            modules.append(LayerModuleSavings(name, frozen_at, shares[index]))
        saved = costs.seconds_saved()
        return Savings(
            layer_modules=tuple(modules),
            frozen_depth=self.frozen_depth,
            step_seconds_before=costs.mean_seconds(0),
            step_seconds_after=costs.mean_seconds(self.frozen_depth) if self.frozen_depth else None,
            evaluation_seconds=costs.evaluation_seconds,
            seconds_saved=None if saved is None else saved - costs.evaluation_seconds,
            evaluations_done=self._engine.evaluations_done,
            evaluations_dropped=self._engine.evaluations_dropped,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what freezing was not made for, before anything is set up."""
        if stage == "fit" and trainer.world_size > 1:
            raise UnsupportedError(
                f"freezing was made for one process, and this Trainer has {trainer.world_size} "
                f"({type(trainer.strategy).__name__}): the other processes would wait for gradients that never come. "
                "Use devices=1 or leave the callback out"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start anew; see that there is something to train on."""
        self._close()
        self._chain = self._engine = None
        self._failure_told = False
        self._active = not getattr(trainer, "fast_dev_run", False)
        if not self._active:
            return
        steps = trainer.estimated_stepping_batches  # has the data loaders made
        if trainer.num_training_batches == 0 or trainer.limit_train_batches == 0:
            raise TrainingDataError(
                "there are no training batches: the train dataloader is empty, or limit_train_batches leaves none of it"
            )
        if self.evaluate_every_n_steps is not None:
            self._every = self.evaluate_every_n_steps
        elif math.isinf(steps) or steps < 0:
            self._every = EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN
        else:
            self._every = max(1, round(steps / EVALUATIONS_PER_RUN))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze again what the checkpoint had frozen, now that the optimizers are there."""
        restored, self._restored = self._restored, None
        self.events = []
        if not self._active or restored is None or restored["chain"] is None:
            return
        self._start_engine(trainer, pl_module, LayerChain.from_state(restored["chain"]), restored)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the first step to find the layer chain, and every evaluation step to compare it."""
        if not self._active:
            return
        self._step_before = trainer.global_step
        if trainer.optimizers:
            self._learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        if self._engine is not None:
            self._engine.begin_step(trainer.global_step)
        else:
            self._trace = StepTrace(pl_module)
            self._trace.start()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over: nothing is observed any longer."""
        if not self._active:
            return
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.stop()
            chain = LayerChain.from_trace(trace, loss, self._named_layer_modules)
            self._start_engine(trainer, pl_module, chain, None)
            for note in chain.notes:
                rank_zero_warn(f"freezing: {note}")
        if self._engine is not None:
            self._engine.end_forward(loss)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time."""
        if self._engine is not None:
            self._engine.end_backward(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Apply the decision that is due, ask for the next evaluation."""
        if self._trace is not None:
            self._trace.stop()  # the step was skipped: no loss, no backward; the next one is observed instead
            self._trace = None
        if self._engine is None:
            return
        self._engine.end_batch()
        if trainer.global_step > self._step_before:
            event = self._engine.end_step(trainer.global_step, self._learning_rate)
            if event is not None:
                self._tell(event)
        if self._engine.failure is not None and not self._failure_told:
            self._failure_told = True
            failure = self._engine.failure
            rank_zero_warn(
                f"freezing: the reference model of {type(pl_module).__name__} failed with {type(failure).__name__}: "
                f"{failure}. Training goes on; no more layer modules will freeze"
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print what was saved, beside the metrics."""
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
        """Plain types only: the layer chain, the policy, and what has happened so far."""
        return {
            "version": STATE_VERSION,
            "chain": self._chain.to_state() if self._chain is not None else None,
            "policy": self._engine.policy.state_dict() if self._engine is not None else None,
            "policy_class": type(self._engine.policy).__name__ if self._engine is not None else None,
            "next_evaluation": self._engine.next_evaluation if self._engine is not None else None,
            "events": [vars(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts; the model may freeze only once its optimizers are there.

        Raises:
            CheckpointError: the checkpoint was written by another version of this class.
        """
        if state_dict.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint holds freezing state of version {state_dict.get('version')!r}; this version of "
                f"lightning_egeria reads version {STATE_VERSION}"
            )
        self._restored = state_dict

    def _start_engine(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, chain: LayerChain, restored: dict[str, Any] | None
    ) -> None:
        prefix = FrozenPrefix(pl_module, chain)
        prefix.check_fits()
        policy = copy.deepcopy(self.policy) if self.policy is not None else FreezingPolicy()
        policy.start(chain.max_depth)
        self._chain = chain
        self._engine = FreezingEngine(
            prefix,
            policy,
            InlineExecutor(),
            evaluate_every_n_steps=self._every,
            refresh_every_n_evaluations=self.refresh_every_n_evaluations,
            evaluation_samples=self.evaluation_samples,
            step=trainer.global_step,
        )
        if restored is not None:
            if restored["policy_class"] != type(policy).__name__:
                raise CheckpointError(
                    f"the checkpoint was written under a {restored['policy_class']}, and the callback has a "
                    f"{type(policy).__name__}: give it the same policy, or leave ckpt_path out to start anew"
                )
            policy.load_state_dict(restored["policy"])
            self._engine.next_evaluation = restored["next_evaluation"]
            self.events = [FreezingEvent(**event) for event in restored["events"]]
            prefix.set_depth(self.frozen_depth)

    def _tell(self, event: FreezingEvent) -> None:
        self.events.append(event)
        verb = "froze" if event.kind == "freeze" else "unfroze"
        total = len(self.layer_modules)
        _log.info(f"step {event.step}: {verb}, now {event.depth}/{total} layer modules are frozen: {event.reason}")

    def _close(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
        if self._engine is not None:
            self._engine.close()
