"""The methods that every contract test is run with. A further method is one more line in `METHODS`: its class first."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_egeria import (
    AdaptiveBatchSize,
    BranchTuner,
    Choice,
    FreezingPolicy,
    FrozenPrefixCache,
    GraphPipelineStrategy,
    KnowledgeGuidedFreezing,
    LogUniform,
    PrefixFreezing,
    ScriptedPolicy,
    SelectiveBackprop,
    SlopePolicy,
    StructuredPartialBackprop,
)
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.freezer import Decision
from support.models import Classifier, loader

SCHEDULE = {3: 1, 8: 2}  # of 15 steps


class LinearFreezing(PrefixFreezing):
    """A method as a user writes one: deeper by one after each third step."""

    def choose_depth(self, step):
        depth = min(step // 3, self.freezer.chain.max_depth)
        return Decision(depth, f"step {step}") if depth != self.freezer.depth else None


class Waiting(PrefixFreezing):
    """Never freezes."""


def freezes(trainer):
    """Step, depth and reason of each change of the frozen depth."""
    return [(event.step, event.depth, event.reason) for event in freezing_of(trainer).events]


def left_out(trainer):
    """Name and number of steps of each layer module that was not in the suffix of every step."""
    callback = next(one for one in trainer.callbacks if isinstance(one, StructuredPartialBackprop))
    counts = callback.contributions
    return [(name, count) for name, count in counts.items() if count < max(counts.values())]


def other_batch_sizes(trainer):
    """Step, batch size and reason of each change of the batch size."""
    data = AdaptiveBatchSize.find(trainer.datamodule)
    return [(change.step, change.batch_size, change.reason) for change in data.changes]


def not_trained(trainer):
    """Number and samples of each epoch that left samples out."""
    selecting = SelectiveBackprop.find(trainer.datamodule)
    epochs = selecting.selection.epochs if selecting is not None else []
    return [(f"epoch {epoch}", seen - trained) for epoch, seen, _, trained in epochs if trained < seen]


def full_batches_of_kept_samples(plain, active):
    return SelectiveBackprop(plain, beta=0.5 if active else 0, staleness=1)


def half_of_each_batch(plain, active):
    return SelectiveBackprop(plain, beta=1 if active else 0, mode="in_batch")


def tuned(trainer):
    """Step, number of branches and winner of each search that changed the setting."""
    callback = next(one for one in trainer.callbacks if isinstance(one, BranchTuner))
    return [(one.step, len(one.branches), one.setting) for one in callback.searches if one.winner]


def tuner(spaces, **arguments):
    return BranchTuner(spaces, **{"first_steps": 2, "max_trials": 8, "max_share": 100, **arguments})


def micro_batches(trainer):
    """Micro-batches of each batch, if there are several."""
    pipeline = getattr(trainer.strategy, "pipeline", None)
    count = pipeline.plan.micro_batches if pipeline is not None else 1
    return [("micro-batches", count)] if count > 1 else []


class NotingBetweenSteps(Classifier):
    """Notes its losses outside of the training step, which a graph pipeline divides among processes."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train, by what it adds to a `fit`.

    Attributes:
        active: makes callbacks that change the training of `models.Classifier` within its 15 steps.
        idle: makes callbacks that watch and change nothing; None if the method has no such setting.
        cached: whether the data goes through a `FrozenPrefixCache`.
        changes: returns what a method did to the training of a Trainer, each with a number above 0 in second place.
        several_processes: whether the method runs in several; it refuses them otherwise.
        adapted: makes the data module around the loader, for methods that are one; gets whether it changes something.
        steps: optimizer steps of 3 epochs, and of 2 more; None if they follow from the losses.
        strategy: makes the strategy, for methods that are one; gets whether it changes something.
        dropout: of the network when the method is idle; 0 for methods that draw in another order.
    """

    active: Callable[[], list[Any]]
    idle: Callable[[], list[Any]] | None = None
    cached: bool = False
    changes: Callable[[Any], list[Any]] = freezes
    several_processes: bool = True
    adapted: Callable[[Any, bool], Any] | None = None
    steps: tuple[int, int] | None = (15, 25)
    strategy: Callable[[bool], Any] | None = None
    dropout: float = 0.2

    def data(self, folder, dataset=None, idle=False):
        """What to give to `fit`, from a loader with a fixed order."""
        plain = loader(dataset)
        if self.adapted is not None:
            return self.adapted(plain, not idle)
        return FrozenPrefixCache(plain, cache_dir=folder, min_free_bytes=0) if self.cached else plain

    def arguments(self, idle=False):
        """What to give to a Trainer."""
        return {"strategy": self.strategy(not idle)} if self.strategy is not None else {}

    def kind(self, kind=Classifier):
        """A module of a class, which trains with the method."""
        if self.strategy is None:
            return kind
        return NotingBetweenSteps if kind is Classifier else type(kind.__name__, (kind, NotingBetweenSteps), {})


def four_times_as_large(plain, active):
    """After 8 steps; with two processes, twice as large."""
    return AdaptiveBatchSize(plain, 32, batch_sizes={8: 32}) if active else AdaptiveBatchSize(plain, 8)


def guided(policy, **arguments):
    """With the reference in the training thread and every answer waited for."""
    options = {"evaluate_every_n_steps": 1, "background": False, "deterministic": True}
    return KnowledgeGuidedFreezing(policy, **{**options, **arguments})


def scripted(schedule=None, **arguments):
    return guided(ScriptedPolicy(SCHEDULE if schedule is None else schedule), **arguments)


def eager_policy():
    """Freezes whatever was measured twice."""
    return FreezingPolicy(tolerance=1e9, patience=2, pretrained=True, peer_tolerance=0, trial=False)


def never():
    return FreezingPolicy(tolerance=1e-12, pretrained=True, peer_tolerance=0, trial=False)


def eager_slopes():
    return SlopePolicy(tolerance=0.99, window_evaluations=2, patience=1, bootstrap=False)


METHODS = {
    "FreezingPolicy": Method(lambda: [guided(eager_policy())], lambda: [guided(never())]),
    "SlopePolicy": Method(
        lambda: [guided(eager_slopes())], lambda: [guided(SlopePolicy(tolerance=1e-9, bootstrap=False))]
    ),
    "ScriptedPolicy": Method(lambda: [scripted()], lambda: [scripted({})]),
    "PrefixFreezing": Method(lambda: [LinearFreezing()], lambda: [Waiting()]),
    "StructuredPartialBackprop": Method(
        lambda: [StructuredPartialBackprop()],
        lambda: [StructuredPartialBackprop(min_share=1)],
        changes=left_out,
    ),
    "graded": Method(
        lambda: [guided(never()), StructuredPartialBackprop("graded")],
        lambda: [guided(never()), StructuredPartialBackprop("graded", min_share=1)],
        changes=left_out,
    ),
    "SelectiveBackprop": Method(
        list,
        list,
        changes=not_trained,
        several_processes=False,  # its own tests have several
        adapted=half_of_each_batch,
    ),
    "SelectiveBackprop in a queue": Method(
        list,
        list,
        changes=not_trained,
        several_processes=False,
        adapted=full_batches_of_kept_samples,
        steps=None,
    ),
    "AdaptiveBatchSize": Method(list, list, changes=other_batch_sizes, adapted=four_times_as_large, steps=(11, 15)),
    "BranchTuner": Method(
        lambda: [tuner({"lr": LogUniform(1e-2, 0.2)}, at_epochs=(1, 2), seed=2)],
        lambda: [tuner({"lr": Choice([0.05]), "momentum": Choice([0.9])})],
        changes=tuned,
    ),
    "FrozenPrefixCache": Method(lambda: [scripted()], lambda: [scripted({})], cached=True),
    "GraphPipelineStrategy": Method(
        list,
        list,
        changes=micro_batches,
        several_processes=False,  # its own tests have several
        # Stages that are named: others follow from measured times, which no two runs share.
        strategy=lambda active: GraphPipelineStrategy(1, micro_batches=2 if active else 1, stages={"all": ["net"]}),
        dropout=0,
    ),
}
# A process takes seconds to start: only where it may matter.
WITH_A_PROCESS = METHODS | {
    "background": Method(
        lambda: [guided(eager_policy(), background=True, timeout_s=600.0)],
        lambda: [guided(never(), background=True, timeout_s=600.0)],
    )
}
# `test_trial.py` has the resumed runs: those of the contract are too short for a trial.
WITH_A_TRIAL = METHODS | {"trial": Method(lambda: [guided(FreezingPolicy(pretrained=True))])}
