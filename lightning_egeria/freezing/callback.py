"""Knowledge-guided freezing as a Lightning callback. It only puts the parts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from rich import get_console
from torch import Tensor

from lightning_egeria.core.network.normalisation import normalisation_layers
from lightning_egeria.core.training.branches import Branches
from lightning_egeria.core.training.callback import PrefixFreezing
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.freezer import Decision, Freezer, FreezingEvent
from lightning_egeria.core.training.methods import methods_of
from lightning_egeria.core.training.notices import log_line
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.errors import NothingTrainedError
from lightning_egeria.freezing import METHOD
from lightning_egeria.freezing.arguments import (
    check_arguments,
    check_max_loss,
    explain_arguments_of_policies,
    policy_for,
)
from lightning_egeria.freezing.comparison import ReferenceComparison, comparison_of
from lightning_egeria.freezing.decide import Decider, LastEvaluation
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.pretrained import answer_auto, evidence
from lightning_egeria.freezing.reference import Precision
from lightning_egeria.freezing.savings import Savings, savings_table, share_of_step, summarize
from lightning_egeria.freezing.trial import Frontier
from lightning_egeria.upstream.lightning import data_fetcher, loaders_keep_their_place


class KnowledgeGuidedFreezing(PrefixFreezing):
    """Freezes the front of a model once a comparison with an earlier snapshot shows that it has converged.

    The callback finds the layer modules from the first training step, so the model needs no changes. Until the first
    freeze, parameters are bit for bit those of a run without the callback.

    Args:
        policy: decides what freezes and when; None is ``FreezingPolicy()``, which recognises pre-trained
            weights by their normalisation layers. Each `fit` starts with a copy.
        layer_modules: paths of the layer modules, in execution order; None finds them.
        freeze_until: limit of the prefix. A path: up to and including that module. A number in [0, 1]: that share of
            the layer modules at most; 0 freezes nothing and lets a cache serve what you have frozen. None sets no
            limit. The last layer module never freezes.
        max_loss_points: loss of the metric, in points, that you accept for time when weights are pre-trained; at
            least 0; ``float("inf")`` freezes as deep as possible. It sets how deep a trial goes. Without a trial, the
            frozen share is the largest one that lost at most this much on the tasks of the proof. This is no
            guarantee: compare with a run with ``freeze_until=0``.
        evaluate_every_n_steps: optimizer steps between two evaluations; None is a fiftieth of the run, at least 8.
            Plasticity is the change over this interval, so a shorter one needs a lower tolerance.
        evaluation_samples: largest number of samples of a batch to compare; at least 2.
        reference_precision: ``"float32"``, ``"bf16"``, ``"int8"``, or ``"auto"``, which takes the fastest that changes
            plasticity by a tenth at most. In a deterministic run, ``"auto"`` is float32.
        background: where the reference model runs. True: in a process beside training. False: in the training thread,
            with the same result. None: in a process if a core is idle, until its answers come late.
        timeout_s: seconds after which a reference process that has not answered is replaced.
        deterministic: wait for each result, so that two runs with one seed freeze at the same steps, and store the
            reference's weights in checkpoints. None follows ``torch.are_deterministic_algorithms_enabled()``.
        allow_untested: train with a strategy that is refused otherwise, with a warning.

    Attributes:
        freezer: freezes and unfreezes; None before the first training step.
        events: every freeze and unfreeze so far.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD
    measures_plasticity = True

    @explain_arguments_of_policies
    def __init__(
        self,
        policy: Policy | None = None,
        layer_modules: Sequence[str] | None = None,
        freeze_until: str | float | None = None,
        max_loss_points: float = 0.0,
        evaluate_every_n_steps: int | None = None,
        evaluation_samples: int = 32,
        reference_precision: Precision = "auto",
        background: bool | None = None,
        timeout_s: float = 120.0,
        deterministic: bool | None = None,
        allow_untested: bool = False,
    ) -> None:
        super().__init__(layer_modules, freeze_until, allow_untested)
        check_arguments(policy, evaluate_every_n_steps, evaluation_samples, reference_precision, timeout_s)
        check_max_loss(max_loss_points, policy)
        self.policy = policy
        self.max_loss_points = max_loss_points
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.evaluation_samples = evaluation_samples
        self.reference_precision = reference_precision
        self.background = background
        self.timeout_s = timeout_s
        self.deterministic = deterministic
        self._decider: Decider | None = None
        self._accumulation = 1
        self._norms: dict[str, bool] | None = None  # as training found them; None before

    @property
    def last_evaluation(self) -> LastEvaluation | None:
        """The latest comparison with the reference; None before the first, and on every rank but 0."""
        return self._decider.last_evaluation if self._decider is not None else None

    @property
    def latest_plasticity(self) -> tuple[int, Sequence[float]] | None:
        """Step and plasticity of the last evaluation."""
        last = self.last_evaluation
        return None if last is None else (last.step, last.plasticity)

    @property
    def active_policy(self) -> Policy | None:
        """The policy of this `fit`, a copy of ``policy``; None before the first training step."""
        return self._decider.policy if self._decider is not None else None

    @property
    def comparison(self) -> ReferenceComparison | None:
        """The comparison of the network with the reference model; None before the first training step."""
        return self._decider.comparison if self._decider is not None else None

    @property
    def frontier(self) -> Frontier | None:
        """The losses at each depth in the trial of pre-trained weights; None before it ends, and without a trial."""
        return self._decider.frontier if self._decider is not None else None

    def savings(self) -> Savings:
        """Return the savings of the last `fit`, so far.

        Raises:
            NothingTrainedError: before the first training step.
        """
        if self._decider is None:
            raise NothingTrainedError("savings() has nothing to report before the first training step")
        return summarize(self._decider, self.events)

    def will_compare(self, batches_ahead: int) -> bool:
        """Whether the network's real input is needed for the batch ``batches_ahead`` after the last one."""
        return self._decider is not None and self._decider.needs_input(batches_ahead, self._accumulation)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the normalisation layers before the first forward moves their statistics, unless a checkpoint has."""
        self._decider = None
        super().on_train_start(trainer, pl_module)
        if self._norms is None:
            self._norms = normalisation_layers(pl_module)
        self._read_ahead(trainer)  # Lightning skips `on_train_epoch_start` when it resumes within an epoch

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        super().forget_fit()
        self._norms = None

    def own_state(self) -> dict[str, Any]:
        """Return also which normalisation layers had left their initial values before the first step."""
        return {**super().own_state(), "norms": self._norms}

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take also the normalisation layers at the start; a checkpoint before version 0.2 lacks them."""
        super().read_own_state(state)
        self._norms = {str(path): bool(left) for path, left in (state.get("norms") or {}).items()}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read batches ahead in this epoch if there may be a trial of depths."""
        super().on_train_epoch_start(trainer, pl_module)
        self._read_ahead(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the Trainer its own data fetcher back."""
        super().on_train_epoch_end(trainer, pl_module)
        Feed.remove(trainer, self)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Warn if the loader stores a position behind batches that training has not taken yet, after a trial."""
        feed = data_fetcher(trainer)
        ahead = len(feed.ahead.kept) if isinstance(feed, Feed) else 0
        selects = any(method.name == "selecting" for method in methods_of(trainer))
        if ahead and (selects or loaders_keep_their_place(trainer)):
            self.notices.warn(
                f"the training loader stores its own position, which is {ahead} batches ahead of training in the "
                f"checkpoint of step {trainer.global_step}, because depths were tried on these batches. A run that "
                f"resumes from it skips them. Resume from a checkpoint at least {ahead} batches later"
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        super().on_exception(trainer, pl_module, exception)
        Feed.remove(trainer, self)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove everything from the Trainer."""
        super().teardown(trainer, pl_module, stage)
        Feed.remove(trainer, self)

    def _read_ahead(self, trainer: pl.Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        policy = FreezingPolicy() if self.policy is None else self.policy
        trial = self._decider.trial if self._decider is not None and self.freezer is not None else None
        may_want_one = isinstance(policy, FreezingPolicy) and policy.pretrained and policy.trial
        wanted = may_want_one if self.freezer is None else trial is not None and not trial.over
        if wanted and Branches.possible(trainer):
            feed = Feed.install(trainer, self, lambda: self._try_depths(trainer, feed))

    def _try_depths(self, trainer: pl.Trainer, feed: Feed) -> None:
        decision = self._decider.try_depths(feed) if self._decider is not None and self.freezer is not None else None
        if decision is None or self.freezer is None:
            return
        self.freezer.step = trainer.global_step
        if not self.follow(decision):
            self.notices.inform(f"step {trainer.global_step}: nothing freezes: {decision.reason}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Capture the step if an evaluation is due."""
        self._accumulation = trainer.accumulate_grad_batches
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def start_method(
        self, trainer: pl.Trainer, freezer: Freezer, gathered: Mapping[str, Tensor] | None, state: Any
    ) -> Sequence[Observer]:
        """Take the first snapshot, or restore the one from the checkpoint."""
        policy = policy_for(self.policy, None if state is None else state["policy"]["class"])
        norms = evidence(self._norms or {}, freezer.prefix.module, freezer.chain)
        if state is None:
            max_depth = answer_auto(policy, norms, freezer.chain, self.ranks, self.notices)
        else:
            max_depth = state["max_depth"]
        policy.start(max_depth)
        before = None if state is None else state["comparison"]
        comparison = comparison_of(
            trainer,
            freezer,
            policy,
            self.notices,
            before,
            evaluate_every_n_steps=self.evaluate_every_n_steps,
            samples=self.evaluation_samples,
            precision=self.reference_precision,
            background=self.background,
            timeout_s=self.timeout_s,
            deterministic=self.deterministic,
        )
        # From here on, `stop_method` cleans up after an error.
        self._decider = Decider(freezer, policy, comparison, max_depth)
        if state is not None:
            self._decider.load_state_dict(state)
        if not comparison.runner.has_snapshot:
            comparison.refresh_reference(gathered)
        self._decider.start_trial(trainer, norms, self.max_loss_points)
        return [comparison]

    def stop_method(self) -> None:
        """Stop comparing, and end the reference process."""
        if self._decider is not None:
            self._decider.comparison.close()

    def method_state(self) -> dict[str, Any]:
        """Return the state of policy and comparison; in a deterministic run, also the reference's weights."""
        assert self._decider is not None  # `start_method` has made it
        return self._decider.state_dict()

    def compares_weights(self, step: int) -> bool:
        """Whether an evaluation is due."""
        return self._decider is not None and self._decider.comparison.is_due(step)

    def stop_deciding(self) -> None:
        """Stop comparing."""
        if self._decider is not None:
            self._decider.comparison.stop()

    def metrics(self) -> dict[str, float]:
        """Return also the counts of evaluations and what they measured."""
        return {**super().metrics(), **(self._decider.metrics() if self._decider is not None else {})}

    def metrics_news(self) -> tuple[int, ...]:
        """There are also new metrics at each evaluation."""
        return (*super().metrics_news(), self._decider.comparison.next_evaluation if self._decider is not None else 0)

    def choose_depth(self, step: int) -> Decision | None:
        """Return the decision of the policy."""
        return self._decider.decide(step, self.learning_rate) if self._decider is not None else None

    def report(self, event: FreezingEvent) -> None:
        """Log a freeze or unfreeze, and the share of a step that the frozen layer modules took."""
        share = (
            share_of_step(self._decider, event.depth) if self._decider is not None and event.kind == "freeze" else None
        )
        text = event.describe(self.layer_modules)
        log_line(text if share is None else f"{text}; they took {share:.0%} of a step")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the savings and the last metrics."""
        super().on_fit_end(trainer, pl_module)
        if self._decider is None or not trainer.is_global_zero:
            return
        savings = self.savings()
        if savings.why_nothing_froze is not None:
            held_back = getattr(self._decider.policy, "held_back", None) is not None
            tell = self.notices.warn if held_back else self.notices.inform
            tell(f"nothing froze: {savings.why_nothing_froze}")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        # Use the console of Rich's progress bar; the bar draws over text from other consoles.
        get_console().print(savings_table(savings, metrics))
