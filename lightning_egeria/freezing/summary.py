"""What freezing did to a run, put together from the engine's measurements."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_egeria.freezing.engine import FreezingEngine, FreezingEvent
from lightning_egeria.report import LayerModuleSavings, Savings


def summarize(engine: FreezingEngine, events: Sequence[FreezingEvent]) -> Savings:
    """The savings so far of the run that ``engine`` belongs to, with its ``events``."""
    costs, names = engine.costs, engine.prefix.chain.names
    shares = costs.layer_shares(len(names))
    modules = []
    for index, name in enumerate(names):
        frozen_at = None
        for event in events:
            frozen_at = (event.step if frozen_at is None else frozen_at) if event.depth > index else None
        modules.append(LayerModuleSavings(name, frozen_at, shares[index]))
    saved = costs.seconds_saved()
    depth = events[-1].depth if events else 0
    return Savings(
        layer_modules=tuple(modules),
        frozen_depth=depth,
        step_seconds_before=costs.mean_seconds(0),
        step_seconds_after=costs.mean_seconds(depth) if depth else None,
        evaluation_seconds=costs.evaluation_seconds,
        seconds_saved=None if saved is None else saved - costs.evaluation_seconds,
        evaluations_done=engine.evaluations.counts.done,
        evaluations_late=engine.evaluations.counts.late,
        evaluations_dropped=engine.evaluations.counts.dropped,
        reference_precision=engine.evaluations.precision,
        bytes_per_evaluation=engine.pool.evaluation_bytes,
        bytes_per_snapshot=engine.pool.snapshot_bytes,
        gradient_bytes_before=engine.prefix.gradient_bytes(0) if engine.ranks.several else None,
        gradient_bytes_after=engine.prefix.gradient_bytes(depth) if engine.ranks.several else None,
    )
