"""How long a step takes on devices that were never tried: the throughput model of Pollux, fitted to measurements.

Qiao et al., OSDI 2021, section 3.2. A step computes gradients, then averages them between replicas:

* ``T_grad = a_c + b_c * m`` at local batch size ``m``
* ``T_sync = 0`` on one device, ``a + b * (replicas - 2)`` on more; ``a`` and ``b`` differ within a node
  and between nodes
* ``T = (T_grad^g + T_sync^g)^(1/g)``, with ``g`` from 1 (one after the other) to 10 (at the same time)
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]
_LEAST = 1e-8  # of seconds: a logarithm needs more than none
_START = np.array([1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1.001])
_COMPUTE, _BETWEEN, _WITHIN, _GAMMA = slice(0, 2), slice(2, 4), slice(4, 6), 6
# Prefers little overlap, which is easier to fit, and synchronisation that grows little with replicas.
_OVERLAP_PENALTY, _GROWTH_PENALTY = 1e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class ThroughputModel:
    """Predicts the duration of a step.

    Attributes:
        compute: ``a_c, b_c`` in seconds and seconds a sample.
        between: ``a, b`` of the exchange between nodes, in seconds and seconds a replica.
        within: ``a, b`` of the exchange within a node.
        gamma: overlap of the two, from 1 to 10.
    """

    compute: tuple[float, float]
    between: tuple[float, float]
    within: tuple[float, float]
    gamma: float

    def scaled(self, share: float) -> ThroughputModel:
        """Return the model of a job whose gradients take this share of the time, because layers are frozen."""
        return dataclasses.replace(self, compute=(self.compute[0] * share, self.compute[1] * share))

    def gradient_seconds(self, local_batch_size: ArrayLike) -> Values:
        """Return the seconds of a forward and backward pass, in the shape of the argument."""
        return np.asarray(self.compute[0] + self.compute[1] * np.asarray(local_batch_size, float))

    def step_seconds(self, nodes: ArrayLike, replicas: ArrayLike, local_batch_size: ArrayLike) -> Values:
        """Return the seconds of a step without accumulation; the arguments are broadcast."""
        nodes, replicas = np.asarray(nodes), np.asarray(replicas)
        more = np.maximum(replicas - 2, _LEAST)
        sync = np.where(
            nodes > 1,
            self.between[0] + self.between[1] * more,
            np.where(replicas > 1, self.within[0] + self.within[1] * more, _LEAST),
        )
        gradient, sync = np.maximum(self.gradient_seconds(local_batch_size), _LEAST), np.maximum(sync, _LEAST)
        both = np.logaddexp(self.gamma * np.log(gradient), self.gamma * np.log(sync))
        return np.asarray(np.exp(both / self.gamma))


def fit(
    nodes: ArrayLike,
    replicas: ArrayLike,
    local_batch_size: ArrayLike,
    gradient_seconds: ArrayLike,
    step_seconds: ArrayLike,
) -> ThroughputModel:
    """Fit the model to measurements, one of each argument for each configuration.

    Minimises the root mean squared error of the logarithms of both durations. What no measurement shows is taken to be
    free: an exchange between nodes costs as much as one within a node, times 1.1, until there is one.

    Args:
        nodes: nodes of the configuration.
        replicas: devices.
        local_batch_size: samples on each.
        gradient_seconds: forward and backward pass.
        step_seconds: the whole step, without accumulation.
    """
    from scipy.optimize import minimize  # not needed to use a model that was fitted elsewhere

    several_nodes = np.asarray(nodes) > 1
    replicas, local = np.asarray(replicas), np.asarray(local_batch_size, float)
    gradient_log, step_log = np.log(np.asarray(gradient_seconds, float)), np.log(np.asarray(step_seconds, float))
    count = len(local)
    one_node = ~several_nodes & (replicas > 1)
    more = np.maximum(replicas - 2, _LEAST)

    values, free = _START.copy(), np.ones(7, bool)
    if np.all(local == local[0]):  # a single size cannot tell the two apart
        values[0], free[0] = np.exp(gradient_log).mean() / 2, False
    grows = bool(np.any(replicas > 2))
    for part, seen in ((_BETWEEN, several_nodes.any()), (_WITHIN, one_node.any())):
        free[part] = (seen, seen and grows)
    values[~free & (np.arange(7) > 0)] = _LEAST
    # Matrices that pick the constant and the growth of the exchange for each measurement.
    between, within = several_nodes.astype(float), one_node.astype(float)
    alone = (1 - between - within) * _LEAST

    def loss(tried: Values) -> tuple[float, Values]:
        values[free] = tried
        constant, slope, a_n, b_n, a_r, b_r, gamma = values
        compute = constant + slope * local
        sync = between * (a_n + b_n * more) + within * (a_r + b_r * more) + alone
        log_compute, log_sync = np.log(compute), np.log(sync)
        # log(compute^gamma + sync^gamma) / gamma
        log_step = np.logaddexp(gamma * log_compute, gamma * log_sync) / gamma
        share = np.exp(gamma * (log_compute - log_step))
        error_1, error_2 = log_compute - gradient_log, log_step - step_log
        rmse_1, rmse_2 = np.sqrt(error_1 @ error_1 / count), np.sqrt(error_2 @ error_2 / count)
        growth_n, growth_r = b_n / a_n, b_r / a_r
        total = rmse_1 + rmse_2 + _OVERLAP_PENALTY * (gamma - 1) ** 2 + _GROWTH_PENALTY * (growth_n**2 + growth_r**2)

        weight_1 = error_1 / (max(rmse_1, 1e-12) * count)
        weight_2 = error_2 / (max(rmse_2, 1e-12) * count)
        by_compute = (weight_1 + weight_2 * share) / compute
        by_sync = weight_2 * (1 - share) / sync
        by_gamma = weight_2 * (share * log_compute + (1 - share) * log_sync - log_step) / gamma
        n, r = by_sync * between, by_sync * within
        slopes = np.array(
            [
                by_compute.sum(),
                by_compute @ local,
                n.sum() - 2 * _GROWTH_PENALTY * growth_n**2 / a_n,
                n @ more + 2 * _GROWTH_PENALTY * growth_n / a_n,
                r.sum() - 2 * _GROWTH_PENALTY * growth_r**2 / a_r,
                r @ more + 2 * _GROWTH_PENALTY * growth_r / a_r,
                by_gamma.sum() + 2 * _OVERLAP_PENALTY * (gamma - 1),
            ]
        )
        return float(total), slopes[free]

    lower = np.array([_LEAST] * 6 + [1.0])
    upper = np.array([np.inf] * 6 + [10.0])
    found = minimize(
        loss, values[free], jac=True, method="L-BFGS-B", bounds=list(zip(lower[free], upper[free], strict=True))
    )
    values[free] = found.x
    if not several_nodes.any():
        values[_BETWEEN] = np.maximum(values[_BETWEEN], values[_WITHIN] * 1.1)
    a_c, b_c, a_n, b_n, a_r, b_r, gamma = map(float, values)
    return ThroughputModel((a_c, b_c), (a_n, b_n), (a_r, b_r), gamma)
