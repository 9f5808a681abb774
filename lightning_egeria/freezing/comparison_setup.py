"""Setting up the comparison with the reference model for one run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

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


def set_up_comparison(
    trainer: pl.Trainer,
    freezer: Freezer,
    policy: Policy,
    notices: Notices,
    state: Mapping[str, Any] | None,
    *,
    evaluate_every_n_steps: int | None,
    samples: int,
    precision: Precision,
    background: bool | None,
    timeout_s: float,
    deterministic: bool | None,
) -> ReferenceComparison:
    """Return a new comparison, with a value for each argument that is None.

    Args:
        trainer: the Trainer, with its data loaders.
        freezer: freezer of the model.
        policy: the policy, after `Policy.start`.
        notices: takes log lines and warnings.
        state: state of the comparison in the checkpoint; None without a checkpoint.
        evaluate_every_n_steps: as for `KnowledgeGuidedFreezing`, and so are the others.
        samples: ``evaluation_samples``.
        precision: ``reference_precision``; a precision in ``state`` replaces it.
        background: ``background``.
        timeout_s: ``timeout_s``.
        deterministic: ``deterministic``.
    """
    waits = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    crops = None
    if state is not None:
        precision, crops = state["precision"] or precision, state["crops"] or None
    if precision == "auto" and waits:
        precision = "float32"  # the fastest precision may differ from run to run
    make = functools.partial(ReferenceModel, freezer.chain, samples, precision, crops)
    background = has_idle_core(trainer.strategy.root_device) if background is None else background
    return ReferenceComparison(
        freezer,
        policy,
        ReferenceRunner(make, freezer.chain.entries, background, timeout_s),
        evaluate_every_n_steps or evaluation_interval(trainer),
        samples,
        wait_s=timeout_s if waits else 0.0,
        adapt=evaluate_every_n_steps is None,
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
