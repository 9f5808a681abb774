"""A policy that follows a script."""

import json
import math

import pytest

from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import ArgumentError
from lightning_egeria.freezing.scripted import ScriptedPolicy

NAN = math.nan


class TestScripted:
    @staticmethod
    def run(policy, steps):
        return {step: decision.depth for step in steps if (decision := policy.observe(step, None, 0.1, None))}

    def test_each_entry_once_at_its_step(self):
        policy = ScriptedPolicy({900: 0, 200: 4, 300: 5})
        policy.start(5)
        assert self.run(policy, range(1, 1000)) == {200: 4, 300: 5, 900: 0}

    def test_of_several_due_entries_the_newest_counts(self):
        policy = ScriptedPolicy({2: 1, 4: 3, 5: 2, 9: 0})
        assert self.run(policy, [1, 7, 8, 10, 11]) == {7: 2, 10: 0}

    def test_decision_says_which_entry(self):
        assert ScriptedPolicy({3: 1}).observe(5, None, 0.1, None) == Decision(1, "scheduled for step 3")

    @pytest.mark.parametrize("cut", range(1, 12))
    def test_resumed_at_any_point(self, cut):
        schedule = {2: 1, 4: 3, 9: 0}
        policy = ScriptedPolicy(schedule)
        before = self.run(policy, range(1, cut))
        resumed = ScriptedPolicy(schedule)
        resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        assert before | self.run(resumed, range(cut, 12)) == schedule

    def test_wants_no_reference_and_ignores_plasticity(self):
        policy = ScriptedPolicy({})
        policy.start(0)
        assert not policy.wants_reference
        assert policy.observe(10**6, [NAN], 0.0, NAN) is None

    def test_a_later_change_of_the_schedule_given_changes_nothing(self):
        schedule = {2: 1}
        policy = ScriptedPolicy(schedule)
        schedule[1] = 3
        assert self.run(policy, range(5)) == {2: 1}

    @pytest.mark.parametrize("schedule", [{0: 1}, {-5: 1}, {3: -1}, {1: 1, 0: 0}, {"200": 4}, {2.5: 1}, {2: 1.5}])
    def test_a_bad_schedule_is_named(self, schedule):
        with pytest.raises(ArgumentError, match=r"^schedule "):
            ScriptedPolicy(schedule)

    @pytest.mark.parametrize("schedule", [[(200, 4)], 200, None, "200"])
    def test_a_schedule_is_a_mapping(self, schedule):
        with pytest.raises(ArgumentError, match=r"^schedule must map"):
            ScriptedPolicy(schedule)

    def test_too_deep_for_the_model(self):
        policy = ScriptedPolicy({1: 2, 5: 4})
        policy.start(4)
        with pytest.raises(ArgumentError, match="schedule freezes to depth 4, but this model allows at most 3"):
            policy.start(3)
