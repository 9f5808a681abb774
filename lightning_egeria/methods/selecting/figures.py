"""What selection shows in a report."""

from __future__ import annotations

import math

from lightning_egeria.core.training.panels import Panel
from lightning_egeria.methods.selecting.stats import SelectionStats, bin_edges


def figures_of(stats: SelectionStats) -> list[Panel]:
    """Return the share that was trained, the losses of kept and left samples, and counted beside measured cost.

    >>> stats = SelectionStats()
    >>> stats.count(0, seen=8, trained=8)
    >>> stats.count(1, seen=8, scored=8, trained=4)
    >>> figures_of(stats)[0].series["trained"]
    [(0, 1.0), (1, 0.5)]
    """
    if not stats.epochs:
        return []
    return [_shares(stats), _losses(stats), _cost(stats)]


def _shares(stats: SelectionStats) -> Panel:
    return Panel(
        "selection_share",
        "Samples that are trained",
        "Share of each epoch's samples that were trained, and share whose loss was computed for the selection.",
        "epoch",
        "share of the samples",
        {
            "trained": [(epoch, trained / seen) for epoch, seen, _, trained in stats.epochs],
            "scored": [(epoch, scored / seen) for epoch, seen, scored, _ in stats.epochs],
        },
    )


def _losses(stats: SelectionStats) -> Panel:
    edges = [math.log10(edge) for edge in bin_edges()]
    width = edges[1] - edges[0]
    middles = [edge - width / 2 for edge in edges] + [edges[-1] + width / 2]
    found = {"kept": stats.kept_losses, "dropped": stats.left_losses}
    used = [number for number in range(len(middles)) if any(counts[number] for counts in found.values())]
    shown = range(used[0], used[-1] + 1) if used else ()
    return Panel(
        "selection_losses",
        "Losses of kept and dropped samples",
        "Number of samples by the logarithm of their loss, over the epochs in which samples were selected.",
        "log10 of the loss",
        "samples",
        {name: [(middles[number], counts[number]) for number in shown] for name, counts in found.items()},
        kind="bars",
    )


def _cost(stats: SelectionStats) -> Panel:
    whole = {epoch for epoch, seen, scored, trained in stats.epochs if trained == seen and not scored}
    seconds = dict(stats.seconds)
    typical = min((seconds[epoch] for epoch in whole if epoch in seconds), default=0.0)
    return Panel(
        "selection_cost",
        "Cost of an epoch",
        f"As a share of an epoch that trains all samples. Counted: {stats.scored} forward passes to select, and "
        f"{stats.trained} forward and backward passes to train; a backward pass counts as two forward passes. "
        "Measured: without validation, compared with the fastest full epoch.",
        "epoch",
        "share of a full epoch",
        {
            "counted": [(epoch, (scored + 3 * trained) / (3 * seen)) for epoch, seen, scored, trained in stats.epochs],
            "measured": [(epoch, one / typical) for epoch, one in stats.seconds] if typical else [],
        },
    )
