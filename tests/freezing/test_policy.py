"""Tables of floats in, decisions out."""

import json
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_egeria.errors import ArgumentError, CheckpointError
from lightning_egeria.freezing.policy import FreezingPolicy

NAN, INF = math.nan, math.inf
STILL, MOVES = 2e-5, 1e-2  # on either side of the tolerance, for one layer module of four and for three


def started(
    max_depth: int = 3, highest: float = 1.0, patience: int = 2, peer_tolerance: float = 0.05, **kwargs
) -> FreezingPolicy:
    """A policy that has seen a learning rate from which that of the tests has fallen far enough."""
    policy = FreezingPolicy(patience=patience, peer_tolerance=peer_tolerance, **kwargs)
    policy.start(max_depth)
    policy.observe(0, None, highest, None)
    return policy


def feed(policy, table, learning_rate=0.1, start=0):
    """Observe one row after the other; returns (place, depth) of every decision."""
    decisions = []
    for place, row in enumerate(table, start=start):
        decision = policy.observe(place, row, learning_rate, None)
        if decision is not None:
            decisions.append((place, decision.depth))
    return decisions


class TestRest:
    @pytest.mark.parametrize("patience", [1, 2, 5])
    def test_freezes_after_as_many_evaluations_at_rest(self, patience):
        assert feed(started(patience=patience), [[STILL, MOVES, MOVES, MOVES]] * 10) == [(patience - 1, 1)]

    def test_the_tolerance_is_absolute_and_included(self):
        assert feed(started(tolerance=0.5), [[0.125, 9.0, 9.0, 9.0]] * 3) == [(1, 1)]
        assert feed(started(tolerance=0.5), [[0.126, 9.0, 9.0, 9.0]] * 9) == []

    @pytest.mark.parametrize(("second", "depth"), [(0.25, 2), (0.26, 1)])
    def test_the_tolerance_is_for_the_share_that_would_freeze(self, second, depth):
        assert feed(started(tolerance=0.5), [[0.1, second, 9.0, 9.0]] * 2) == [(1, depth)]

    def test_what_is_frozen_does_not_count_for_the_share(self):
        table = [[0.1, 9.0, 9.0, 9.0]] * 2 + [[NAN, 0.2, 9.0, 9.0]] * 5 + [[NAN, 0.12, 9.0, 9.0]] * 2
        assert feed(started(tolerance=0.5), table) == [(1, 1), (8, 2)]

    def test_evaluations_before_a_freeze_do_not_count_after_it(self):
        # The second was within the share of two, not within that of one.
        table = [[0.1, 0.2, 9.0, 9.0], [0.1, 9.0, 9.0, 9.0], [NAN, 0.1, 9.0, 9.0], [NAN, 0.1, 9.0, 9.0]]
        assert feed(started(tolerance=0.5), table) == [(1, 1), (3, 2)]

    def test_evaluations_at_rest_must_be_in_a_row(self):
        table = [[STILL if place % 3 else MOVES, MOVES, MOVES, MOVES] for place in range(30)]
        assert feed(started(patience=3), table) == []
        assert feed(started(patience=2), table)[0] == (2, 1)

    def test_all_that_rest_freeze_in_one_decision(self):
        assert feed(started(), [[STILL, STILL, MOVES, MOVES]] * 3) == [(1, 2)]

    def test_what_moves_inside_does_not_matter_if_the_output_rests(self):
        assert feed(started(), [[MOVES, STILL, MOVES, MOVES]] * 3) == [(1, 2)]
        assert feed(started(), [[STILL, MOVES, STILL, MOVES]] * 3) == [(1, 3)]

    def test_each_depth_has_a_row_of_its_own(self):
        table = [[STILL, MOVES, STILL, MOVES], [STILL, STILL, MOVES, MOVES], [STILL, STILL, MOVES, MOVES]]
        assert feed(started(patience=2), table[:2]) == [(1, 1)]
        assert feed(started(patience=3), table) == [(2, 1)]

    def test_at_the_deepest_allowed_it_needs_no_reference(self):
        policy = started(max_depth=2)
        assert feed(policy, [[MOVES] * 4]) == []
        assert policy.wants_reference
        assert feed(policy, [[STILL] * 4] * 5) == [(1, 2)]
        assert not policy.wants_reference

    def test_nothing_may_freeze(self):
        policy = started(max_depth=0)
        assert not policy.wants_reference
        assert feed(policy, [[STILL]] * 5) == []

    def test_frozen_layer_modules_need_no_measurement(self):
        policy = started()
        table = [[STILL, MOVES, MOVES, MOVES]] * 2 + [[NAN, STILL, MOVES, MOVES]] * 3
        assert feed(policy, table) == [(1, 1), (3, 2)]

    def test_nothing_between_evaluations(self):
        policy = started()
        for step in range(20):
            decision = policy.observe(step, [STILL] * 4 if step % 10 == 0 else None, 0.1, 1.0)
            assert (decision is not None) == (step == 10)

    @pytest.mark.parametrize("bad", [NAN, INF])
    @pytest.mark.parametrize("place", [0, 3])
    def test_an_evaluation_that_is_not_finite_did_not_happen(self, bad, place):
        row = [STILL] * 4
        row[place] = bad
        assert feed(started(), [[STILL] * 4, row, row, row]) == []
        assert feed(started(), [[STILL] * 4, row, [STILL] * 4]) == [(2, 3)]

    def test_a_learning_rate_of_zero_says_nothing(self):
        policy = started()
        assert feed(policy, [[0.0] * 4] * 5, learning_rate=0.0) == []
        assert feed(policy, [[STILL] * 4], learning_rate=0.1) == []

    def test_without_a_learning_rate_nothing_is_known_to_rest(self):
        assert feed(started(), [[STILL] * 4] * 9, learning_rate=NAN) == []
        assert feed(started(pretrained=True), [[0.01, 0.01, 0.3, 1.0]] * 5, learning_rate=NAN) == [(1, 2)]

    def test_a_missing_learning_rate_is_no_jump_and_hides_none(self):
        policy = started()
        assert feed(policy, [[STILL] * 4] * 2) == [(1, 3)]
        assert [policy.observe(2, None, rate, None) for rate in (NAN, 0.1, NAN)] == [None] * 3
        assert policy.observe(5, None, 0.01, None).depth == 0

    def test_nothing_rests_before_the_learning_rate_is_halved(self):
        assert feed(started(highest=0.1), [[STILL] * 4] * 9, learning_rate=0.1) == []
        assert feed(started(highest=0.1), [[STILL] * 4] * 9, learning_rate=0.051) == []
        assert feed(started(highest=0.1), [[STILL] * 4] * 9, learning_rate=0.05) == [(1, 3)]
        assert feed(started(highest=0.1), [[STILL] * 4] * 9, learning_rate=0.05 + 1e-9) == [(1, 3)]

    def test_nothing_rests_in_a_warm_up(self):
        policy = started(highest=1e-6)
        rates = [*(0.01 * step for step in range(1, 11)), 0.08, 0.06, 0.04, 0.02]
        decisions = [policy.observe(step, [STILL] * 4, rate, None) for step, rate in enumerate(rates)]
        assert [decision is not None for decision in decisions] == [False] * 13 + [True]

    def test_rest_at_a_high_rate_does_not_count_later(self):
        policy = started(patience=3, highest=0.1)
        assert feed(policy, [[STILL] * 4] * 2, learning_rate=0.06) == []
        assert feed(policy, [[STILL] * 4] * 4, learning_rate=0.05, start=2) == [(4, 3)]

    def test_a_high_learning_rate_stops_all_comparisons(self):
        policy = FreezingPolicy()
        policy.start(3)
        assert not policy.wants_reference
        assert policy.held_back is None
        policy.observe(1, None, NAN, None)
        assert policy.held_back == "the optimizer has no 'lr' in its parameter groups"
        wanted, told = [], []
        for rate in (0.0, 0.05, 0.1, 0.07, 0.06, 0.051, 0.05, 0.01, 0.06, 0.09, 0.0):
            policy.observe(1, None, rate, None)
            wanted.append(policy.wants_reference)
            told.append(policy.held_back is not None)
        # A reference is there a little earlier than something may be at rest: it is compared with one of before.
        assert wanted == [False] * 4 + [True] * 5 + [False] * 2
        assert told == [True] * 6 + [False] * 2 + [True] * 3
        policy.observe(1, None, 0.09, None)
        assert policy.held_back == "the learning rate is 9.0e-02, with a peak of 1.0e-01"

    def test_a_risen_learning_rate_starts_the_count_anew(self):
        policy = started(patience=3, highest=0.1)
        feed(policy, [[STILL] * 4] * 2, learning_rate=0.05)
        policy.observe(2, None, 0.09, None)
        assert feed(policy, [[STILL] * 4] * 3, learning_rate=0.05, start=3) == [(5, 3)]

    def test_trained_weights_are_compared_at_any_rate(self):
        policy = started(pretrained=True)
        assert policy.wants_reference
        assert policy.held_back is None

    def test_the_reference_is_held_while_something_is_at_rest(self):
        policy = started(patience=3)
        held = []
        for place, first in enumerate([MOVES, STILL, STILL, MOVES, STILL, STILL, STILL]):
            policy.observe(place, [first, MOVES, MOVES, MOVES], 0.1, None)
            held.append(policy.holds_reference)
        assert held == [False, True, True, False, True, True, False]
        assert policy.depth == 1
        policy.observe(7, [NAN, MOVES, MOVES, STILL], 0.1, None)  # the last layer module never freezes
        assert not policy.holds_reference

    @pytest.mark.parametrize(("moves", "freezes"), [([0, 1] * 20, True), (range(40), False)])
    def test_shaking_is_rest_and_steady_movement_is_not(self, moves, freezes):
        policy, reference = started(patience=4), 0
        for step, weight in enumerate(moves):
            policy.observe(step, [6e-5 * (weight - reference) ** 2, MOVES, MOVES, MOVES], 0.1, None)
            if not policy.holds_reference:
                reference = weight
        assert bool(policy.depth) == freezes

    def test_the_reason_tells_the_numbers(self):
        policy = started()
        feed(policy, [[2e-4, 1.5e-4, MOVES, MOVES]])
        reason = policy.observe(1, [2e-4, 1.5e-4, MOVES, MOVES], 0.1, None).reason
        assert "1.5e-04 stayed below 2.0e-04" in reason
        assert "2 evaluations" in reason


