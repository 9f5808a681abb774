"""Figures of partial backprop, as plain numbers."""

from __future__ import annotations

from lightning_egeria.core.training.panels import Panel
from lightning_egeria.methods.partial.savings import PartialSavings


def panels_of_savings(savings: PartialSavings) -> list[Panel]:
    """Return what a run left out: by layer module, by rank, and by the depth in front of the suffix.

    Args:
        savings: of the run.
    """
    ranks: dict[str, list[tuple[float, float]]] = {"backward": [], "bytes received": []}
    for number, rank in enumerate(savings.ranks):
        if rank.backward_share is not None:
            ranks["backward"].append((number, 100 * rank.backward_share))
        if rank.whole_bytes:
            ranks["bytes received"].append((number, 100 * rank.received_bytes / rank.whole_bytes))
    return [
        Panel(
            "partial_gradients",
            "Gradients by layer module",
            "Over all steps and ranks, front to back.",
            "layer module",
            "gradients",
            {"gradients": list(enumerate(savings.contributions.values()))},
            kind="bars",
        ),
        Panel(
            "partial_ranks",
            "Work of each rank",
            "Shares of a full step.",
            "rank",
            "%",
            {name: points for name, points in ranks.items() if points},
            kind="bars",
        ),
        Panel(
            "partial_activations",
            "Activations that a batch keeps",
            "By the number of layer modules in front of the suffix, on rank 0.",
            "layer modules without a gradient",
            "MB",
            {"activations": [(depth, size / 1e6) for depth, size in sorted(savings.activation_bytes.items())]},
        ),
    ]
