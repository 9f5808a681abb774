"""What partial backprop left out, and the gradients that each layer module got."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class RankSavings:
    """The savings of one rank.

    Attributes:
        backward_share: seconds of its backward passes, as a share of full ones; None if not measured.
        received_bytes: bytes of gradients that the rank received.
        whole_bytes: bytes that the rank would have received in full steps.
    """

    backward_share: float | None
    received_bytes: float
    whole_bytes: float


@dataclasses.dataclass(frozen=True)
class PartialSavings:
    """The work that partial backprop left out in one `fit`.

    Attributes:
        steps: optimizer steps since the layer modules were found.
        ranks: the savings of each rank. Backward shares of all ranks use the times of this rank.
        contributions: number of gradients of each layer module, over steps and ranks, resumed runs included.
        activation_bytes: bytes that autograd saved in a batch of this rank, by the number of layer modules in front of
            the suffix.
    """

    steps: int
    ranks: tuple[RankSavings, ...]
    contributions: Mapping[str, int]
    activation_bytes: Mapping[int, int]

    def describe(self) -> list[str]:
        r"""Return lines for the log.

        >>> ranks = (RankSavings(0.5, 3e6, 4e6), RankSavings(1.0, 2e6, 4e6))
        >>> savings = PartialSavings(8, ranks, {"stem": 8, "deep": 16}, {0: 4_000_000, 1: 1_000_000})
        >>> print("\n".join(savings.describe()))
        rank 0: 50 % of the backward, 3.0 MB of gradients received, 4.0 MB in whole steps
        rank 1: 100 % of the backward, 2.0 MB of gradients received, 4.0 MB in whole steps
        gradients of the layer modules in 8 steps of 2 ranks: 'stem' 8, 'deep' 16
        activations saved in a batch by depth: 0: 4.0 MB, 1: 1.0 MB
        """
        lines = []
        for number, rank in enumerate(self.ranks):
            share = "an unmeasured share" if rank.backward_share is None else f"{100 * rank.backward_share:.0f} %"
            exchanged = (
                f", {rank.received_bytes / 1e6:.1f} MB of gradients received, {rank.whole_bytes / 1e6:.1f} MB in whole "
                "steps"
            )
            lines.append(f"rank {number}: {share} of the backward{exchanged if len(self.ranks) > 1 else ''}")
        counts = ", ".join(f"{name!r} {count}" for name, count in self.contributions.items())
        lines.append(f"gradients of the layer modules in {self.steps} steps of {len(self.ranks)} ranks: {counts}")
        if self.activation_bytes:
            saved = ", ".join(f"{depth}: {size / 1e6:.1f} MB" for depth, size in sorted(self.activation_bytes.items()))
            lines.append(f"activations saved in a batch by depth: {saved}")
        return lines


class SuffixCounts:
    """Counts the steps of each rank by depth, and the bytes that it received.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.steps = 0
        self._by_depth: list[Counter[tuple[int, int]]] = [Counter() for _ in range(ranks)]  # (frozen, depth)
        self._received = [0.0] * ranks
        self._whole = [0.0] * ranks

    def add(self, depths: Sequence[int], frozen: int, received: Sequence[float], whole: Sequence[float]) -> None:
        """Add a step.

        Args:
            depths: number of layer modules in front of the suffix of each rank.
            frozen: number of frozen ones.
            received: bytes of gradients that each rank received.
            whole: bytes that it would have received in a whole step.
        """
        self.steps += 1
        for rank, depth in enumerate(depths):
            self._by_depth[rank][frozen, depth] += 1
            self._received[rank] += received[rank]
            self._whole[rank] += whole[rank]

    def savings(
        self, shares: Sequence[float] | None, contributions: Mapping[str, int], activation_bytes: Mapping[int, int]
    ) -> PartialSavings:
        """Return what was left out.

        Args:
            shares: share of a backward that is left at each depth; None if not measured.
            contributions: as in `PartialSavings`.
            activation_bytes: as in `PartialSavings`.
        """
        ranks = zip(self._by_depth, self._received, self._whole, strict=True)
        return PartialSavings(
            self.steps,
            tuple(RankSavings(_share(counts, shares), received, whole) for counts, received, whole in ranks),
            dict(contributions),
            dict(activation_bytes),
        )


def _share(counts: Counter[tuple[int, int]], shares: Sequence[float] | None) -> float | None:
    """Seconds of the counted backwards, as a share of those without a suffix behind the same frozen layer modules."""
    if shares is None or not counts:
        return None
    done = sum(shares[depth] * count for (_, depth), count in counts.items())
    return done / sum(shares[frozen] * count for (frozen, _), count in counts.items())
