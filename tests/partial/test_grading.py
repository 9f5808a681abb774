"""Suffixes that follow plasticity, against the definition of their shares."""

import math

import pytest

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.methods.partial.grading import GradedPlan, Grading

NAN = math.nan


def learning(plan, layer_modules):
    """Steps of a cycle with a gradient, by layer module, counted from the suffixes."""
    lengths = [plan.lengths(step, layer_modules)[0] for step in range(plan.counts[-1])]
    return [sum(length >= layer_modules - index for length in lengths) for index in range(layer_modules)]


@pytest.mark.parametrize(
    ("plasticity", "counts"),
    [
        ([0.0, 0.1, 0.3, 1.0], [1, 1, 2, 4]),
        ([1.0, 0.1, 0.1, 0.1], [4, 4, 4, 4]),  # the front moves most
        ([0.4, 0.1, 0.8, 0.2], [2, 2, 4, 4]),
        ([0.1, 0.1, 0.1, 0.1], [4, 4, 4, 4]),
        ([1e-9, 1e-9, 1.0, 0.0], [1, 1, 4, 4]),
        ([NAN, 0.1, 0.2, 0.4], [4, 1, 2, 4]),  # the first is frozen
        ([0.1, NAN, 0.2, 0.4], [1, 4, 4, 4]),
    ],
)
def test_shares_follow_plasticity(plasticity, counts):
    plan = GradedPlan(2, 0.25, 4)
    assert plan.lengths(3, 4) == (4, 4)
    assert plan.grade(plasticity) is (counts != [4] * 4)
    assert plan.counts == counts
    trained = 4 - sum(map(math.isnan, plasticity[:1]))
    assert learning(plan, trained) == counts[4 - trained :]


def test_what_thaws_has_all_its_gradients():
    plan = GradedPlan(1, 0.25, 4)
    plan.grade([NAN, 0.1, 0.2, 0.4])
    assert [plan.lengths(step, 4) for step in range(4)] == [(4,)] * 4


def test_fewer_gradients_do_not_lower_the_share():
    """What moves half as far with half of the gradients moves as far with each."""
    plan = GradedPlan(1, 0.25, 2)
    plan.grade([0.5, 1.0])
    assert plan.counts == [2, 4]
    assert plan.grade([0.25, 1.0]) is False
    assert plan.counts == [2, 4]
    assert plan.grade([0.5, 1.0]) is True
    assert plan.counts == [4, 4]


@pytest.mark.parametrize("nothing", [[0.0, 0.0], [NAN, NAN], [math.inf, NAN]])
def test_without_a_measure_suffixes_stay(nothing):
    plan = GradedPlan(1, 0.25, 2)
    plan.grade([0.5, 1.0])
    assert plan.grade(nothing) is False
    assert plan.counts == [2, 4]


def test_no_pause_without_a_cycle_or_a_front():
    assert [GradedPlan(1, share, 2).pauses(modules) for share, modules in [(1, 2), (0.25, 1), (0.25, 2)]] == [
        False,
        False,
        True,
    ]
    assert GradedPlan(2, 0.25, 3).differs is False


class Freezing:
    latest_plasticity = None


class TestGrading:
    def grading(self, freezing=None):
        return Grading(GradedPlan(1, 0.25, 2), freezing or Freezing(), Ranks())

    def test_each_plasticity_counts_once(self):
        freezing = Freezing()
        grading = self.grading(freezing)
        freezing.latest_plasticity = (3, (0.5, 1.0))
        for step in range(1, 31):
            grading.optimizer_step(step)
            assert grading.plan.counts == ([4, 4] if step < 10 else [2, 4])

    def test_a_checkpoint_holds_what_waits(self):
        freezing = Freezing()
        grading, again = self.grading(freezing), self.grading()
        freezing.latest_plasticity = (3, (0.5, 1.0))
        grading.optimizer_step(3)
        again.load_state_dict(grading.state_dict())
        again.optimizer_step(10)
        assert again.plan.counts == [2, 4]
        assert again.state_dict() == {"counts": [2, 4], "waiting": None}

    @pytest.mark.parametrize(
        "state",
        [
            {"counts": [2, 4, 4], "waiting": None},
            {"counts": [2, 3], "waiting": None},
            {"counts": [0, 4], "waiting": None},
            {"counts": [2, 4], "waiting": [0.5]},
            {"counts": [2, 4], "waiting": [0.5, "1"]},
        ],
    )
    def test_damaged_state(self, state):
        with pytest.raises(ValueError, match=r"expected|integer|layer modules|number"):
            self.grading().load_state_dict(state)
