"""What a run of knowledge-guided freezing logs to the Trainer's loggers."""

from __future__ import annotations

import math

import lightning.pytorch as pl

from lightning_egeria.core.training.observers import Observer
from lightning_egeria.freezing.decide import Decider
from lightning_egeria.freezing.savings import share_of_step
from lightning_egeria.upstream.lightning import logging_step


class MetricsLog(Observer):
    """Logs the state to the Trainer's loggers, under ``egeria/``, after each evaluation step and change of depth.

    Add it behind the comparison.

    Args:
        trainer: the Trainer.
        decider: decider of the run.
    """

    def __init__(self, trainer: pl.Trainer, decider: Decider) -> None:
        self._trainer = trainer
        self._decider = decider
        self._logged = self._now()

    def optimizer_step(self, step: int) -> None:
        """Log if there is something new."""
        now = self._now()
        if now != self._logged:
            self._logged = now
            log_metrics(self._trainer, self._decider)

    def _now(self) -> tuple[int, int]:
        return len(self._decider.freezer.events), self._decider.comparison.next_evaluation


def log_metrics(trainer: pl.Trainer, decider: Decider) -> None:
    """Log the state to the Trainer's loggers, under ``egeria/``."""
    if not trainer.loggers:
        return
    prefix, comparison = decider.freezer.prefix, decider.comparison
    chain, depth, counts = prefix.chain, prefix.depth, comparison.evaluations.counts
    metrics: dict[str, float] = {
        "egeria/frozen_depth": depth,
        "egeria/frozen_parameters": _frozen_share_of_parameters(decider),
        "egeria/evaluations_done": counts.done,
        "egeria/evaluations_late": counts.late,
        "egeria/evaluations_dropped": counts.dropped,
        "egeria/reference_age": comparison.reference_age,
    }
    if decider.freezer.ranks.several:
        active = prefix.gradient_bytes(depth)
        metrics["egeria/gradient_bytes"] = active
        metrics["egeria/gradient_bytes_saved"] = prefix.gradient_bytes(0) - active
    frozen_time = share_of_step(decider, depth)
    if frozen_time is not None:
        metrics["egeria/frozen_step_time"] = frozen_time
    slopes = decider.last_evaluation.slopes if decider.last_evaluation is not None else ()
    for kind, values in (("plasticity", decider.plasticity or ()), ("slope", slopes)):
        for name, value in list(zip(chain.names, values, strict=False))[depth:]:
            if math.isfinite(value):
                metrics[f"egeria/{kind}/{name}"] = value
    step = logging_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def _frozen_share_of_parameters(decider: Decider) -> float:
    module, chain = decider.freezer.prefix.module, decider.freezer.chain
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    frozen = sum(sizes[name] for name in chain.prefix_parameters(decider.freezer.depth))
    return frozen / max(1, sum(sizes.values()))