class TestPretrained:
    def test_a_front_far_quieter_than_the_rest_freezes_at_once(self):
        # All of it moves more than rest allows; the deepest moves 100 times as much as the first two.
        table = [[0.01, 0.01, 0.3, 1.0]] * 5
        assert feed(started(pretrained=True), table) == [(1, 2)]
        assert feed(started(pretrained=False), table) == []

    @pytest.mark.parametrize(("tolerance", "depth"), [(0.005, 0), (0.02, 2), (0.4, 3), (0.0, 0)])
    def test_the_peer_tolerance_is_a_share_of_the_largest(self, tolerance, depth):
        policy = started(pretrained=True, peer_tolerance=tolerance)
        feed(policy, [[0.01, 0.01, 0.3, 1.0]] * 5)
        assert policy.depth == depth

    def test_the_mean_of_the_first_evaluations_counts(self):
        rows = [[0.01, 0.9, 0.9, 1.0], [0.2, 0.9, 0.9, 1.0]]
        assert feed(started(pretrained=True, peer_tolerance=0.1), rows) == []
        assert feed(started(pretrained=True, peer_tolerance=0.11), rows) == [(1, 1)]

    def test_the_last_of_the_prefix_counts(self):
        assert feed(started(pretrained=True), [[0.2, 0.01, 0.3, 1.0]] * 5) == [(1, 2)]

    def test_peers_are_compared_once_and_freeze_later_at_rest(self):
        table = [[0.01, 0.3, 0.5, 1.0]] * 2 + [[NAN, 0.01, 0.5, 1.0]] * 5 + [[NAN, STILL, 0.5, 1.0]] * 3
        assert feed(started(pretrained=True), table) == [(1, 1), (8, 2)]

    def test_they_are_compared_in_a_warm_up_too(self):
        policy = started(pretrained=True, highest=1e-6)
        assert policy.observe(1, [0.01, 0.01, 0.3, 1.0], 0.01, None) is None
        assert policy.observe(2, [0.02, 0.02, 0.6, 2.0], 0.02, None).depth == 2

    def test_they_may_rest_at_any_rate_but_one_that_rises(self):
        policy = started(pretrained=True, peer_tolerance=0, highest=0.01)
        warm_up = [policy.observe(step, [STILL] * 4, 0.01 * step, None) for step in range(2, 11)]
        assert warm_up == [None] * 9
        assert feed(policy, [[STILL] * 4] * 2, learning_rate=0.1, start=11) == [(12, 3)]

    def test_nothing_moves_nothing_is_compared(self):
        assert feed(started(pretrained=True, patience=1), [[0.0] * 4]) == [(0, 3)]  # at rest, all of it


