"""What selection has done, and the cost that it implies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 32
_EDGES = np.logspace(-4, 4, BINS - 1)  # of losses; the first and the last bin are open


@dataclasses.dataclass
class SelectionStats:
    """What selection has done in training, in the last fit so far.

    Attributes:
        seen: samples of forward batches.
        scored: samples whose loss a selection forward computed.
        trained: samples of training batches.
        whole: of these, samples of batches that were trained whole.
        dropped: samples that were selected, but not trained: a single one that is left at the end of an epoch, and
            more with several processes.
        epochs: for each epoch, its number and the samples seen, scored and trained in it.
        seconds: for each epoch that is over, its number and its seconds without validation.
        kept_losses: number of samples that were kept by their loss, for each of `bin_edges` and beyond.
        left_losses: the same, of samples that were left out.
        off: why nothing is selected; None while samples are.
    """

    seen: int = 0
    scored: int = 0
    trained: int = 0
    whole: int = 0
    dropped: int = 0
    epochs: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    seconds: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    kept_losses: list[int] = dataclasses.field(default_factory=lambda: [0] * BINS)
    left_losses: list[int] = dataclasses.field(default_factory=lambda: [0] * BINS)
    off: str | None = "fit has not begun"

    @property
    def share(self) -> float:
        """Share of the seen samples that were trained; 1 before the first."""
        return self.trained / self.seen if self.seen else 1.0

    def cost(self, backward_over_forward: float = 2.0) -> float:
        """Return the cost of the run as a share of one that trains each sample it sees.

        A scored sample costs a forward, a trained one a forward and a backward.

        >>> SelectionStats(seen=6, scored=6, trained=3).cost()
        0.8333333333333334
        """
        whole = 1 + backward_over_forward
        return (self.scored + whole * self.trained) / (whole * self.seen) if self.seen else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, in plain types."""
        counts = dataclasses.asdict(self)
        del counts["off"]
        return {
            **counts,
            "epochs": [list(epoch) for epoch in self.epochs],
            "seconds": [list(epoch) for epoch in self.seconds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these counts."""
        for name in ("seen", "scored", "trained", "whole", "dropped"):
            setattr(self, name, int(state[name]))
        self.epochs = [(int(a), int(b), int(c), int(d)) for a, b, c, d in state["epochs"]]
        self.seconds = [(int(epoch), float(seconds)) for epoch, seconds in state["seconds"]]
        self.kept_losses, self.left_losses = list(state["kept_losses"]), list(state["left_losses"])

    def count(self, epoch: int, seen: int = 0, scored: int = 0, trained: int = 0) -> None:
        """Add samples of an epoch."""
        self.seen += seen
        self.scored += scored
        self.trained += trained
        before = self.epochs.pop() if self.epochs and self.epochs[-1][0] == epoch else (epoch, 0, 0, 0)
        self.epochs.append((epoch, before[1] + seen, before[2] + scored, before[3] + trained))

    def count_losses(self, losses: NDArray[np.floating], kept: NDArray[np.bool_]) -> None:
        """Add losses to the histograms."""
        bins = np.searchsorted(_EDGES, losses)
        both = np.bincount(bins + BINS * kept, minlength=2 * BINS).tolist()
        self.left_losses = [old + new for old, new in zip(self.left_losses, both[:BINS], strict=True)]
        self.kept_losses = [old + new for old, new in zip(self.kept_losses, both[BINS:], strict=True)]


def bin_edges() -> list[float]:
    """Return the upper edge of each bin of losses but the last."""
    return [float(edge) for edge in _EDGES]
