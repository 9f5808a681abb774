"""The engine with an executor and a policy that the test holds in its hands; no trainer."""

import functools
import logging
import threading
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.engine import FreezingEngine
from lightning_egeria.freezing.policy import Decision
from lightning_egeria.freezing.pool import ReferencePool
from lightning_egeria.freezing.reference import ReferenceModel
from lightning_egeria.layers import FrozenPrefix, LayerChain


class HeldPool(ReferencePool):
    """Keeps the answers back until the test lets them go."""

    def __init__(self, chain, samples=64):
        super().__init__(
            functools.partial(ReferenceModel, chain, samples, "float32"),
            chain.entries,
            workers=0,
            threads_per_worker=1,
            timeout_s=60,
        )
        self.waiting, self.busy, self.fails = [], False, None

    def ready(self):
        return not self.busy

    def submit(self, evaluation, weights=None):
        held = Future()
        self.waiting.append((held, super().submit(evaluation, weights)))
        return held

    def answer(self):
        for held, future in self.waiting:
            if self.fails is not None:
                held.set_exception(self.fails)
            else:
                held.set_result(future.result())
        self.waiting = []


class Asked:
    """Answers with prepared decisions; remembers what it was told."""

    wants_reference, holds_reference = True, False

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

    def __init__(self, policy, batch_size=8, every=2, refresh=10, **arguments):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        chain = LayerChain.trace(self.net, lambda: self.net(torch.ones(2, 4)).sum())
        self.pool, self.policy, self.batch_size = HeldPool(chain), policy, batch_size
        self.prefix = FrozenPrefix(self.net, chain)
        self.engine = FreezingEngine(self.prefix, policy, self.pool, every, refresh, 64, **arguments)
        self.evaluations = self.engine.evaluations
        self.engine.refresh_reference()
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
                self.pool.answer()
        return self


@pytest.mark.parametrize(("wait_s", "heard"), [(0.0, [3, 5, 7]), (60.0, [4, 6, 8])])
def test_what_one_evaluation_says_is_heard_when_it_is_there_or_waited_for_always_at_the_next(wait_s, heard):
    run = Run(Asked(), wait_s=wait_s).steps(8)
    # The reference is made of the weights that were given, step 2 evaluates, and the answer comes after it.
    assert list(run.policy.plasticity()) == heard
    assert [step for step, *_ in run.policy.told] == list(range(1, 9))
    assert [step for step, _, _, loss in run.policy.told if loss is not None] == [2, 4, 6, 8]


def test_what_an_evaluation_in_this_thread_says_is_heard_at_once():
    run = Run(Asked({4: Decision(1, "test")}))
    run.pool.submit = functools.partial(ReferencePool.submit, run.pool)
    run.steps(8)
    assert list(run.policy.plasticity()) == [2, 4, 6, 8]
    assert [event.step for event in run.events] == [4]
    assert (run.evaluations.counts.late, run.evaluations.counts.dropped, run.evaluations.counts.done) == (0, 0, 4)


def test_a_late_answer_is_dropped_and_counted():
    run = Run(Asked()).steps(5, answers=False)
    run.pool.answer()
    run.steps(5)
    # What was asked at step 2 came after step 5, and so did what was asked at step 4.
    assert list(run.policy.plasticity()) == [6, 7, 9]
    assert (run.evaluations.counts.late, run.evaluations.counts.dropped, run.evaluations.counts.done) == (1, 0, 3)
    assert run.engine.evaluate_every_n_steps == 2


def test_two_late_answers_in_a_row_make_evaluations_rarer_if_that_is_allowed():
    run = Run(Asked(), adapt=True).steps(7, answers=False).steps(9)
    assert run.evaluations.counts.late == 2
    assert run.engine.evaluate_every_n_steps == 4
    assert [step for step, *_, loss in run.policy.told if loss is not None] == [2, 4, 6, 10, 14]
    assert ["now is 4 steps" in text for _, text in run.engine.messages if "interval" in text] == [True]


def test_an_evaluation_that_no_worker_is_free_for_is_dropped_and_counted():
    run = Run(Asked())
    run.pool.busy = True
    run.steps(5)
    run.pool.busy = False
    run.steps(5)
    assert list(run.policy.plasticity()) == [7, 9]
    assert run.evaluations.counts.dropped == 2


def test_with_more_in_flight_an_answer_has_as_many_intervals_time():
    run = Run(Asked(), in_flight=3).steps(7, answers=False)
    run.pool.answer()
    run.steps(5)
    # Those of steps 2, 4 and 6 came together.
    assert list(run.policy.plasticity()) == [8, 9, 10, 11, 12]
    assert run.evaluations.counts.late == 0


