"""What the user sees while training goes on: log lines, metrics, and the frozen depth in the progress bar."""

from __future__ import annotations

import logging
import math

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_egeria.freezing.engine import FreezingEngine, FreezingEvent

# A child of Lightning's logger: its lines appear where Lightning's do, whatever the user has set up.
_log = logging.getLogger("lightning.pytorch.lightning_egeria")


def tell_event(event: FreezingEvent, engine: FreezingEngine) -> None:
    """One line for a freeze or unfreeze: what, when, why, and what it saves."""
    names = engine.prefix.chain.names
    share = _known_sum(engine.costs.layer_shares(len(names))[: event.depth])
    saves = f"; they took {share:.0%} of a step" if event.kind == "freeze" and share is not None else ""
    verb = "froze" if event.kind == "freeze" else "unfroze"
    last = f", up to {names[event.depth - 1]!r}" if event.depth else ""
    frozen = f"now {event.depth}/{len(names)} layer modules are frozen{last}"
    if not engine.ranks.leads:
        return
    _log.info(f"step {event.step}: {verb}, {frozen}: {event.reason}{saves}")


def tell_messages(engine: FreezingEngine) -> None:
    """Everything that the engine wants to be said, once."""
    while engine.messages:
        level, text = engine.messages.pop(0)
        if level >= logging.WARNING:
            rank_zero_warn(f"freezing: {text}")
        else:
            _log.info(f"freezing: {text}")


def log_metrics(trainer: pl.Trainer, engine: FreezingEngine) -> None:
    """Send to the Trainer's loggers, under ``egeria/``, what the last evaluation step showed."""
    if not trainer.loggers:
        return
    chain, depth = engine.prefix.chain, engine.prefix.depth
    counts = engine.evaluations.counts
    metrics: dict[str, float] = {
        "egeria/frozen_depth": depth,
        "egeria/frozen_parameters": _frozen_share_of_parameters(engine),
        "egeria/evaluations_done": counts.done,
        "egeria/evaluations_late": counts.late,
        "egeria/evaluations_dropped": counts.dropped,
        "egeria/reference_age": engine.reference_age,
    }
    if engine.ranks.several:
        active = engine.prefix.gradient_bytes(depth)
        metrics["egeria/gradient_bytes"] = active
        metrics["egeria/gradient_bytes_saved"] = engine.prefix.gradient_bytes(0) - active
    frozen_time = _known_sum(engine.costs.layer_shares(len(chain))[:depth])
    if frozen_time is not None:
        metrics["egeria/frozen_step_time"] = frozen_time
    slopes = engine.last_evaluation.slopes if engine.last_evaluation is not None else ()
    for kind, values in (("plasticity", engine.plasticity or ()), ("slope", slopes)):
        for name, value in list(zip(chain.names, values, strict=False))[depth:]:
            if math.isfinite(value):
                metrics[f"egeria/{kind}/{name}"] = value
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # Lightning logs its own at it
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def _frozen_share_of_parameters(engine: FreezingEngine) -> float:
    module, chain = engine.prefix.module, engine.prefix.chain
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    frozen = sum(sizes[name] for name in chain.prefix_parameters(engine.prefix.depth))
    return frozen / max(1, sum(sizes.values()))


def _known_sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