class TestAnnealing:
    def test_a_jump_of_the_learning_rate_starts_all_anew(self):
        policy = started()
        feed(policy, [[STILL, STILL, MOVES, MOVES]] * 2)
        decision = policy.observe(2, [NAN, NAN, STILL, MOVES], 0.01, None)
        assert (decision.depth, policy.depth) == (0, 0)
        assert "1.00e-01" in decision.reason
        assert "1.00e-02" in decision.reason
        assert feed(policy, [[STILL, MOVES, MOVES, MOVES]] * 3, learning_rate=0.01) == [(1, 1)]

    def test_an_exhausted_policy_wakes(self):
        policy = started(max_depth=1)
        feed(policy, [[STILL] * 2] * 2)
        assert policy.observe(2, None, 0.01, None).depth == 0
        assert policy.wants_reference

    def test_pretrained_weights_are_compared_again(self):
        policy = started(pretrained=True)
        feed(policy, [[0.01, 0.01, 0.3, 1.0]] * 2)
        assert policy.observe(2, None, 0.01, None).depth == 0
        assert feed(policy, [[0.01, 0.3, 0.3, 1.0]] * 2, learning_rate=0.01) == [(1, 1)]

    def test_never(self):
        policy = started(unfreeze_on="never")
        feed(policy, [[STILL] * 4] * 2)
        assert policy.observe(2, None, 0.001, None) is None


