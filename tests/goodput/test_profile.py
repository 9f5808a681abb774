"""Times of batches, and the model of them."""

import json

import numpy as np
import pytest

from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.methods.goodput import profile as module
from lightning_egeria.methods.goodput.profile import KEPT, Configuration, Profile

PLANTED = ThroughputModel((0.05, 0.003), (0.12, 0.004), (0.03, 0.002), 2.0)
PLACES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 5), (3, 8), (4, 16)]


def profiled(places=PLACES, depth=0, noise=0.0, share=1.0):
    profile, random = Profile(), np.random.default_rng(0)
    for nodes, replicas in places:
        for local in (16, 32, 64, 128):
            where = Configuration(nodes, replicas, local, depth)
            for _ in range(20):
                wobble = share * np.exp(random.normal(0, noise, 2))
                profile.add(where, PLANTED.gradient_seconds(local) * wobble[0], stepped=False)
                profile.add(where, PLANTED.step_seconds(nodes, replicas, local) * wobble[1], stepped=True)
    return profile


def test_planted_parameters_are_found():
    found = profiled().fit(0)
    for name in ("compute", "between", "within", "gamma"):
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=0.05), name


def test_held_out_configurations_are_predicted():
    found = profiled(noise=0.1).fit(0)
    for nodes, replicas, local in ((1, 3, 24), (1, 8, 96), (2, 4, 200), (4, 16, 48)):
        expected = float(PLANTED.step_seconds(nodes, replicas, local))
        assert float(found.step_seconds(nodes, replicas, local)) == pytest.approx(expected, rel=0.1)


def test_the_same_times_are_fitted_once(monkeypatch):
    fits = []
    monkeypatch.setattr(module, "fit", lambda *arrays: fits.append(arrays) or len(fits))
    profile = profiled([(1, 1)])
    assert [profile.fit(0) for _ in range(3)] == [1, 1, 1]
    profile.add(Configuration(1, 1, 256, 0), 9.0, stepped=False)
    assert profile.fit(0) == 2


def test_pauses_do_not_count():
    profile = profiled([(1, 1)])
    before = profile.measured(0)
    for local in (16, 32, 64, 128):
        profile.add(Configuration(1, 1, local, 0), 1000.0, stepped=True)
    assert [pytest.approx(times) for times in before.values()] == list(profile.measured(0).values())


def test_without_accumulation_the_step_is_all_there_is():
    profile = Profile()
    profile.add(Configuration(1, 1, 8, 0), 2.0, stepped=True)
    profile.add(Configuration(1, 1, 16, 0), 3.0, stepped=False)
    assert list(profile.measured(0).values()) == [(2.0, 2.0), (3.0, 3.0)]


def test_the_exchange_is_what_a_batch_with_a_step_takes_longer():
    profile = Profile()
    for seconds, exchange in ((2.0, 0.5), (2.0, 0.7), (9.0, 0.6)):
        profile.add(Configuration(1, 2, 8, 0), seconds, stepped=True, exchange=exchange)
    assert profile.measured(0) == {Configuration(1, 2, 8, 0): (1.4, 2.0)}
    found = profile.fit(0)
    assert float(found.gradient_seconds(8)) == pytest.approx(1.4, rel=0.01)
    assert float(found.step_seconds(1, 2, 8)) == pytest.approx(2.0, rel=0.01)
    profile.add(Configuration(1, 2, 8, 0), 1.5, stepped=False)
    assert profile.measured(0) == {Configuration(1, 2, 8, 0): (1.5, 2.0)}


def test_a_freeze_takes_its_share_of_sizes_not_measured_since():
    profile = profiled([(1, 1)])
    assert profile.fit(2) is None
    profile.add(Configuration(1, 1, 32, 2), float(PLANTED.gradient_seconds(32)) * 0.6, stepped=True)
    found = profile.fit(2)
    assert float(found.gradient_seconds(128)) == pytest.approx(float(PLANTED.gradient_seconds(128)) * 0.6, rel=0.05)
    assert float(profile.fit(0).gradient_seconds(128)) == pytest.approx(float(PLANTED.gradient_seconds(128)), rel=0.05)


def test_the_state_is_all_of_it():
    profile = profiled([(1, 1), (1, 2)])
    for _ in range(KEPT):
        profile.add(Configuration(1, 2, 16, 1), 0.5, stepped=True)
    again = Profile.from_state(json.loads(json.dumps(profile.state())))
    assert again.state() == profile.state()
    assert again.replicas == profile.replicas == 2
    assert again.fit(0) == profile.fit(0)
    assert Profile().replicas == 0
