"""Setting up the comparison with the reference model for one run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch

from lightning_egeria.freezing.comparison import ReferenceComparison
from lightning_egeria.freezing.policy import Policy
from lightning_egeria.freezing.reference import Precision, ReferenceModel
from lightning_egeria.freezing.runner import ReferenceRunner, has_idle_core
from lightning_egeria.training.freezer import Freezer
from lightning_egeria.training.notices import Notices

EVALUATIONS_PER_RUN = 50  # bounds the evaluations' cost by that many forwards, however long the run
EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN = 100
LEAST_STEPS_BETWEEN_EVALUATIONS = 8  # in fewer, whatever learns hardly moves either


class ComparisonArguments(Protocol):
    """The arguments of `KnowledgeGuidedFreezing` that the comparison follows."""

    evaluate_every_n_steps: int | None
    evaluation_samples: int
    reference_precision: Precision
    background: bool | None
    timeout_s: float
    deterministic: bool | None


def set_up_comparison(
    trainer: pl.Trainer,
    freezer: Freezer,
    policy: Policy,
    notices: Notices,
    state: Mapping[str, Any] | None,
    arguments: ComparisonArguments,
) -> ReferenceComparison:
    """Return a new comparison, with a value for each argument that is None.

    Args:
        trainer: the Trainer, with its data loaders.
        freezer: freezer of the model.
        policy: the policy, after `Policy.start`.
        notices: takes log lines and warnings.
        state: state of the comparison in the checkpoint; None without a checkpoint.
        arguments: those of the callback; a precision in ``state`` replaces theirs.
    """
    samples, timeout_s, every = arguments.evaluation_samples, arguments.timeout_s, arguments.evaluate_every_n_steps
    waits = arguments.deterministic
    if waits is None:
        waits = torch.are_deterministic_algorithms_enabled()
    precision, crops, reason = arguments.reference_precision, None, "as requested"
    if state is not None:
        precision, crops = state["precision"] or precision, state["crops"] or None
    if precision == "auto" and waits:
        precision, reason = "float32", "the run is deterministic"  # the fastest may differ from run to run
    make = functools.partial(ReferenceModel, freezer.chain, samples, precision, crops, reason)
    background = arguments.background
    if background is None:
        background = has_idle_core(trainer.strategy.root_device, trainer.num_devices)
    return ReferenceComparison(
        freezer,
        policy,
        ReferenceRunner(make, freezer.chain.entries, background, timeout_s),
        every or evaluation_interval(trainer),
        samples,
        wait_s=timeout_s if waits else 0.0,
        adapt=every is None,
        notices=notices,
    )


def evaluation_interval(trainer: pl.Trainer) -> int:
    """Return the optimizer steps between two evaluations that suit the length of the run.

    Args:
        trainer: the Trainer, with its data loaders.
    """
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 0:
        return EVALUATE_EVERY_N_STEPS_OF_ENDLESS_RUN
    return max(LEAST_STEPS_BETWEEN_EVALUATIONS, round(steps / EVALUATIONS_PER_RUN))
