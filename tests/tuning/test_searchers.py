"""Searchers return settings of the spaces, each once, and the same ones for the same seed."""

import importlib.util
import math
import sys

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.searchers import (
    SEARCHERS,
    CompassSearcher,
    GridSearcher,
    OptunaSearcher,
    RandomSearcher,
)
from lightning_egeria.methods.tuning.spaces import Choice, LogUniform, Uniform

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra tune")
OPTUNA = ("tpe", "cmaes")
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_optuna) if name in OPTUNA else name for name in SEARCHERS]
)
SMALL = {"momentum": Choice([0.0, 0.9]), "nesterov": Choice([True, False])}
LARGE = {"lr": LogUniform(1e-4, 1), "decay": Uniform(0, 0.1), "momentum": Choice([0.0, 0.9])}


def asked(searcher, most=100):
    settings = []
    while len(settings) < most and (setting := searcher.ask()) is not None:
        settings.append(setting)
        searcher.tell(setting, setting["momentum"])
    return settings


@each
def test_a_small_space_is_tried_whole_and_once(name):
    settings = asked(SEARCHERS[name](SMALL, 0))
    assert len(settings) <= 4
    assert len({repr(setting) for setting in settings}) == len(settings)
    if name not in OPTUNA:  # whose samplers may repeat themselves many times
        assert len(settings) == 4


@each
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning" if "optuna" in sys.modules else "ignore:x")
def test_settings_are_of_the_spaces_and_repeatable(name):
    first, again, other = (asked(SEARCHERS[name](LARGE, seed), 12) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    for setting in first:
        assert list(setting) == list(LARGE)
        assert 1e-4 <= setting["lr"] <= 1 + 1e-9
        assert 0 <= setting["decay"] <= 0.1
        assert setting["momentum"] in (0.0, 0.9)


def told_all(searcher, speed, most=40):
    """The settings that it asks for until it has no more."""
    settings = []
    while len(settings) < most and (setting := searcher.ask()) is not None:
        settings.append(setting)
        searcher.tell(setting, speed(setting))
    assert len(settings) < most
    return settings


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("best", [1e-5, 6e-4, 5e-3])
def test_a_compass_is_near_after_a_few(best, seed):
    """Within a factor of two, where the space has one of 3,000."""
    searcher = CompassSearcher({"lr": LogUniform(2e-6, 6e-3)}, seed)
    settings = told_all(searcher, lambda setting: 1 / (1 + abs(math.log(setting["lr"] / best))))
    assert len(settings) <= 8
    assert min(abs(math.log(setting["lr"] / best)) for setting in settings) < math.log(2)


def test_in_longer_trials_a_compass_looks_around_another():
    searcher = CompassSearcher({"lr": Uniform(0, 1)})
    told_all(searcher, lambda setting: setting["lr"])
    searcher.longer()
    searcher.tell({"lr": 0.9}, 0.5)
    searcher.tell({"lr": 0.4}, 0.7)
    near = [setting["lr"] for setting in told_all(searcher, lambda setting: 0.6)]
    assert near == pytest.approx([0.4 + 1 / 6, 0.4 - 1 / 6])


@pytest.mark.parametrize("seed", range(5))
def test_a_compass_asks_no_setting_twice_but_for_rounding(seed):
    searcher = CompassSearcher({"lr": LogUniform(1e-3, 100), "momentum": Choice([0.0, 0.9])}, seed)
    settings = told_all(searcher, lambda setting: 1 / (1 + abs(math.log(setting["lr"]))))
    assert len({(round(math.log(setting["lr"]), 6), setting["momentum"]) for setting in settings}) == len(settings)


def test_a_compass_does_not_ask_for_the_present_end_of_the_space():
    """The end, as it was computed, is beyond the present value by rounding."""
    low = 0.1 * 0.1 / 10
    assert low > 0.001
    searcher = CompassSearcher({"lr": LogUniform(low, 3)})
    searcher.tell({"lr": 0.001}, 8.0)
    for setting in told_all(searcher, lambda setting: 10.0 if setting["lr"] < 0.004 else 5.0):
        assert setting["lr"] > 0.0011


def test_a_compass_looks_around_a_present_setting_that_is_fast():
    searcher = CompassSearcher({"lr": LogUniform(1e-6, 1)}, 1)
    searcher.tell({"lr": 3e-3}, 1.0)
    rates = [setting["lr"] for setting in told_all(searcher, lambda setting: 0.1)]
    assert any(3e-3 < rate < 3e-2 for rate in rates)
    assert any(3e-4 < rate < 3e-3 for rate in rates)


@pytest.mark.parametrize("present", [0.0, -1.0, 1e-9, 5.0])
def test_a_compass_takes_a_present_value_outside_of_the_space(present):
    searcher = CompassSearcher({"weight_decay": LogUniform(1e-6, 1)}, 0)
    searcher.tell({"weight_decay": present}, 1.0)
    settings = told_all(searcher, lambda setting: 0.5)
    assert all(1e-6 <= setting["weight_decay"] <= 1 + 1e-9 for setting in settings)
    rates = [setting["weight_decay"] for setting in settings]
    assert max(rates) > 0.1 if present > 1 else min(rates) < 1e-5  # the end that is near was tried


def test_the_grid_has_every_combination():
    settings = asked(GridSearcher({"lr": LogUniform(1e-4, 1), "momentum": Choice([0.0, 0.9])}, 0, points=5))
    assert len(settings) == len({repr(setting) for setting in settings}) == 10


@needs_optuna
def test_tpe_goes_where_speeds_are_high():
    searcher = OptunaSearcher({"x": Uniform(0, 1)}, 0)
    for _ in range(30):
        setting = searcher.ask()
        searcher.tell(setting, -((setting["x"] - 0.7) ** 2))
    last = [searcher.ask()["x"] for _ in range(5)]
    assert sum(abs(x - 0.7) < 0.2 for x in last) >= 3


def test_without_optuna_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ArgumentError, match=r"pip install 'lightning-egeria\[tune\]'"):
        OptunaSearcher(SMALL)