def random_table(seed: int, length: int = 120):
    generator = random.Random(seed)
    level = [generator.uniform(-3, -1) for _ in range(5)]
    table = []
    for _ in range(length):
        level = [value - generator.uniform(-0.05, 0.1) for value in level]
        table.append(([10.0**value for value in level], 0.01 if generator.random() < 0.02 else 0.1))
    return table


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_policy_resumed_at_any_point_decides_the_same(seed, pretrained):
    table = random_table(seed)

    def decisions(cut):
        policy = started(max_depth=4, pretrained=pretrained)
        found = []
        for place, (row, rate) in enumerate(table):
            if place == cut:
                state = json.loads(json.dumps(policy.state_dict()))
                policy = started(max_depth=4, pretrained=pretrained)
                policy.load_state_dict(state)
            decision = policy.observe(place, row, rate, None)
            found += [(place, decision)] if decision else []
        return found

    uninterrupted = decisions(None)
    assert uninterrupted
    for cut in range(0, len(table), 7):
        assert decisions(cut) == uninterrupted


def test_loading_does_not_tie_two_policies_together():
    first = started(pretrained=True)
    feed(first, [[STILL] * 4])
    state = first.state_dict()
    second = started(pretrained=True)
    second.load_state_dict(state)
    feed(second, [[STILL] * 4] * 3)
    assert first.state_dict() == state
    assert first.depth == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("tolerance", value) for value in (0, -1, NAN)],
        *[("patience", value) for value in (0, 1.5)],
        *[("peer_tolerance", value) for value in (1, -0.1, NAN)],
        *[("unfreeze_lr_factor", value) for value in (0, 1, NAN)],
        ("unfreeze_on", "sometimes"),
    ],
)
def test_a_bad_argument_is_named(argument, value):
    with pytest.raises(ArgumentError, match=argument):
        FreezingPolicy(**{argument: value})


