"""`SlopePolicy`: a prefix freezes when the slope of its plasticity stays near zero."""

import json
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_egeria.errors import ArgumentError
from lightning_egeria.freezing.slopes import FIRST_SLOPES, SlopePolicy, Stage
from support.freezing.slope_runs import evaluations_to_freeze, falling_then_flat, feed, freeze, guided, moving

NAN, INF = math.nan, math.inf


class TestFreezing:
    @pytest.mark.parametrize(("window", "patience"), [(2, 1), (2, 3), (3, 2), (5, 5), (10, 10)])
    def test_earliest_freeze(self, window, patience):
        policy = guided(window=window, patience=patience)
        # The first line goes through the fall, so the flat part afterwards is calm from the first slope that counts.
        table = [[falling_then_flat(place, flat_from=2), moving(place), moving(place), 0.0] for place in range(60)]
        assert feed(policy, table)[0] == (evaluations_to_freeze(window, patience) - 1, 1)

    def test_a_slope_that_never_calms_never_freezes(self):
        assert feed(guided(), [[float(place % 3 == 0)] * 4 for place in range(100)]) == []
        assert feed(guided(), [[-0.1 * place] * 4 for place in range(100)]) == []

    def test_rising_plasticity_is_not_calm(self):
        assert feed(guided(), [[0.1 * place] * 4 for place in range(100)]) == []

    @pytest.mark.parametrize(("tolerance", "freezes"), [(0.19, False), (0.21, True)])
    def test_the_threshold_is_a_share_of_the_largest_slope_so_far(self, tolerance, freezes):
        values, level = [], 100.0
        for place in range(40):
            values.append(level)
            level -= 1.0 if place < 2 + FIRST_SLOPES else 0.2
        decisions = feed(
            guided(tolerance=tolerance), [[value, moving(place), 1.0, 1.0] for place, value in enumerate(values)]
        )
        assert bool(decisions) is freezes

    def test_a_slope_that_comes_late_raises_the_threshold(self):
        values, level = [], 100.0
        for place in range(60):
            values.append(level)
            level -= 1.0 if place < 20 else (10.0 if place < 24 else 1.0)  # a tenth of the largest, but only from there
        decisions = feed(guided(), [[value, moving(place), 1.0, 1.0] for place, value in enumerate(values)])
        assert decisions
        assert decisions[0][0] > 24

    def test_calm_evaluations_must_be_in_a_row(self):
        policy = guided(patience=3)
        # Window 2: one jump disturbs two averages; with one every fourth evaluation there are never three calm ones.
        values = [10.0 - place for place in range(8)] + [2.0 + (place // 4) for place in range(60)]
        assert feed(policy, [[value, 0.0, 0.0, 0.0] for value in values]) == []

    def test_all_that_qualify_freeze_in_one_decision(self):
        table = [[falling_then_flat(place)] * 2 + [moving(place)] * 2 for place in range(60)]
        assert feed(guided(), table)[0][1] == 2

    def test_those_behind_wait_for_the_frontmost(self):
        policy = guided()
        table = [[moving(place), *[falling_then_flat(place)] * 3] for place in range(12)]
        assert feed(policy, table) == []
        # The moment the frontmost is calm too, the others come with it.
        assert [depth for _, depth in feed(policy, [[table[-1][0], *[falling_then_flat(12)] * 3]] * 10, start=12)] == [
            3
        ]

    def test_one_that_moves_holds_back_those_behind_it(self):
        table = [[falling_then_flat(place), moving(place), *[falling_then_flat(place)] * 2] for place in range(14)]
        assert [depth for _, depth in feed(guided(), table)] == [1]

    def test_stops_at_the_deepest_allowed(self):
        policy = guided(max_depth=2)
        assert [depth for _, depth in feed(policy, [[falling_then_flat(place)] * 4 for place in range(60)])] == [2]
        assert policy.stage is Stage.EXHAUSTED
        assert not policy.wants_reference

    def test_frozen_layer_modules_need_no_measurement(self):
        policy = freeze(guided())
        table = [[NAN, *[falling_then_flat(place)] * 3] for place in range(30)]
        assert [depth for _, depth in feed(policy, table)] == [3]

    def test_nothing_between_evaluations(self):
        policy = guided()
        for place in range(60):
            policy.observe(3 * place, None, 0.1, None)
            policy.observe(3 * place + 1, None, 0.1, None)
            if policy.observe(3 * place + 2, [falling_then_flat(place)] * 4, 0.1, None):
                break
        table = [[falling_then_flat(place)] * 4 for place in range(60)]
        assert [place] == [at for at, _ in feed(guided(), table)]

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_an_evaluation_that_is_not_finite_did_not_happen(self, bad):
        table = [[falling_then_flat(place), *[moving(place)] * 3] for place in range(20)]
        clean, disturbed = guided(), guided()
        expected = [table[place] for place, _ in feed(clean, table)]
        got = []
        for row in table:
            assert disturbed.observe(0, [row[0], bad, *row[2:]], 0.1, None) is None
            if disturbed.observe(0, row, 0.1, None):
                got.append(row)
        assert got == expected != []
        assert disturbed.state_dict() == clean.state_dict()

    def test_the_reason_tells_the_numbers(self):
        policy = guided()
        for place in range(60):
            if decision := policy.observe(place, [falling_then_flat(place), 1.0, 1.0, 1.0], 0.1, None):
                break
        assert "slope" in decision.reason
        assert "2 evaluations" in decision.reason

    def test_nothing_to_freeze_is_exhausted_at_once(self):
        policy = guided(max_depth=0)
        assert policy.stage is Stage.EXHAUSTED
        assert feed(policy, [[1.0]] * 50) == []

    def test_a_learning_rate_of_zero_says_nothing(self):
        """Nothing is learned, so nothing changes: that is not convergence (a warm-up whose first epoch has rate 0)."""
        policy = guided()
        assert feed(policy, [[0.0] * 4] * 50, learning_rate=0.0) == []
        bootstrapped = SlopePolicy(window_evaluations=2)
        bootstrapped.start(3)
        assert feed(bootstrapped, [None] * 20, learning_rate=0.0, loss=2.3) == []
        assert bootstrapped.stage is Stage.BOOTSTRAP

    def test_without_a_learning_rate_plasticity_alone_decides(self):
        without, policy = freeze(guided(), learning_rate=NAN), freeze(guided())
        assert {**without.state_dict(), "previous_lr": 0.1, "lr_at_freeze": 0.1} == policy.state_dict()
        assert feed(policy, [None] * 3, learning_rate=NAN) == []
        assert feed(policy, [None], learning_rate=0.01) == [(0, 0)]


class TestBootstrap:
    def policy(self, **kwargs):
        policy = SlopePolicy(window_evaluations=3, patience=1, **kwargs)
        policy.start(2)
        return policy

    def test_waits_for_the_loss_to_calm_down(self):
        policy = self.policy()
        losses = [8.0] * 3 + [4.0] * 3 + [2.0] * 3 + [1.9] * 3
        stages = []
        for step, loss in enumerate(losses):
            policy.observe(step, None, 0.1, loss)
            stages.append(policy.stage)
        assert stages == [Stage.BOOTSTRAP] * 11 + [Stage.GUIDED]
        assert policy.wants_reference

    @pytest.mark.parametrize(("threshold", "stage"), [(0.09, Stage.BOOTSTRAP), (0.11, Stage.GUIDED)])
    def test_threshold_is_relative(self, threshold, stage):
        for scale in (1e-3, 1.0, -5.0):
            policy = self.policy(bootstrap_threshold=threshold)
            feed(policy, [None] * 3, loss=10 * scale)
            feed(policy, [None] * 3, loss=9 * scale)
            assert policy.stage is stage

    def test_a_rising_loss_is_unsettled(self):
        policy = self.policy()
        for window in range(10):
            feed(policy, [None] * 3, loss=2.0**window)
        assert policy.stage is Stage.BOOTSTRAP

    def test_a_loss_near_zero_may_go_on_halving(self):
        policy = self.policy()
        for window in range(5):
            feed(policy, [None] * 3, loss=2.0**-window)
        assert policy.stage is Stage.GUIDED

    def test_the_mean_of_a_window_counts(self):
        policy = self.policy()
        for loss in [1.0, 8.0, 3.0, 4.0, 6.0, 2.0]:
            policy.observe(0, None, 0.1, loss)
        assert policy.stage is Stage.GUIDED

    @pytest.mark.parametrize("bad", [NAN, INF, None])
    def test_no_loss_no_step(self, bad):
        policy = self.policy()
        feed(policy, [None] * 50, loss=bad)
        assert policy.stage is Stage.BOOTSTRAP

    def test_plasticity_is_not_looked_at(self):
        policy = self.policy()
        for window in range(10):
            assert feed(policy, [[0.0] * 3] * 3, loss=1.0 + window % 2) == []
        assert policy.stage is Stage.BOOTSTRAP
        assert policy.state_dict()["tracks"] == []


def random_table(seed: int, length: int = 160):
    """Evaluations, losses and learning rates with everything in it: noise, calm, NaN, gaps, steps of the schedule."""
    generator = random.Random(seed)
    levels = [0.0] * 4
    rows, rate = [], 0.1
    for place in range(length):
        if place % 60 == 59:
            rate *= generator.choice([0.1, 10.0])
        for index in range(4):
            levels[index] += generator.gauss(0, 1) * (1.0 if place % 60 < 20 else 0.02)
        kind = generator.random()
        plasticity = None if kind < 0.1 else [NAN, 1.0, 1.0, 1.0] if kind < 0.15 else list(levels)
        rows.append((place, plasticity, rate, None if kind < 0.1 else 1 + 5 / (place + 1)))
    return rows


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_policy_resumed_at_any_point_decides_the_same(seed, bootstrap):
    def make():
        policy = SlopePolicy(window_evaluations=4, patience=2, bootstrap=bootstrap)
        policy.start(3)
        return policy

    table = random_table(seed)
    policy, states, decisions = make(), [], []
    for row in table:
        states.append(policy.state_dict())
        decisions.append(policy.observe(*row))
    made = [decision.depth for decision in decisions if decision]
    assert max(made) > 0
    assert 0 in made
    for cut in range(0, len(table), 3):
        resumed = make()
        # The state was taken long before: the policy that went on must not have changed it.
        resumed.load_state_dict(json.loads(json.dumps(states[cut])))
        assert [resumed.observe(*row) for row in table[cut:]] == decisions[cut:], f"resumed at {cut}"
        assert json.dumps(resumed.state_dict()) == json.dumps(policy.state_dict())


def test_loading_does_not_tie_two_policies_together():
    policy = guided()
    feed(policy, [[falling_then_flat(place)] * 4 for place in range(4)])
    state = policy.state_dict()
    before = json.dumps(state)
    first, second = guided(), guided()
    first.load_state_dict(state)
    second.load_state_dict(state)
    feed(first, [[0.0] * 4] * 10)
    assert json.dumps(state) == json.dumps(second.state_dict()) == before


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("tolerance", value) for value in (0, 1, 0.0, 1.0, -0.1, 1.5, NAN, INF)],
        *[("window_evaluations", value) for value in (1, 0, -3, 2.5, 10.0, NAN, INF)],
        *[("patience", value) for value in (0, -1, 1.5, NAN, INF)],
        *[("unfreeze_on", value) for value in ("always", None, "")],
        *[("bootstrap_threshold", value) for value in (0, -0.1, NAN)],
        *[("unfreeze_lr_factor", value) for value in (0, 1, -0.1, 2, NAN)],
    ],
)
def test_a_bad_argument_is_named(argument, value):
    with pytest.raises(ArgumentError, match=f"^{argument} must be .*{value}"):
        SlopePolicy(**{argument: value})


@settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=60)
class PolicyInvariants(RuleBasedStateMachine):
    """Whatever is observed: depth grows or falls to 0, stays in range, and the stage fits it."""

    @initialize(
        max_depth=st.integers(0, 4),
        window=st.integers(2, 4),
        patience=st.integers(1, 3),
        bootstrap=st.booleans(),
    )
    def begin(self, max_depth, window, patience, bootstrap):
        self.make = lambda: SlopePolicy(window_evaluations=window, patience=patience, bootstrap=bootstrap)
        self.policy = self.make()
        self.policy.start(max_depth)
        self.max_depth, self.rate, self.step = max_depth, 0.1, 0
        self.levels = [0.0] * (max_depth + 1)

    def observe(self, plasticity, loss):
        self.step += 1
        before = self.policy.depth
        windows = self.policy.window_evaluations, self.policy.patience
        decision = self.policy.observe(self.step, plasticity, self.rate, loss)
        if decision is None:
            assert self.policy.depth == before
        else:
            assert decision.depth == self.policy.depth
            assert decision.depth > before or decision.depth == 0 < before
            assert decision.reason
        shrunk = (max(2, windows[0] // 2), max(1, windows[1] // 2))
        woke = decision is not None and decision.depth == 0
        assert (self.policy.window_evaluations, self.policy.patience) == (shrunk if woke else windows)

    @rule(changes=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.001, -1.0, 1.0]), min_size=5, max_size=5))
    def evaluate(self, changes):
        self.levels = [level + change for level, change in zip(self.levels, changes, strict=False)]
        self.observe(list(self.levels), 1.0)

    @rule(count=st.integers(1, 12))
    def stay(self, count):
        for _ in range(count):
            self.observe(list(self.levels), 1.0)

    @rule(place=st.integers(0, 4), bad=st.sampled_from([NAN, INF]))
    def evaluate_badly(self, place, bad):
        row = list(self.levels)
        row[min(place, self.max_depth)] = bad
        self.observe(None, None)
        before = json.dumps(self.policy.state_dict())
        active = self.policy.depth <= min(place, self.max_depth)
        self.observe(row, None)
        assert not active or json.dumps(self.policy.state_dict()) == before

    @rule(loss=st.sampled_from([None, 0.0, 1.0, 5.0, NAN]))
    def lose(self, loss):
        self.observe(None, loss)

    @precondition(lambda self: 1e-9 < self.rate < 1e3)
    @rule(factor=st.sampled_from([0.1, 10.0, 0.9, 1.1]))
    def change_rate(self, factor):
        self.rate *= factor
        frozen = self.policy.depth
        self.observe(None, None)
        assert not (frozen and factor in (0.9, 1.1)) or self.policy.depth == frozen

    @rule()
    def resume(self):
        state = json.loads(json.dumps(self.policy.state_dict()))
        self.policy = self.make()
        self.policy.start(self.max_depth)
        self.policy.load_state_dict(state)

    @invariant()
    def in_range(self):
        if not hasattr(self, "policy"):
            return
        assert 0 <= self.policy.depth <= self.max_depth
        if self.policy.stage is Stage.BOOTSTRAP:
            assert self.policy.depth == 0
        assert (self.policy.stage is Stage.EXHAUSTED) == (self.policy.depth == self.max_depth)
        assert self.policy.wants_reference == (self.policy.stage is Stage.GUIDED)


TestPolicyInvariants = PolicyInvariants.TestCase
