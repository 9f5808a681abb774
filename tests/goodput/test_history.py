"""What is kept of a run for pictures."""

import json

from lightning_egeria.methods.goodput.decision import Division
from lightning_egeria.methods.goodput.history import MOST, History
from lightning_egeria.methods.goodput.noise import GradientNoise


def test_a_long_run_is_thinned_and_changes_are_kept():
    history, noise = History(1), GradientNoise(1)
    for step in range(3 * MOST):
        history.note(step, Division(8, 1, 1), noise, 0)
    assert MOST / 2 < len(history.moments) <= MOST
    steps = [moment.step for moment in history.moments]
    assert steps == sorted(set(steps))
    history.note(3 * MOST, Division(16, 1, 1), noise, 2)
    assert history.moments[-1].division.total == 16
    again = History.from_state(json.loads(json.dumps(history.state())))
    assert again.state() == history.state()
    assert again.moments == history.moments
