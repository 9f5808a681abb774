"""Computing the savings of a run from its measurements."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_egeria.freezing.guide import Guide
from lightning_egeria.freezing.savings import LayerModuleSavings, Savings
from lightning_egeria.training.freezer import FreezingEvent


def summarize(guide: Guide, events: Sequence[FreezingEvent]) -> Savings:
    """Return the savings so far.

    Args:
        guide: guide of the run.
        events: every freeze and unfreeze of the run.
    """
    freezer, comparison = guide.freezer, guide.comparison
    costs, names = comparison.costs, freezer.chain.names
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
        step_seconds_before=costs.median_seconds(0),
        step_seconds_after=costs.median_seconds(depth) if depth else None,
        evaluation_seconds=costs.evaluation_seconds,
        seconds_saved=None if saved is None else saved - costs.evaluation_seconds,
        evaluations_done=comparison.evaluations.counts.done,
        evaluations_late=comparison.evaluations.counts.late,
        evaluations_dropped=comparison.evaluations.counts.dropped,
        reference_precision=comparison.evaluations.precision,
        bytes_per_evaluation=comparison.runner.evaluation_bytes,
        bytes_per_snapshot=comparison.runner.snapshot_bytes,
        gradient_bytes_before=freezer.prefix.gradient_bytes(0) if freezer.ranks.several else None,
        gradient_bytes_after=freezer.prefix.gradient_bytes(depth) if freezer.ranks.several else None,
        held_back=getattr(guide.policy, "held_back", None) if not events else None,
        points_lost_in_proof=guide.points_lost_in_proof if depth else None,
    )
