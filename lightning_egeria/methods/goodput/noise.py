"""The noise of gradients: moving averages of |G|^2 and of the variance at the initial batch size.

``n`` gradients of ``b`` samples each have squared norms of mean ``local``; the squared norm of their mean is ``total``.
In expectation, ``local = |G|^2 + tr(S) / b`` and ``total = |G|^2 + tr(S) / (n b)``, with ``G`` the true gradient and
``S`` the covariance of the gradient of one sample. Two equations, two unknowns (McCandlish et al., arXiv:1812.06162,
appendix A; Johnson et al., arXiv:2007.05105; Qiao et al., OSDI 2021, section 3.1):

* ``|G|^2 = (n total - local) / (n - 1)``
* ``tr(S) = b n (local - total) / (n - 1)``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_egeria.cluster.goodput import gain

Values = NDArray[np.float64]
SMOOTHING = 0.999  # of an estimate from one initial batch


class GradientNoise:
    """Averages of ``|G|^2`` and of ``tr(S) / M0`` by parameter group, for the initial batch size ``M0``.

    An estimate from ``scale`` initial batches counts as ``scale`` of them: the average keeps ``0.999 ** scale`` of what
    it was. It is divided by its weights so far, so the first estimate is the first average.

    Attributes:
        estimates: number of estimates in the averages.
        biased: whether they come from consecutive gradients, between which the weights have moved.

    >>> noise = GradientNoise(1)
    >>> noise.add([5.0], [3.0], count=2, scale=2.0)
    >>> noise.squared_norm, noise.variance  # of a gradient of M0 samples
    (1.0, 4.0)
    >>> noise.gains(2.0).tolist(), noise.gain(1.0)
    ([1.6666666666666667], 1.0)
    """

    def __init__(self, groups: int) -> None:
        self.estimates = 0
        self.biased = False
        self._norms, self._variances, self._weight = np.zeros(groups), np.zeros(groups), 0.0

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self.estimates > 0

    @property
    def squared_norm(self) -> float:
        """``|G|^2`` over all groups; not below 0."""
        return max(0.0, float(self._average(self._norms).sum()))

    @property
    def variance(self) -> float:
        """``tr(S) / M0`` over all groups; not below 0."""
        return max(0.0, float(self._average(self._variances).sum()))

    @property
    def scale(self) -> float:
        """The gradient noise scale ``tr(S) / |G|^2`` in initial batches; infinite without a true gradient."""
        return self.variance / self.squared_norm if self.squared_norm > 0 else np.inf

    def gains(self, scale: float) -> Values:
        """For each group, return how many initial steps a step at ``scale`` times the initial batch size is worth.

        As `gain`, of the estimates so far.
        """
        return gain(np.maximum(self._average(self._norms), 0), np.maximum(self._average(self._variances), 0), scale)

    def gain(self, scale: float) -> float:
        """Return the same over all groups."""
        return float(gain(self.squared_norm, self.variance, scale))

    def add(
        self, local: ArrayLike, total: ArrayLike, count: int, scale: float, biased: bool = False, steps: int = 1
    ) -> None:
        """Add an estimate. Does nothing if a norm is not finite, or for a biased one where there are others.

        Args:
            local: for each group, the mean of the squared norms of ``count`` gradients.
            total: for each group, the squared norm of their mean.
            count: number of gradients, at least 2.
            scale: samples of all of them together, in initial batches.
            biased: whether they are consecutive gradients.
            steps: steps that the estimate stands for.
        """
        local, total = np.asarray(local, float), np.asarray(total, float)
        if not (np.isfinite(local).all() and np.isfinite(total).all()) or (biased and self.known and not self.biased):
            return
        if self.biased and not biased:
            self.reset()
        keep = SMOOTHING ** (scale * steps)
        self._norms = keep * self._norms + (1 - keep) * (count * total - local) / (count - 1)
        self._variances = keep * self._variances + (1 - keep) * (local - total) * scale / (count - 1)
        self._weight = keep * self._weight + (1 - keep)
        self.biased, self.estimates = biased, self.estimates + 1

    def reset(self, groups: int | None = None) -> None:
        """Forget all estimates, because other parameters train from now on, maybe in another number of groups."""
        self.__init__(groups or len(self._norms))  # type: ignore[misc]  # there is no subclass

    def state(self) -> dict[str, Any]:
        """Return the averages, in plain types."""
        return {
            "norms": self._norms.tolist(),
            "variances": self._variances.tolist(),
            "weight": self._weight,
            "estimates": self.estimates,
            "biased": self.biased,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> GradientNoise:
        """Return the averages from `state`."""
        norms: Sequence[float] = state["norms"]
        noise = cls(len(norms))
        noise._norms, noise._variances = np.asarray(norms, float), np.asarray(state["variances"], float)
        noise._weight, noise.estimates = float(state["weight"]), int(state["estimates"])
        noise.biased = bool(state["biased"])
        if noise._variances.shape != noise._norms.shape:
            raise ValueError(f"{len(norms)} norms and {len(noise._variances)} variances")
        return noise

    def _average(self, values: Values) -> Values:
        return values / self._weight if self._weight else values
