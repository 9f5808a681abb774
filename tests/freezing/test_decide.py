"""From plasticity to a decision that all ranks share."""

import math

import pytest
import torch

from lightning_egeria.core.distributed.ranks import DepthBroadcast
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.freezer import Decision, Freezer
from lightning_egeria.freezing.decide import Decider
from support.freezing.held import Asked, Run, Told
from support.networks import deep_mlp


class Ranks:
    """One of two ranks; ``heard`` is the message of the first."""

    several = True

    def __init__(self, leads, heard=None):
        self.leads, self.heard, self.sent = leads, heard, []

    def agree(self, message):
        self.sent.append(message)
        return message if self.leads else self.heard

    def share_buffers(self, buffers):
        pass


class Comparison:
    """Has an evaluation at every second step, with a plasticity that the test has written down."""

    def __init__(self, plasticity=None):
        self.plasticity = plasticity or {}
        self.evaluate_every_n_steps, self.notices, self.stopped = 2, Told(), False

    def is_due(self, step):
        return step % 2 == 0

    def collect(self, step):
        return self.plasticity.get(step)

    def mean_loss(self):
        return 0.5

    def layer_shares(self):
        return None

    def stop(self):
        self.stopped = True


def decider_of(policy, comparison=None, ranks=None):
    net = deep_mlp()
    freezer = Freezer(net, LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum()), ranks)
    return Decider(freezer, policy, comparison or Comparison())


def decide(decider, steps, rate=0.1):
    return {step: decision for step in range(1, steps + 1) if (decision := decider.decide(step, rate)) is not None}


class TestOneProcess:
    def test_the_policy_is_asked_after_each_step(self):
        policy = Asked()
        assert decide(decider_of(policy), 4) == {}
        assert [(step, rate, loss) for step, _, rate, loss in policy.told] == [
            (1, 0.1, None),
            (2, 0.1, 0.5),
            (3, 0.1, None),
            (4, 0.1, 0.5),
        ]

    def test_its_decision_holds_at_once(self):
        decision = Decision(1, "calm")
        assert decide(decider_of(Asked({3: decision})), 4) == {3: decision}

    def test_it_sees_the_plasticity_of_prefixes(self):
        policy, plasticity = Asked(), (0.3, 0.1, 0.2)
        decider = decider_of(policy, Comparison({2: plasticity}))
        decide(decider, 2)
        assert policy.plasticity() == {2: decider.freezer.chain.of_prefixes(plasticity, 0)}
        assert decider.plasticity == plasticity
        decide(decider, 1)
        assert decider.plasticity is None

    def test_the_last_evaluation_stays(self):
        decider = decider_of(Asked(), Comparison({2: (0.3, 0.1, 0.2)}))
        assert decider.last_evaluation is None
        decide(decider, 4)
        assert (decider.last_evaluation.step, decider.last_evaluation.plasticity) == (2, (0.3, 0.1, 0.2))
        assert decider.last_evaluation.slopes == ()

    def test_slopes_of_frozen_layer_modules_are_nan(self):
        policy = Asked()
        policy.slopes = [1.0, 2.0, 3.0]
        decider = decider_of(policy, Comparison({2: (0.3, 0.1, 0.2)}))
        decider.freezer.freeze_to(1, "")
        decide(decider, 2)
        first, *others = decider.last_evaluation.slopes
        assert math.isnan(first)
        assert others == [2.0, 3.0]


class Resumed(Asked):
    """Has a state, and notes each start."""

    def __init__(self):
        super().__init__()
        self.started, self.loaded = [], None

    def start(self, max_depth):
        self.started.append(max_depth)

    def state_dict(self):
        return {"told": 3}

    def load_state_dict(self, state):
        self.loaded = state


class TestState:
    def test_it_names_the_policy_and_holds_the_comparison(self):
        decider = Run(Resumed()).steps(3).decider
        state = decider.state_dict()
        assert state["policy"] == {"class": "Resumed", "state": {"told": 3}}
        assert state["comparison"]["next_evaluation"] == 4
        assert state["max_depth"] == 2
        assert state["comparison"]["reference"] is None

    def test_with_the_reference_the_policy_goes_on(self):
        decider, other = Run(Resumed(), wait_s=60.0).steps(3).decider, Run(Resumed(), wait_s=60.0).decider
        other.comparison.runner.drop_snapshot()
        other.load_state_dict(decider.state_dict())
        assert (other.policy.loaded, other.policy.started) == ({"told": 3}, [])
        assert other.comparison.next_evaluation == 4

    def test_without_the_reference_it_starts_again(self):
        decider, other = Run(Resumed()).steps(3).decider, Run(Resumed()).decider
        other.comparison.runner.drop_snapshot()
        other.load_state_dict(decider.state_dict())
        assert (other.policy.loaded, other.policy.started) == ({"told": 3}, [2])

    def test_it_starts_again_if_less_may_freeze(self):
        state, other = Run(Resumed()).decider.state_dict(), Run(Resumed()).decider
        other.load_state_dict({**state, "max_depth": 5})
        assert other.policy.started == [2]


class TestSeveralRanks:
    def test_the_first_tells_the_others_at_evaluation_steps(self):
        ranks = Ranks(leads=True)
        decider = decider_of(Asked({4: Decision(2, "calm")}), ranks=ranks)
        assert decide(decider, 4) == {2: Decision(0, ""), 4: Decision(2, "calm")}
        assert ranks.sent == [DepthBroadcast(0, 2, ""), DepthBroadcast(2, 2, "calm")]

    def test_a_decision_in_between_waits_for_the_next(self):
        decider = decider_of(Asked({3: Decision(1, "calm")}), ranks=Ranks(leads=True))
        assert decide(decider, 6) == {2: Decision(0, ""), 4: Decision(1, "calm"), 6: Decision(0, "")}

    def test_the_newest_of_several_decisions_counts(self):
        policy = Asked({1: Decision(1, "first"), 2: Decision(2, "second")})
        assert decide(decider_of(policy, ranks=Ranks(leads=True)), 2) == {2: Decision(2, "second")}

    def test_the_others_do_as_they_are_told_and_ask_nobody(self):
        policy, ranks = Asked({2: Decision(1, "its own")}), Ranks(leads=False, heard=DepthBroadcast(2, 8, "told"))
        decider = decider_of(policy, ranks=ranks)
        assert decide(decider, 2) == {2: Decision(2, "told")}
        assert policy.told == []
        assert decider.comparison.evaluate_every_n_steps == 8


class TestRegainedGradient:
    @pytest.fixture
    def run(self):
        run = Run(Asked({3: Decision(1, "calm"), 8: Decision(1, "again")})).steps(4)
        run.net[0].bias.requires_grad_(True)
        return run

    def test_all_is_unfrozen_and_stays_so(self, run):
        run.steps(6)
        assert [(event.step, event.depth) for event in run.events] == [(3, 1), (5, 0)]
        assert "'0.bias' received a gradient" in run.events[-1].reason

    def test_nothing_is_compared_and_nobody_asked_any_longer(self, run):
        asked = len(run.policy.told)
        run.steps(6)
        assert len(run.policy.told) == asked
        assert run.evaluations.stopped
        assert not run.pool.has_snapshot

    def test_it_is_told_once(self, run):
        run.steps(6)
        assert [text for text in run.told.warnings if "other code changes requires_grad" in text] == run.told.warnings
        assert len(run.told.warnings) == 1