def test_a_deterministic_run_waits_for_the_answer():
    run = Run(Asked(), wait_s=60.0).steps(3, answers=False)
    threading.Timer(0.05, run.pool.answer).start()
    run.steps(1, answers=False)
    assert list(run.policy.plasticity()) == [4]


def test_a_deterministic_run_asks_for_nothing_that_a_decision_makes_void():
    run = Run(Asked({4: Decision(1, "test")}), wait_s=60.0).steps(3).steps(1, answers=False)
    assert [event.step for event in run.events] == [4]
    assert run.pool.waiting == []  # nobody would wait for it, and its worker would not be free at step 6
    assert list(run.steps(4).policy.plasticity()) == [4, 8]


def test_waiting_ends():
    run = Run(Asked(), wait_s=0.05).steps(4, answers=False)
    assert run.evaluations.counts.failed == 1
    assert "did not answer within 0.05 s" in run.engine.messages[0][1]


def test_failures_are_told_once_and_after_three_in_a_row_nothing_is_compared_any_longer():
    run = Run(Asked())
    run.pool.fails = WorkerError("broken")
    run.steps(5)
    run.pool.fails = None
    run.steps(3)
    assert (run.evaluations.counts.failed, run.evaluations.counts.done, run.evaluations.stopped) == (2, 1, False)
    run.pool.fails = WorkerError("broken")
    run.steps(20)
    assert (run.evaluations.counts.failed, run.evaluations.stopped, run.pool.has_snapshot) == (5, True, False)
    told = [text for level, text in run.engine.messages if level == logging.WARNING]
    assert len(told) == 2
    assert "failed: broken" in told[0]
    assert "3 times in a row" in told[1]


def test_a_failure_that_comes_late_is_told_too():
    run = Run(Asked()).steps(4, answers=False)
    run.pool.fails = WorkerError("killed")
    run.pool.answer()
    run.pool.fails = None
    run.steps(4)
    assert run.evaluations.counts.failed == 2  # the one that was late, and the one after it
    assert run.evaluations.counts.late == 1


def test_an_answer_about_another_prefix_version_is_dropped_and_counted():
    # Frozen after step 5: the evaluation of step 4 is on its way.
    run = Run(Asked({5: Decision(1, "test")})).steps(3).steps(2, answers=False).steps(5)
    assert list(run.policy.plasticity()) == [3, 7, 9]
    assert run.evaluations.counts.dropped == 1
    assert [(event.step, event.kind, event.depth, event.reason) for event in run.events] == [(5, "freeze", 1, "test")]


def test_plasticity_of_frozen_layer_modules_is_nan():
    run = Run(Asked({3: Decision(2, "test")})).steps(8)
    values = run.policy.plasticity()[7]
    assert [value != value for value in values] == [True, True, False]


def test_a_smaller_batch_is_an_evaluation_that_did_not_happen():
    run = Run(Asked()).steps(5).steps(1, batch_size=5).steps(4)
    assert list(run.policy.plasticity()) == [3, 5, 9]
    assert run.evaluations.counts.dropped == 1


def test_a_batch_of_one_says_nothing():
    run = Run(Asked(), batch_size=1).steps(10)
    assert run.policy.plasticity() == {}
    assert run.evaluations.counts.done == 0


@pytest.mark.parametrize(("refresh", "ages"), [(1, [2, 2, 2, 2]), (2, [2, 4, 2, 4]), (10, [2, 4, 6, 8])])
def test_the_reference_is_taken_anew_after_so_many_evaluations(refresh, ages):
    run, taken = Run(Asked(), refresh=refresh), [0]
    for _ in range(5):
        run.steps(2)
        if run.engine.reference_age == 0:
            taken.append(run.step)
    assert [step - max(snapshot for snapshot in taken if snapshot < step) for step in (2, 4, 6, 8)] == ages


def test_the_reference_stays_while_the_policy_holds_it():
    run = Run(Asked(), refresh=1)
    ages = []
    for holds in (False, True, True, False, False):
        run.policy.holds_reference = holds
        ages.append(run.steps(2).engine.reference_age)
    assert ages == [0, 1, 2, 0, 0]


def test_no_reference_while_the_policy_wants_none():
    policy = Asked()
    policy.wants_reference = False
    run = Run(policy).steps(6)
    assert not run.engine.pool.has_snapshot
    assert run.policy.plasticity() == {}


def test_close_leaves_the_model_as_it_was():
    run = Run(Asked({3: Decision(2, "test")})).steps(5)
    run.engine.begin_step(run.step)
    run.engine.close()
    run.engine.close()
    assert all(parameter.requires_grad for parameter in run.net.parameters())
    assert not any("forward" in vars(module) for module in run.net.modules())
