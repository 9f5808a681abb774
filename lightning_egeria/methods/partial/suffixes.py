"""Which suffix of the layer chain each step computes gradients of."""

from __future__ import annotations

import math

from lightning_egeria.errors import ArgumentError


class SuffixCycle:
    """A cycle of suffixes, one for each step: the whole chain first, then shorter ones in equal distances.

    The cycle has ``n`` steps, the most for which each layer module is in a suffix in at least ``min_share`` of the
    steps, and no more than there are layer modules. Step ``t`` has the last ``ceil((n - t mod n) L / n)`` of ``L``.

    Args:
        layer_modules: number of layer modules, at least 1.
        min_share: share of the steps in which the first layer module gets a gradient, at least; in (0, 1].

    Attributes:
        lengths: number of layer modules in the suffix of each step of a cycle.

    Raises:
        ArgumentError: if an argument is out of range.

    >>> SuffixCycle(8, min_share=0.25).lengths
    (8, 6, 4, 2)
    >>> SuffixCycle(3, min_share=0.1).lengths
    (3, 2, 1)
    """

    def __init__(self, layer_modules: int, min_share: float) -> None:
        check_min_share(min_share)
        if layer_modules < 1:
            raise ArgumentError(f"layer_modules must be at least 1, got {layer_modules}")
        steps = min(steps_of_share(min_share), layer_modules)
        self.layer_modules = layer_modules
        self.lengths = tuple(-(-(steps - step) * layer_modules // steps) for step in range(steps))

    def length(self, step: int) -> int:
        """Return the number of layer modules in the suffix.

        Args:
            step: number of optimizer steps so far.
        """
        return self.lengths[step % len(self.lengths)]

    def shares(self) -> tuple[float, ...]:
        """For each layer module, front to back, return the share of the steps whose suffix it is in.

        >>> SuffixCycle(4, min_share=0.5).shares()
        (0.5, 0.5, 1.0, 1.0)
        """
        behind = range(self.layer_modules - 1, -1, -1)  # layer modules behind each one
        return tuple(sum(length > number for length in self.lengths) / len(self.lengths) for number in behind)


def steps_of_share(min_share: float) -> int:
    """Return the most steps of a cycle of which one is such a share.

    >>> steps_of_share(0.25), steps_of_share(0.4), steps_of_share(0.1)
    (4, 2, 10)
    """
    return math.floor(1 / min_share + 1e-9)  # 1 / 0.1 and its like may round down


def check_min_share(min_share: float) -> None:
    """Check the argument.

    Raises:
        ArgumentError: if it is not in (0, 1].
    """
    if not hasattr(min_share, "__float__") or not 0 < min_share <= 1:
        raise ArgumentError(f"min_share must be a share in (0, 1], got {min_share!r}")