@needs_optuna
def test_an_unknown_sampler_and_space_are_refused():
    with pytest.raises(ArgumentError, match="sampler must be 'tpe'"):
        OptunaSearcher(SMALL, sampler="annealing")
    with pytest.raises(ArgumentError, match="Optuna knows Choice, Uniform"):
        OptunaSearcher({"x": object()})


def test_a_compass_whose_settings_diverge_goes_on_spreading():
    """A third of the space each, again and again; none comes back in longer trials."""
    searcher, rates = CompassSearcher({"lr": LogUniform(1e-6, 1)}), []
    for number in range(9):
        rates.append(searcher.ask()["lr"])
        searcher.tell({"lr": rates[-1]}, -1.0)
        if number == 5:
            searcher.longer()
    thirds = [sorted(int(math.log10(rate) / 2 + 3) for rate in rates[at : at + 3]) for at in (0, 3, 6)]
    assert thirds == [[0, 1, 2]] * 3
    assert len(set(rates)) == 9


def test_a_compass_asks_for_each_choice_once():
    searcher = CompassSearcher({"batch_size": Choice([8, 16, 32, 64])})
    sizes = {setting["batch_size"] for setting in told_all(searcher, lambda setting: setting["batch_size"])}
    assert sizes == {8, 16, 32, 64}
    assert searcher.longer() is False
    searcher.tell({"batch_size": 64}, 1.0)
    assert searcher.ask() is None


def test_a_compass_leaves_out_what_diverged_before():
    searcher = CompassSearcher({"lr": Uniform(0, 1)})
    told_all(searcher, lambda setting: 1.0 if setting["lr"] < 0.5 else -1.0)
    assert searcher.longer() is True
    searcher.tell({"lr": 0.45}, 1.0)
    assert all(setting["lr"] < 0.45 for setting in told_all(searcher, lambda setting: 0.5))


def test_a_compass_without_progress_waits_for_longer_trials():
    assert len(told_all(CompassSearcher({"lr": LogUniform(1e-6, 1)}), lambda setting: 0.0)) == 3


def test_a_compass_looks_along_each_tunable():
    def distance(setting):
        return abs(setting["a"] - 0.3) + abs(setting["b"] - 0.8) + 0.3 * (setting["kind"] == "x")

    searcher = CompassSearcher({"a": Uniform(0, 1), "b": Uniform(0, 1), "kind": Choice(["x", "y"])})
    settings = told_all(searcher, lambda setting: 1 / (1 + distance(setting)))
    assert min(map(distance, settings)) < 0.17


def test_a_random_searcher_ends_when_it_has_drawn_all():
    searcher = RandomSearcher({"x": Choice([1])})
    assert searcher.ask() == {"x": 1}
    assert searcher.ask() is None
