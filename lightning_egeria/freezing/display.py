"""What knowledge-guided freezing logs: metrics, and why nothing froze."""

from __future__ import annotations

import math

import lightning.pytorch as pl

from lightning_egeria.freezing.guide import Guide
from lightning_egeria.training.notices import Notices
from lightning_egeria.training.observers import Observer
from lightning_egeria.upstream.lightning import logging_step


def share_of_step(guide: Guide, depth: int) -> float | None:
    """Return the first ``depth`` layer modules' share of a step with nothing frozen; None if not measured."""
    values = guide.comparison.costs.layer_shares(len(guide.freezer.chain))[:depth]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def tell_why_nothing_froze(guide: Guide, notices: Notices) -> None:
    """Say why a run froze nothing, and what to do, if there is a reason beside layers that still train."""
    if held_back := getattr(guide.policy, "held_back", None):
        notices.warn(
            f"nothing froze: {held_back}. A model trained from scratch freezes only after its learning rate has "
            "dropped to half its peak. Use a decaying schedule, or FreezingPolicy(pretrained=True) if you fine-tune "
            "trained weights"
        )
    if guide.freezer.ranks.leads and (reason := _why_evaluations_said_nothing(guide)) is not None:
        notices.inform(f"nothing froze: {reason}")


def _why_evaluations_said_nothing(guide: Guide) -> str | None:
    """Return why the policy saw few or no evaluations, and what to do; None if it saw enough, or needs none."""
    counts, every = guide.comparison.evaluations.counts, guide.comparison.evaluate_every_n_steps
    lost = counts.late + counts.dropped
    if not guide.policy.wants_reference or counts.failed:
        return None
    if counts.done + lost == 0:
        return f"the run ended before the first evaluation, after {every} steps. Lower evaluate_every_n_steps"
    if counts.late and lost > counts.done:
        return (
            f"{lost} of {lost + counts.done} evaluations came late or were dropped. Leave a core idle for the "
            "reference model, raise evaluate_every_n_steps, or set background=False"
        )
    return None


class MetricsLog(Observer):
    """Logs the state to the Trainer's loggers, under ``egeria/``, after each evaluation step and change of depth.

    Add it behind the comparison.

    Args:
        trainer: the Trainer.
        guide: guide of the run.
    """

    def __init__(self, trainer: pl.Trainer, guide: Guide) -> None:
        self._trainer = trainer
        self._guide = guide
        self._logged = self._now()

    def optimizer_step(self, step: int) -> None:
        """Log if there is something new."""
        now = self._now()
        if now != self._logged:
            self._logged = now
            log_metrics(self._trainer, self._guide)

    def _now(self) -> tuple[int, int]:
        return len(self._guide.freezer.events), self._guide.comparison.next_evaluation


def log_metrics(trainer: pl.Trainer, guide: Guide) -> None:
    """Log the state to the Trainer's loggers, under ``egeria/``."""
    if not trainer.loggers:
        return
    prefix, comparison = guide.freezer.prefix, guide.comparison
    chain, depth, counts = prefix.chain, prefix.depth, comparison.evaluations.counts
    metrics: dict[str, float] = {
        "egeria/frozen_depth": depth,
        "egeria/frozen_parameters": _frozen_share_of_parameters(guide),
        "egeria/evaluations_done": counts.done,
        "egeria/evaluations_late": counts.late,
        "egeria/evaluations_dropped": counts.dropped,
        "egeria/reference_age": comparison.reference_age,
    }
    if guide.freezer.ranks.several:
        active = prefix.gradient_bytes(depth)
        metrics["egeria/gradient_bytes"] = active
        metrics["egeria/gradient_bytes_saved"] = prefix.gradient_bytes(0) - active
    frozen_time = share_of_step(guide, depth)
    if frozen_time is not None:
        metrics["egeria/frozen_step_time"] = frozen_time
    slopes = guide.last_evaluation.slopes if guide.last_evaluation is not None else ()
    for kind, values in (("plasticity", guide.plasticity or ()), ("slope", slopes)):
        for name, value in list(zip(chain.names, values, strict=False))[depth:]:
            if math.isfinite(value):
                metrics[f"egeria/{kind}/{name}"] = value
    step = logging_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def _frozen_share_of_parameters(guide: Guide) -> float:
    module, chain = guide.freezer.prefix.module, guide.freezer.chain
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    frozen = sum(sizes[name] for name in chain.prefix_parameters(guide.freezer.depth))
    return frozen / max(1, sum(sizes.values()))
