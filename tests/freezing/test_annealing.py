"""Jumps of the learning rate unfreeze, smooth schedules do not."""

import math

import pytest
from torch.optim import lr_scheduler

from lightning_egeria.freezing.slopes import SlopePolicy, Stage
from support.freezing.slope_runs import evaluations_to_freeze, falling_then_flat, feed, freeze, guided, moving, rates

SMOOTH = {
    "cosine to zero": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "cosine to a small rate": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n - 1, eta_min=1e-6),
    "cosine up and down again": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n // 2, eta_min=1e-6),
    "linear to zero": lambda o, n: lr_scheduler.LinearLR(o, 1.0, 0.0, n - 1),
    "linear to a small rate": lambda o, n: lr_scheduler.LinearLR(o, 1.0, 1e-4, n - 1),
    "one-cycle": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n),
    "one-cycle in three phases": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n, three_phase=True),
    "exponential": lambda o, n: lr_scheduler.ExponentialLR(o, 1e-5 ** (1 / n)),
    "polynomial": lambda o, n: lr_scheduler.PolynomialLR(o, n, power=2.0),
    "warm-up and cosine": lambda o, n: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 1e-3, 1.0, n // 5), lr_scheduler.CosineAnnealingLR(o, n - n // 5, eta_min=1e-6)],
        milestones=[n // 5],
    ),
    "inverse square root": lambda o, n: lr_scheduler.LambdaLR(
        o, lambda step: min((step + 1) / 20, (20 / (step + 1)) ** 0.5)
    ),
    "halved every tenth": lambda o, n: lr_scheduler.StepLR(o, max(1, n // 10), gamma=0.5),
}


class TestAnnealing:
    @pytest.mark.parametrize("steps", [30, 100, 2000])
    @pytest.mark.parametrize("name", SMOOTH)
    def test_smooth_schedules_never_unfreeze(self, name, steps):
        schedule = rates(lambda optimizer: SMOOTH[name](optimizer, steps), steps)
        # Frozen where the rate is not yet a small one: of the last crumbs of a schedule, one may be a tenth of another.
        starts = [step for step in range(steps - 1) if schedule[step] > 0.4 * max(schedule)]
        for start in starts[:: 1 + len(starts) // 10]:
            policy = freeze(guided(), learning_rate=schedule[start])
            for step in range(start, steps):
                assert policy.observe(step, None, schedule[step], None) is None, f"frozen at {start}, woke at {step}"

    @pytest.mark.parametrize("per_step", [1, 50])
    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda o: lr_scheduler.MultiStepLR(o, [5], gamma=0.1), 5),
            (lambda o: lr_scheduler.StepLR(o, 7, gamma=0.1), 7),
            (lambda o: lr_scheduler.MultiStepLR(o, [4], gamma=0.01), 4),
            (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.1 ** (epoch // 3)), 3),
            (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10), 10),
            (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, eta_min=1e-3), 10),
            # A hand-written restart may reach zero exactly before it.
            (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: (1 + math.cos(math.pi * (epoch % 9) / 8)) / 2), 9),
        ],
    )
    def test_steps_and_warm_restarts_unfreeze(self, make, expected, per_step):
        policy = freeze(guided(), learning_rate=0.1)
        table = [rate for rate in rates(make, 12) for _ in range(per_step)]
        decisions = [(step, policy.observe(step, None, rate, None)) for step, rate in enumerate(table)]
        assert [(step, decision.depth) for step, decision in decisions if decision][:1] == [(expected * per_step, 0)]

    @pytest.mark.parametrize(("window", "patience", "halved"), [(10, 8, (5, 4)), (3, 1, (2, 1)), (2, 3, (2, 1))])
    def test_unfreezing_returns_to_zero_and_is_quicker_the_next_time(self, window, patience, halved):
        policy = freeze(guided(window=window, patience=patience), learning_rate=0.1)
        decision = policy.observe(100, None, 0.01, None)
        assert decision.depth == policy.depth == 0
        assert "1.00e-01" in decision.reason
        assert "1.00e-02" in decision.reason
        assert (policy.window_evaluations, policy.patience) == halved
        assert policy.stage is Stage.GUIDED
        table = [[falling_then_flat(place, flat_from=2), moving(place), 0.0, 0.0] for place in range(60)]
        assert feed(policy, table, learning_rate=0.01)[0] == (evaluations_to_freeze(*halved) - 1, 1)

    def test_exhausted_wakes_too(self):
        policy = guided(max_depth=2)
        feed(policy, [[falling_then_flat(place)] * 4 for place in range(60)])
        assert policy.stage is Stage.EXHAUSTED
        assert policy.observe(60, None, 0.01, None).depth == 0
        assert policy.wants_reference

    def test_one_event_one_decision(self):
        policy = freeze(guided())
        assert [policy.observe(step, None, 0.01, None) is None for step in range(3)] == [False, True, True]

    def test_measured_from_the_oldest_freeze(self):
        policy = freeze(guided(), learning_rate=0.1)
        # Smoothly down to a half, where the second freezes: then a tenth of that is no tenth of the first ...
        for rate in (0.08, 0.065, 0.05):
            assert policy.observe(0, None, rate, None) is None
        table = [[float("nan"), falling_then_flat(place), moving(place), moving(place)] for place in range(14)]
        assert [depth for _, depth in feed(policy, table, learning_rate=0.05)] == [2]
        # ... but it is deeper than that.
        assert policy.observe(0, None, 0.005, None).depth == 0

    def test_a_later_freeze_does_not_move_the_measure(self):
        policy = freeze(guided(), learning_rate=0.1)
        for rate in (0.05, 0.03, 0.02):
            assert policy.observe(0, None, rate, None) is None
        table = [[float("nan"), falling_then_flat(place), moving(place), moving(place)] for place in range(14)]
        assert [depth for _, depth in feed(policy, table, learning_rate=0.02)] == [2]
        # Small beside 0.1, though not beside 0.02: the end of a schedule.
        for rate in (0.009, 0.0009):
            assert policy.observe(0, None, rate, None) is None

    def test_a_fall_that_ends_near_the_rate_of_the_freeze_is_none(self):
        policy = freeze(guided(), learning_rate=0.01)
        for rate in (0.05, 0.005):
            assert policy.observe(0, None, rate, None) is None

    @pytest.mark.parametrize(("rate", "tenth"), [(0.1, 0.01), (0.0003, 3e-05), (0.0006, 6e-05), (0.7, 0.07)])
    def test_a_tenth_is_a_tenth_however_it_is_rounded(self, rate, tenth):
        assert freeze(guided(), learning_rate=rate).observe(0, None, tenth, None).depth == 0
        assert freeze(guided(), learning_rate=tenth).observe(0, None, rate, None).depth == 0

    def test_nothing_frozen_nothing_to_wake(self):
        policy = guided()
        for rate in (0.1, 0.01, 1e-4, 1.0, 0.0, 1.0):
            assert policy.observe(0, None, rate, None) is None
        assert policy.window_evaluations == 2

    def test_a_rate_of_zero_wakes_nothing(self):
        policy = freeze(guided())
        assert policy.observe(0, None, 0.0, None) is None
        assert policy.depth == 1

    def test_own_rule(self):
        class Halving(SlopePolicy):
            seen = ()

            def is_annealing_event(self, previous, learning_rate, at_freeze):
                self.seen = (previous, learning_rate, at_freeze)
                return learning_rate <= previous / 2

        policy = Halving(window_evaluations=2, patience=2, bootstrap=False)
        policy.start(3)
        freeze(policy, learning_rate=0.1)
        assert policy.observe(0, None, 0.09, None) is None
        assert policy.seen == (0.1, 0.09, 0.1)
        assert policy.observe(0, None, 0.045, None).depth == 0

    def test_factor_is_an_argument(self):
        policy = freeze(guided(unfreeze_lr_factor=0.5), learning_rate=0.1)
        assert policy.observe(0, None, 0.06, None) is None
        assert policy.observe(0, None, 0.03, None).depth == 0
