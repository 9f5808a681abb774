"""What a callback that freezes logs to the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import lightning.pytorch as pl

from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.upstream.lightning import logging_step


class MetricsLog(Observer):
    """Logs metrics to the Trainer's loggers after each step behind which there is something new.

    Args:
        trainer: the Trainer.
        metrics: returns the metrics.
        news: returns a value that differs when there is something new.
    """

    def __init__(
        self, trainer: pl.Trainer, metrics: Callable[[], Mapping[str, float]], news: Callable[[], object]
    ) -> None:
        self._trainer, self._metrics, self._news = trainer, metrics, news
        self._logged = news()

    def optimizer_step(self, step: int) -> None:
        """Log if there is something new."""
        now = self._news()
        if now == self._logged:
            return
        self._logged = now
        if self._trainer.loggers:
            metrics, at = dict(self._metrics()), logging_step(self._trainer)
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics, step=at)


def metrics_of(freezer: Freezer) -> dict[str, float]:
    """Return what is frozen, and what ranks exchange."""
    prefix = freezer.prefix
    sizes = {name: parameter.numel() for name, parameter in prefix.module.named_parameters()}
    frozen = sum(sizes[name] for name in prefix.chain.prefix_parameters(prefix.depth))
    metrics: dict[str, float] = {
        "egeria/frozen_depth": prefix.depth,
        "egeria/frozen_parameters": frozen / max(1, sum(sizes.values())),
    }
    if freezer.ranks.several:
        active = prefix.gradient_bytes(prefix.depth)
        metrics["egeria/gradient_bytes"] = active
        metrics["egeria/gradient_bytes_saved"] = prefix.gradient_bytes(0) - active
    return metrics