class PolicyInvariants(RuleBasedStateMachine):
    """Whatever a policy is told: the depth stays in its bounds, and only a decision changes it."""

    @initialize(max_depth=st.integers(0, 4), patience=st.integers(1, 3), pretrained=st.booleans())
    def begin(self, max_depth, patience, pretrained):
        self.policy = started(max_depth=max_depth, patience=patience, pretrained=pretrained)
        self.max_depth, self.depth, self.rate = max_depth, 0, 0.1

    @rule(values=st.lists(st.floats(0, 1e-2) | st.just(NAN) | st.just(INF), min_size=5, max_size=5))
    def evaluation(self, values):
        self.heed(self.policy.observe(0, values, self.rate, None), values)

    @rule()
    def step(self):
        self.heed(self.policy.observe(0, None, self.rate, 1.0), None)

    @rule(rate=st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.1, 1.0]))
    def new_rate(self, rate):
        self.rate = rate
        self.heed(self.policy.observe(0, None, rate, 1.0), None)

    def heed(self, decision, values):
        if decision is None:
            return
        assert decision.depth == 0 or decision.depth > self.depth
        if decision.depth > self.depth:
            assert values is not None
            assert all(map(math.isfinite, values[self.depth :]))
        self.depth = decision.depth

    @invariant()
    def in_bounds(self):
        assert self.policy.depth == self.depth
        assert 0 <= self.depth <= self.max_depth
        assert self.depth < self.max_depth or not self.policy.wants_reference
        assert self.policy.wants_reference or self.policy.held_back or self.depth == self.max_depth
        json.dumps(self.policy.state_dict())


TestPolicyInvariants = PolicyInvariants.TestCase
TestPolicyInvariants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestAuto:
    table = [[0.01, 0.01, 0.3, 1.0]] * 5

    @pytest.mark.parametrize("answer", [True, False])
    def test_the_answer_counts_as_if_it_had_been_given(self, answer):
        policy = FreezingPolicy(patience=2, peer_tolerance=0.05)
        policy.resolve(answer)
        policy.start(3)
        policy.observe(0, None, 1.0, None)
        assert policy.pretrained is answer
        assert feed(policy, self.table) == feed(started(pretrained=answer), self.table)

    @pytest.mark.parametrize("given", [True, False])
    def test_a_given_answer_stays(self, given):
        policy = FreezingPolicy(pretrained=given)
        policy.resolve(not given)
        assert policy.pretrained is given

    def test_without_an_answer_weights_count_as_untrained(self):
        assert feed(started(), self.table) == feed(started(pretrained=False), self.table)

    @pytest.mark.parametrize("answer", [True, False])
    def test_a_checkpoint_has_the_answer(self, answer):
        state = json.loads(json.dumps(started(pretrained=answer).state_dict()))
        policy, other = started(), started(pretrained=not answer)
        policy.load_state_dict(state)
        other.load_state_dict(state)
        assert (policy.pretrained, other.pretrained) == (answer, not answer)

    def test_a_checkpoint_without_an_answer_was_from_scratch(self):
        state = started(pretrained=False).state_dict()
        del state["pretrained"]
        policy = started()
        policy.load_state_dict(state)
        assert policy.pretrained is False

    def test_a_damaged_answer_is_refused(self):
        with pytest.raises(CheckpointError, match="pretrained is 'yes'"):
            started().load_state_dict({**started().state_dict(), "pretrained": "yes"})

    @pytest.mark.parametrize("pretrained", ["yes", None, 2])
    def test_other_values_are_refused(self, pretrained):
        with pytest.raises(ArgumentError, match="pretrained must be True, False or 'auto'"):
            FreezingPolicy(pretrained=pretrained)
