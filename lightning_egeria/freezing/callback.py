"""Knowledge-guided freezing as a Lightning callback. It only puts the parts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from rich import get_console
from torch import Tensor

from lightning_egeria.errors import NothingTrainedError
from lightning_egeria.freezing.arguments import check_arguments, check_max_loss, explain_missing, policy_for
from lightning_egeria.freezing.comparison import LastEvaluation, ReferenceComparison
from lightning_egeria.freezing.comparison_setup import set_up_comparison
from lightning_egeria.freezing.display import MetricsLog, share_of_step, tell_why_nothing_froze
from lightning_egeria.freezing.guide import Guide
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.pretrained import answer_auto, evidence
from lightning_egeria.freezing.reference import Precision
from lightning_egeria.freezing.savings import Savings, savings_table
from lightning_egeria.freezing.summary import summarize
from lightning_egeria.freezing.trial import Frontier
from lightning_egeria.network.normalisation import normalisation_layers
from lightning_egeria.training.branches import Branches
from lightning_egeria.training.callback import PrefixFreezing
from lightning_egeria.training.combinations import methods_of
from lightning_egeria.training.feed import Feed
from lightning_egeria.training.freezer import Decision, Freezer, FreezingEvent
from lightning_egeria.training.notices import log_line
from lightning_egeria.training.observers import Observer
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
            least 0, ``float("inf")`` is as fast as it gets. It sets how deep a trial goes, and without one freezes what
            lost at most so much on the tasks of the proof. No promise: compare with a run with ``freeze_until=0``.
        evaluate_every_n_steps: optimizer steps between two evaluations; None is a fiftieth of the run, at least 8.
            Plasticity is the change over this interval, so a shorter one needs a lower tolerance.
        evaluation_samples: samples of a batch to compare, at most; at least 2.
        reference_precision: ``"float32"``, ``"bf16"``, ``"int8"``, or ``"auto"`` for the fastest whose rounding does
            not show in plasticity. A deterministic run takes float32.
        background: where the reference model runs. True: in a process beside training. False: in the training thread,
            with the same result. None: in a process if a core is idle.
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

    measures_plasticity = True

    @explain_missing
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
        self._guide: Guide | None = None
        self._accumulation = 1
        self._norms: dict[str, bool] | None = None  # as training found them; None before

    @property
    def last_evaluation(self) -> LastEvaluation | None:
        """The latest comparison with the reference; None before the first, and on every rank but 0."""
        return self._guide.last_evaluation if self._guide is not None else None

    @property
    def latest_plasticity(self) -> tuple[int, Sequence[float]] | None:
        """Step and plasticity of the last evaluation."""
        last = self.last_evaluation
        return None if last is None else (last.step, last.plasticity)

    @property
    def active_policy(self) -> Policy | None:
        """The policy of this `fit`, a copy of ``policy``; None before the first training step."""
        return self._guide.policy if self._guide is not None else None

    @property
    def comparison(self) -> ReferenceComparison | None:
        """The comparison of the network with the reference model; None before the first training step."""
        return self._guide.comparison if self._guide is not None else None

    @property
    def frontier(self) -> Frontier | None:
        """The losses that the trial of pre-trained weights saw at each depth; None before, and without a trial."""
        return self._guide.frontier if self._guide is not None else None

    def savings(self) -> Savings:
        """Return what freezing did in the last `fit`, so far.

        Raises:
            NothingTrainedError: before the first training step.
        """
        if self._guide is None:
            raise NothingTrainedError("savings() has nothing to report before the first training step")
        return summarize(self._guide, self.events)

    def will_compare(self, batches_ahead: int) -> bool:
        """Whether the network's real input is needed for the batch ``batches_ahead`` after the last one."""
        return self._guide is not None and self._guide.needs_input(batches_ahead, self._accumulation)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the normalisation layers before the first forward moves their statistics, unless a checkpoint has."""
        self._guide = None
        super().on_train_start(trainer, pl_module)
        if self._norms is None:
            self._norms = normalisation_layers(pl_module)
        self._read_ahead(trainer)  # Lightning skips `on_train_epoch_start` when it resumes within an epoch

    def forget_fit(self) -> None:
        """Drop what is left of an earlier `fit`."""
        super().forget_fit()
        self._norms = None

    def own_state(self) -> dict[str, Any]:
        """Return also how training found the normalisation layers, from the first step on."""
        return {**super().own_state(), "norms": self._norms}

    def read_own_state(self, state: dict[str, Any]) -> None:
        """Take also what the start showed; a checkpoint before version 0.2 does not tell."""
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
        """Warn of batches that depths were tried on, where the loader keeps its own position."""
        feed = data_fetcher(trainer)
        ahead = len(feed.ahead.kept) if isinstance(feed, Feed) else 0
        if ahead and ("selecting" in methods_of(trainer) or loaders_keep_their_place(trainer)):
            self.notices.warn(
                f"the training loader keeps its own position, and it is {ahead} batches ahead in the checkpoint of "
                f"step {trainer.global_step}, because depths were tried on them. A run that resumes there misses these "
                "batches; the next checkpoint after them has all"
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        super().on_exception(trainer, pl_module, exception)
        Feed.remove(trainer, self)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing on the Trainer."""
        super().teardown(trainer, pl_module, stage)
        Feed.remove(trainer, self)

    def _read_ahead(self, trainer: pl.Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        policy = FreezingPolicy() if self.policy is None else self.policy
        trial = self._guide.trial if self._guide is not None and self.freezer is not None else None
        may_want_one = isinstance(policy, FreezingPolicy) and policy.pretrained and policy.trial
        wanted = may_want_one if self.freezer is None else trial is not None and not trial.over
        if wanted and Branches.possible(trainer):
            feed = Feed.install(trainer, self, lambda: self._try_depths(trainer, feed))

    def _try_depths(self, trainer: pl.Trainer, feed: Feed) -> None:
        decision = self._guide.try_depths(feed) if self._guide is not None and self.freezer is not None else None
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
        """Take the first reference, or restore the one from the checkpoint."""
        policy = policy_for(self.policy, None if state is None else state["policy"]["class"])
        norms = evidence(self._norms or {}, freezer.prefix.module, freezer.chain)
        if state is None:
            max_depth = answer_auto(policy, norms, freezer.chain, self.ranks, self.notices)
        else:
            max_depth = state["max_depth"]
        policy.start(max_depth)
        before = None if state is None else state["comparison"]
        comparison = set_up_comparison(trainer, freezer, policy, self.notices, before, self)
        # From here on, `stop_method` cleans up after an error.
        self._guide = Guide(freezer, policy, comparison, max_depth)
        if state is not None:
            self._guide.load_state_dict(state)
        if not comparison.runner.has_snapshot:
            comparison.refresh_reference(gathered)
        self._guide.start_trial(trainer, norms, self.max_loss_points)
        return [comparison, MetricsLog(trainer, self._guide)]

    def stop_method(self) -> None:
        """Stop comparing, and end the reference process."""
        if self._guide is not None:
            self._guide.comparison.close()

    def method_state(self) -> dict[str, Any]:
        """Return the state of policy and comparison, and in a deterministic run the reference's weights."""
        assert self._guide is not None  # `start_method` has made it
        return self._guide.state_dict()

    def compares_weights(self, step: int) -> bool:
        """Whether an evaluation is due."""
        return self._guide is not None and self._guide.comparison.is_due(step)

    def stop_deciding(self) -> None:
        """Stop comparing."""
        if self._guide is not None:
            self._guide.comparison.stop()

    def choose_depth(self, step: int) -> Decision | None:
        """Return the decision of the policy."""
        return self._guide.decide(step, self.learning_rate) if self._guide is not None else None

    def report(self, event: FreezingEvent) -> None:
        """Log a freeze or unfreeze, and the share of a step that the frozen layer modules took."""
        share = share_of_step(self._guide, event.depth) if self._guide is not None and event.kind == "freeze" else None
        text = event.describe(self.layer_modules)
        log_line(text if share is None else f"{text}; they took {share:.0%} of a step")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the savings and the last metrics."""
        super().on_fit_end(trainer, pl_module)
        if self._guide is not None and not self.events:
            tell_why_nothing_froze(self._guide, self.notices)
        if self._guide is not None and trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            # Use the console of Rich's progress bar; the bar draws over text from other consoles.
            get_console().print(savings_table(self.savings(), metrics))
