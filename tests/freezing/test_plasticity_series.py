"""Moving average and slope against NumPy and a version that keeps everything."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.freezing.slopes import PlasticitySeries, least_squares_slope

property_test = settings(deadline=None, derandomize=True, max_examples=60)
numbers = st.floats(-1e6, 1e6)


def naive_smoothing(values: list[float], window: int) -> list[float]:
    return [float(np.mean(values[end - window : end])) for end in range(window, len(values) + 1)]


@property_test
@given(st.lists(numbers, min_size=2, max_size=40))
def test_slope_equals_polyfit(values):
    expected = np.polyfit(np.arange(len(values)), np.array(values), deg=1)[0]
    scale = max(1.0, *map(abs, values))
    assert least_squares_slope(values) == pytest.approx(expected, abs=1e-9 * scale)


@property_test
@given(numbers, st.floats(-100, 100), st.integers(2, 40))
def test_slope_of_a_line_is_exact(offset, slope, length):
    values = [offset + slope * x for x in range(length)]
    assert least_squares_slope(values) == pytest.approx(slope, abs=1e-9 * max(1.0, abs(offset)))


@property_test
@given(st.lists(numbers, min_size=2, max_size=20), st.floats(-1e3, 1e3))
def test_slope_does_not_see_an_offset_and_turns_round_in_time(values, offset):
    scale = 1e-9 * max(1.0, *map(abs, values))
    slope = least_squares_slope(values)
    assert least_squares_slope([value + offset for value in values]) == pytest.approx(slope, abs=scale)
    assert least_squares_slope(values[::-1]) == pytest.approx(-slope, abs=scale)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_slope_needs_two_values(values):
    with pytest.raises(ValueError, match=f"two values, got {len(values)}"):
        least_squares_slope(values)


@property_test
@given(st.integers(2, 8), st.lists(numbers, max_size=40))
def test_series_equals_the_naive_version(window, values):
    series = PlasticitySeries(window)
    scale = 1e-9 * max(1.0, *map(abs, values)) if values else 0
    for count, value in enumerate(values, start=1):
        slope = series.append(value)
        averages = naive_smoothing(values[:count], window)
        assert series.state_dict()["averages"] == pytest.approx(averages[-window:], abs=scale)
        if len(averages) >= window:
            assert slope == pytest.approx(np.polyfit(np.arange(window), averages[-window:], deg=1)[0], abs=scale)
        else:
            assert slope is None


@pytest.mark.parametrize("window", [2, 3, 10])
def test_first_slope_comes_after_two_windows_less_one(window):
    series = PlasticitySeries(window)
    slopes = [series.append(1.0) for _ in range(3 * window)]
    assert slopes.index(0.0) == 2 * window - 2


@property_test
@given(st.integers(2, 10), st.integers(0, 9), st.floats(0, 1), st.floats(0.01, 1))
def test_a_saw_tooth_of_the_window_s_length_cancels(window, phase, floor, height):
    """A reference that is refreshed every ``window`` evaluations: plasticity grows with its age and falls back."""
    series = PlasticitySeries(window)
    slopes = [series.append(floor + height * ((place + phase) % window)) for place in range(5 * window)]
    assert [slope for slope in slopes if slope is not None] == pytest.approx([0] * (3 * window + 2), abs=1e-12)


@pytest.mark.parametrize(("window", "period"), [(4, 6), (6, 4), (5, 7)])
def test_a_saw_tooth_of_another_length_does_not(window, period):
    series = PlasticitySeries(window)
    slopes = [series.append(float(place % period)) for place in range(5 * window)]
    assert max(abs(slope) for slope in slopes if slope is not None) > 1e-3


def test_a_trend_is_seen_through_the_saw_tooth():
    window, trend = 5, -0.25
    series = PlasticitySeries(window)
    slopes = [series.append(trend * place + place % window) for place in range(5 * window)]
    assert [slope for slope in slopes if slope is not None] == pytest.approx([trend] * (3 * window + 2))


@property_test
@given(st.integers(2, 6), st.lists(numbers, max_size=30), st.lists(numbers, min_size=1, max_size=30))
def test_state_round_trip_goes_on_identically(window, before, after):
    series = PlasticitySeries(window)
    for value in before:
        series.append(value)
    state = json.loads(json.dumps(series.state_dict()))
    # Whatever the other one had seen is forgotten.
    resumed = PlasticitySeries(window)
    for value in after:
        resumed.append(value + 1)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == series.state_dict()
    assert [resumed.append(value) for value in after] == [series.append(value) for value in after]


def test_state_is_a_snapshot():
    series = PlasticitySeries(2)
    series.append(1.0)
    state = series.state_dict()
    series.append(2.0)
    assert state == {"raw": [1.0], "averages": []}
