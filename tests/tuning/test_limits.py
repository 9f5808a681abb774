"""What a search may spend."""

import pytest

from lightning_egeria.tuning.limits import Limits, cooling, without_cooling


@pytest.mark.parametrize("steps", range(1, 100))
def test_a_trial_and_its_cooling_fill_the_steps(steps):
    most = without_cooling(steps)
    assert most + cooling(most) <= steps < most + 1 + cooling(most + 1)


def test_later_trials_are_not_cooled():
    assert Limits(4, 8, 5).cost(0, 8) == 12
    assert Limits(4, 8, 5).cost(4, 8) == 8
    assert Limits(4, 8, 5, halving=False).cost(0, 8) == 8
