"""Which samples are kept: those whose loss is high among recent losses, more often."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.methods.selecting.window import Window


class SelectionRule:
    """Keeps a sample with probability ``percentile ** beta``: about 1 / (beta + 1) of all samples.

    The percentile of a loss is the share of the last losses, those of its own batch included, that are smaller; of
    equal losses, the mean over their places. NaN counts as the largest loss.

    Args:
        beta: how strongly high losses are preferred; 0 keeps every sample.
        history: number of last losses that a loss is compared with.

    Raises:
        ArgumentError: ``beta`` is negative or not finite, or ``history`` is below 1.

    >>> SelectionRule(beta=2, history=4).probabilities(np.array([3.0, 1.0, 2.0, 2.0])).tolist()
    [0.5625, 0.0, 0.140625, 0.140625]
    """

    def __init__(self, beta: float = 1, history: int = 1024) -> None:
        if not hasattr(beta, "__float__") or not 0 <= beta < np.inf:
            raise ArgumentError(f"beta must be a finite number of at least 0, got {beta!r}")
        check_integers(1, history=history)
        self.beta = beta
        self.history = history
        self._last: NDArray[np.float64] = np.empty(0)

    @property
    def needs_losses(self) -> bool:
        """Whether the probabilities depend on the losses."""
        return self.beta > 0

    def probabilities(self, losses: NDArray[np.floating]) -> NDArray[np.float64]:
        """Add the losses of a batch to the last losses, and return the probability of keeping each sample.

        Args:
            losses: shape ``(samples,)``.

        Raises:
            ArgumentError: the losses are not one-dimensional, or more than ``history``.
        """
        if losses.ndim != 1:
            raise ArgumentError(
                f"losses must have one dimension, one value for each sample, got the shape {losses.shape}"
            )
        if len(losses) > self.history:
            raise ArgumentError(
                f"history must be at least the batch size, got {self.history} and a batch of {len(losses)} samples"
            )
        self._last = np.concatenate([self._last, losses])[-self.history :]
        ordered, own = np.sort(self._last), losses.astype(np.float64)
        first, behind = (np.searchsorted(ordered, own, side=side) for side in ("left", "right"))
        return np.asarray(((first + behind - 1) / 2 / max(len(ordered), 1)) ** self.beta)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the last losses, oldest first."""
        return {"last": self._last.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore the last losses."""
        self._last = np.asarray(state["last"], dtype=np.float64)[-self.history :]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is selected, and how.

    Attributes:
        rule: gives the probability of keeping a sample.
        window: when samples are selected.
        share: share of each batch to keep; None fills whole batches with the selected samples.
        seed: of the random numbers.
    """

    rule: SelectionRule
    window: Window
    share: float | None
    seed: int


def draw(probabilities: NDArray[np.floating], generator: np.random.Generator) -> NDArray[np.bool_]:
    """Return which samples are kept, shape ``(samples,)``: one random number each, in order.

    Args:
        probabilities: shape ``(samples,)``.
        generator: advances by one number for each sample.
    """
    return np.asarray(generator.random(len(probabilities)) < probabilities)


def draw_fixed(probabilities: NDArray[np.floating], count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return ``count`` different samples, in order, drawn in proportion to their probabilities.

    Each sample gets the key ``log(u) / p`` of a random number ``u``, and the largest keys win (Efraimidis and
    Spirakis, 2006). Samples of probability 0 are taken where there are too few others.

    Args:
        probabilities: shape ``(samples,)``.
        count: how many to take, at most the number of samples.
        generator: advances by one number for each sample.

    >>> draw_fixed(np.array([0.0, 1.0, 0.0, 1.0]), 2, np.random.default_rng(0)).tolist()
    [1, 3]
    """
    numbers = np.maximum(generator.random(len(probabilities)), np.finfo(np.float64).tiny)
    with np.errstate(divide="ignore"):
        keys = np.log(numbers) / probabilities
    return np.sort(np.lexsort((numbers, keys))[len(keys) - count :]).astype(np.int64)
