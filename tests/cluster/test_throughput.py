"""The throughput model: planted parameters are found again, and held-out configurations predicted."""

import itertools

import numpy as np
import pytest
import scipy.optimize
from scipy.optimize import check_grad, minimize

from lightning_egeria.cluster.throughput import ThroughputModel, fit

PLANTED = ThroughputModel((0.05, 0.003), (0.12, 0.004), (0.03, 0.002), 2.0)
CONFIGURATIONS = [
    (nodes, replicas, local)
    for nodes, replicas in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 5), (3, 8), (4, 16))
    for local in (16, 32, 64, 128)
]


def measured(model, configurations):
    nodes, replicas, local = np.array(configurations).T
    return nodes, replicas, local, model.gradient_seconds(local), model.step_seconds(nodes, replicas, local)


def test_a_step_combines_gradient_and_exchange():
    step = PLANTED.step_seconds(1, 4, 64)
    assert step == pytest.approx(np.hypot(0.05 + 0.003 * 64, 0.03 + 0.002 * 2))
    assert PLANTED.step_seconds(1, 1, 64) == pytest.approx(0.05 + 0.003 * 64)


def test_planted_parameters_are_found():
    found = fit(*measured(PLANTED, CONFIGURATIONS))
    # The two penalties pull a little at growth and overlap.
    assert found.compute == pytest.approx(PLANTED.compute, rel=0.05)
    assert found.between == pytest.approx(PLANTED.between, rel=0.05)
    assert found.within == pytest.approx(PLANTED.within, rel=0.05)
    assert found.gamma == pytest.approx(PLANTED.gamma, rel=0.05)


def test_held_out_configurations_are_predicted():
    random = np.random.default_rng(0)
    *known, gradient, step = measured(PLANTED, CONFIGURATIONS)
    noisy = (values * np.exp(random.normal(0, 0.01, len(values))) for values in (gradient, step))
    found = fit(*known, *noisy)
    for nodes, replicas, local in itertools.product((1, 2, 4), (4, 6, 12), (24, 96)):
        expected = PLANTED.step_seconds(nodes, replicas, local)
        assert found.step_seconds(nodes, replicas, local) == pytest.approx(expected, rel=0.1)


def test_what_was_not_seen_is_taken_to_be_free():
    one = fit(*measured(PLANTED, [(1, 1, 32)]))
    # A single size: half of the time is taken to be constant.
    assert one.compute == pytest.approx([one.gradient_seconds(32) / 2, one.gradient_seconds(32) / 64])
    assert one.step_seconds(4, 16, 32) == pytest.approx(one.gradient_seconds(32), rel=1e-5)
    two = fit(*measured(PLANTED, [(1, 1, 32), (1, 1, 64), (1, 2, 32)]))
    assert two.between == pytest.approx([value * 1.1 for value in two.within])
    assert two.within[1] == pytest.approx(1e-8)


def test_slopes_are_those_of_the_loss(monkeypatch):
    seen = []

    def checked(loss, start, **arguments):
        away = np.asarray(start) * 1.7
        error = check_grad(lambda x: loss(x)[0], lambda x: loss(x)[1], away)
        seen.append(error / np.linalg.norm(loss(away)[1]))
        return minimize(loss, start, **arguments)

    monkeypatch.setattr(scipy.optimize, "minimize", checked)
    fit(*measured(PLANTED, CONFIGURATIONS))
    assert seen
    assert max(seen) < 1e-5
