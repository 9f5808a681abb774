"""The engine with an executor and a policy that the test holds in its hands; no trainer."""

from concurrent.futures import Executor, Future

import pytest
import torch
from torch import nn

from lightning_egeria.freezing.engine import FreezingEngine
from lightning_egeria.freezing.policy import Decision
from lightning_egeria.layers import FrozenPrefix, LayerChain


class Held(Executor):
    """Keeps what is submitted until the test lets it run."""

    def __init__(self):
        self.waiting = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.waiting.append((future, fn, args, kwargs))
        return future

    def run(self):
        for future, fn, args, kwargs in self.waiting:
            future.set_result(fn(*args, **kwargs))
        self.waiting = []


class Asked:
    """Answers with prepared decisions; remembers what it was told."""

    wants_reference = True

    def __init__(self, decisions=()):
        self.decisions = dict(decisions)
        self.told = []

    def start(self, max_depth):
        pass

    def observe(self, step, plasticity, learning_rate, loss):
        self.told.append((step, plasticity, learning_rate, loss))
        return self.decisions.get(step)

    def plasticity(self):
        return {step: plasticity for step, plasticity, _, _ in self.told if plasticity is not None}


class Run:
    """A few training steps around an engine."""

    def __init__(self, policy, batch_size=8, every=2, refresh=10):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        chain = LayerChain.trace(self.net, lambda: self.net(torch.ones(2, 4)).sum())
        self.executor, self.policy, self.batch_size = Held(), policy, batch_size
        self.prefix = FrozenPrefix(self.net, chain)
        self.engine = FreezingEngine(self.prefix, policy, self.executor, every, refresh, evaluation_samples=64)
        self.step = 0
        self.events = []

    def steps(self, count, answers=True, batch_size=None):
        for _ in range(count):
            self.engine.begin_step(self.step)
            loss = self.net(torch.randn(batch_size or self.batch_size, 4)).square().mean()
            self.engine.end_forward(loss)
            self.optimizer.zero_grad()
            loss.backward()
            self.engine.end_backward(loss.device)
            self.optimizer.step()
            self.step += 1
            self.engine.end_batch()
            event = self.engine.end_step(self.step, learning_rate=0.1)
            self.events += [event] if event else []
            if answers:
                self.executor.run()
        return self


def test_what_one_evaluation_says_is_heard_at_the_next():
    run = Run(Asked()).steps(8)
    # Step 2 takes the first snapshot, step 4 evaluates, step 6 hears of it.
    assert list(run.policy.plasticity()) == [6, 8]
    assert [step for step, *_ in run.policy.told] == list(range(1, 9))
    assert [step for step, _, _, loss in run.policy.told if loss is not None] == [2, 4, 6, 8]


def test_a_late_answer_is_dropped_and_counted():
    run = Run(Asked()).steps(6, answers=False).steps(4)
    assert list(run.policy.plasticity()) == [8, 10]
    assert run.engine.evaluations_dropped == 1


def test_an_answer_about_another_prefix_version_is_dropped_and_counted():
    # Frozen after step 5: the evaluation of step 4 is on its way.
    run = Run(Asked({5: Decision(1, "test")})).steps(10)
    assert list(run.policy.plasticity()) == [8, 10]
    assert run.engine.evaluations_dropped == 1
    assert [(event.step, event.kind, event.depth, event.reason) for event in run.events] == [(5, "freeze", 1, "test")]


def test_plasticity_of_frozen_layer_modules_is_nan():
    run = Run(Asked({3: Decision(2, "test")})).steps(8)
    values = run.policy.plasticity()[6]
    assert [value != value for value in values] == [True, True, False]


def test_a_smaller_batch_is_an_evaluation_that_did_not_happen():
    run = Run(Asked()).steps(5).steps(1, batch_size=5).steps(4)
    assert list(run.policy.plasticity()) == [6, 10]
    assert run.engine.evaluations_dropped == 1


def test_a_batch_of_one_says_nothing():
    run = Run(Asked(), batch_size=1).steps(10)
    assert run.policy.plasticity() == {}
    assert run.engine.evaluations_done == 0


@pytest.mark.parametrize(("refresh", "ages"), [(1, [2, 2, 2, 2]), (2, [2, 4, 2, 4]), (10, [2, 4, 6, 8])])
def test_the_reference_is_taken_anew_after_so_many_evaluations(refresh, ages):
    run, taken = Run(Asked(), refresh=refresh), []
    for _ in range(5):
        run.steps(2)
        if run.engine._reference_age == 0:
            taken.append(run.step)
    assert [step - max(snapshot for snapshot in taken if snapshot < step) for step in (4, 6, 8, 10)] == ages


def test_no_reference_while_the_policy_wants_none():
    policy = Asked()
    policy.wants_reference = False
    run = Run(policy).steps(6)
    assert run.engine._reference is None
    assert run.policy.plasticity() == {}


def test_close_leaves_the_model_as_it_was():
    run = Run(Asked({3: Decision(2, "test")})).steps(5)
    run.engine.begin_step(run.step)
    run.engine.close()
    run.engine.close()
    assert all(parameter.requires_grad for parameter in run.net.parameters())
    assert not any("forward" in vars(module) for module in run.net.modules())
